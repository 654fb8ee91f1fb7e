"""TGI bodies to internal requests. Pure: no engine, no I/O."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.errors import ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.dialects.tgi.schema import TgiBody, TgiParameters
from penstock.server.errors import bad_value
from penstock.server.structured import schema_grammar

_SAME = ("temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p", "watermark")
_DRAWS = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0}  # at any other value, tokens are drawn
_SEED_BITS = 53  # what every JSON reader can hold
SENT: Mapping[str, str] = MappingProxyType(
    {
        **{
            name: f"parameters.{name}"
            for name in (*_SAME, "stop", "seed", "best_of", "grammar", "decoder_input_details")
        },
        "max_tokens": "parameters.max_new_tokens",
        "logprobs": "parameters.top_n_tokens",
        "prompt": "inputs",
        "prompt_ids": "inputs",
    }
)
"""What the client sent for fields of the internal request."""


@dataclass(frozen=True, slots=True)
class TgiCall:
    """A translated call.

    Attributes:
        request: what to run.
        stream: whether the answer comes in events.
        details: whether tokens and the end are told besides the text.
        prefill: whether the prompt's tokens are.
        full_text: the prompt as it was sent, with which the text begins; "" where it does not.
        top_tokens: alternatives to report with each token.
        best_of: sequences of which the best is told first; None for one.
        seed: of the draw; None where nothing is drawn.
    """

    request: GenerationRequest
    stream: bool
    details: bool
    prefill: bool
    full_text: str
    top_tokens: int
    best_of: int | None
    seed: int | None


def tgi_call(body: TgiBody, defaults: Mapping[str, Any], *, stream: bool) -> TgiCall:
    """Translates a call; of the model's own `defaults` only the ends of answers count, as in TGI.

    Raises:
        RequestError: a value or a combination that is not served.
    """
    given = body.parameters or TgiParameters(do_sample=True)  # without any parameters TGI draws
    sampled = bool(given.do_sample or given.top_k)
    sampled = sampled or any(getattr(given, name) not in (None, value) for name, value in _DRAWS.items())
    best_of = given.best_of if given.best_of != 1 else None
    _check_best_of(given, sampled=sampled, stream=stream)
    if stream and given.decoder_input_details:
        raise ParameterError("decoder_input_details", True, "false with stream: true")
    details = bool(given.details or given.decoder_input_details)
    seed = given.seed
    if seed is None and sampled:
        seed = secrets.randbits(_SEED_BITS)  # which the answer tells, so that it can be had again
    chosen = {name: value for name in _SAME if (value := getattr(given, name)) is not None}
    chosen["temperature"] = (given.temperature or 1.0) if sampled else 0.0
    sampling = SamplingParams(
        **chosen,
        n=best_of or 1,
        seed=seed,
        max_tokens=given.max_new_tokens,
        stop=tuple(given.stop or defaults.get("stop", ())),
        include_stop_str_in_output=True,
        logprobs=(given.top_n_tokens or 0) if details or stream else None,
        prompt_logprobs=0 if given.decoder_input_details else None,
    )
    request = GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=sampling,
        prompt=body.inputs,
        add_special_tokens=body.add_special_tokens,
        grammar=_grammar(given.grammar),
    )
    return TgiCall(
        request=request,
        stream=stream,
        details=details,
        prefill=bool(given.decoder_input_details),
        full_text=body.inputs if given.return_full_text else "",
        top_tokens=given.top_n_tokens or 0,
        best_of=best_of,
        seed=seed if sampled else None,
    )


def in_tokens(call: TgiCall, ids: tuple[int, ...], truncate: int | None) -> TgiCall:
    """The call with its prompt in tokens, of which the last `truncate` are left."""
    kept = ids if truncate is None else ids[-truncate:]
    return replace(call, request=replace(call.request, prompt=None, prompt_ids=kept))


def _check_best_of(given: TgiParameters, *, sampled: bool, stream: bool) -> None:
    if (given.best_of or 1) == 1:
        return
    if not sampled:
        raise ParameterError("best_of", given.best_of, "1 without sampling; send do_sample: true")
    if given.seed is not None:
        raise ParameterError("best_of", given.best_of, "1 with a seed; leave one of them out")
    if stream:
        raise ParameterError("best_of", given.best_of, "1 with stream: true, as answers are ranked when all are there")


def _grammar(given: Mapping[str, Any] | None) -> Grammar | None:
    """What the answer is held to, from its kind and its value.

    Raises:
        RequestError: it is of no known kind, or no such value.
    """
    if given is None:
        return None
    kind, value = given.get("type"), given.get("value")
    where = "parameters.grammar.value"
    if kind == "json":
        return schema_grammar(value, where).grammar
    if kind == "json_schema":
        if not isinstance(value, dict):
            raise bad_value(where, value, "an object with name and schema")
        return schema_grammar(value.get("schema"), f"{where}.schema").grammar
    if kind == "regex":
        if not isinstance(value, str):
            raise bad_value(where, value, "a regular expression")
        return Grammar(GrammarKind.REGEX, value)
    raise bad_value("parameters.grammar.type", kind, '"json", "regex" or "json_schema"')
