"""SGLang bodies to internal requests. Pure: no engine, no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.config import limits
from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.errors import ParameterError, RequestError
from penstock.config.generation import GenerationRequest
from penstock.config.logits_processors import ProcessorCall, as_calls
from penstock.config.sampling import SamplingParams
from penstock.server.dialects.sglang.schema import SglangBody, SglangParams, SglangPoolingBody
from penstock.server.errors import bad_value
from penstock.server.prompts import prompts_of
from penstock.server.structured import asked, object_grammar, schema_grammar

_DEFAULT_TOKENS = 128  # SGLang's
_ANY_JSON = "$$ANY$$"
_PROCESSOR = "custom_logit_processor"
_SAME = (
    *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n"),
    *("ignore_eos", "skip_special_tokens"),
)
_WHERE = "sampling_params"
SENT: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"{_WHERE}.{name}" for name in (*_SAME, "top_k", "stop", "stop_token_ids", "logit_bias")},
        "stop_regex": f"{_WHERE}.stop_regex",
        "max_tokens": f"{_WHERE}.max_new_tokens",
        "min_tokens": f"{_WHERE}.min_new_tokens",
        "seed": f"{_WHERE}.sampling_seed",
        "logits_processors": _PROCESSOR,
        "logprobs": "top_logprobs_num",
        "prompt": "text",
        "prompt_ids": "input_ids",
        "request_id": "rid",
    }
)
"""What the client sent for fields of the internal request."""
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of one prompt's answer.

    Attributes:
        name: the prompt's `rid`.
        logprobs: whether log-probabilities are.
        start: the first position of the prompt that they are told of, -1 for none.
        top: alternatives with each token.
        no_output: the prompt alone is wanted (max_new_tokens 0).
        processor: the name of what changes its logits, None for nothing.
    """

    name: str
    logprobs: bool
    start: int
    top: int
    no_output: bool
    processor: str | None = None


@dataclass(frozen=True, slots=True)
class SglangCall:
    """A translated call.

    Attributes:
        requests: one a prompt.
        told: of each.
        n: answers a prompt.
        listed: whether the answer is a list.
        texts: whether tokens are told with their texts in log-probabilities.
        prompt_ids: whether the prompt's tokens are told.
    """

    requests: tuple[GenerationRequest, ...]
    told: tuple[Told, ...]
    n: int
    listed: bool
    texts: bool
    prompt_ids: bool


def given_prompts(body: SglangBody | SglangPoolingBody) -> Sequence[str | Sequence[int]]:
    """The prompts of a body.

    Raises:
        RequestError: not exactly one of the two fields is given, or not prompts.
    """
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Send exactly one of text and input_ids.", param="text", code="invalid_value")
    field = "input_ids" if body.text is None else "text"
    given = getattr(body, field)
    prompts = prompts_of(given, field)
    if isinstance(prompts[0], str) != (field == "text"):
        allowed = "a text, or a list of texts" if field == "text" else "token ids, or a list of such lists"
        raise bad_value(field, given, allowed)
    return prompts


def is_many(body: SglangBody | SglangPoolingBody) -> bool:
    """Whether a body has a list of prompts, which may be a list of one."""
    given = body.text if body.text is not None else body.input_ids
    return isinstance(given, list) and (body.text is not None or isinstance(given[0], list))


def sglang_call(body: SglangBody, defaults: Mapping[str, Any]) -> SglangCall:
    """Translates a call; of the model's own `defaults` only the ends of answers count, as in SGLang.

    Raises:
        RequestError: a value or a combination that is not served.
    """
    prompts = given_prompts(body)
    count = len(prompts)
    params = _each(body.sampling_params or SglangParams(), count, _WHERE)
    several = {each.n or 1 for each in params}
    if len(several) > 1:
        raise ParameterError(f"{_WHERE}.n", sorted(several), "the same for all prompts of a call")
    (n,) = several
    if n * count > limits.MAX_PROMPTS_PER_CALL:
        raise ParameterError(f"{_WHERE}.n", n, f"n times the number of prompts at most {limits.MAX_PROMPTS_PER_CALL}")
    names = names_of(body, count)
    logprobs = _each(
        bool(body.return_logprob) if body.return_logprob is None else body.return_logprob, count, "return_logprob"
    )
    starts = _each(-1 if body.logprob_start_len is None else body.logprob_start_len, count, "logprob_start_len")
    tops = _each(body.top_logprobs_num or 0, count, "top_logprobs_num")
    processors = _each(body.custom_logit_processor, count, _PROCESSOR)
    told = tuple(
        Told(
            names[place],
            logprobs[place],
            starts[place],
            tops[place],
            params[place].max_new_tokens == 0,
            processors[place],
        )
        for place in range(count)
    )
    requests = tuple(
        GenerationRequest(
            request_id=about.name,
            sampling=_sampling(params[place], about, defaults),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=None if isinstance(prompt, str) else tuple(prompt),
            priority=-(body.priority or 0),  # the larger goes first there
            cache_salt=body.extra_key or "",
            grammar=_grammar(params[place]),
        )
        for place, (prompt, about) in enumerate(zip(prompts, told, strict=True))
    )
    return SglangCall(
        requests=requests,
        told=told,
        n=n,
        listed=is_many(body) or n > 1,
        texts=bool(body.return_text_in_logprobs),
        prompt_ids=bool(body.return_prompt_token_ids),
    )


def _each(given: _Value | list[_Value], count: int, field: str) -> list[_Value]:
    """A value for each prompt: the one there is, or that of a list.

    Raises:
        ParameterError: the list is of another length.
    """
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise ParameterError(field, f"{len(given)} values", f"one, or as many as there are prompts ({count})")
    return given


def names_of(body: SglangBody | SglangPoolingBody, count: int) -> list[str]:
    """The ids of all prompts; one id of many is what theirs begin with.

    Raises:
        ParameterError: there are more or fewer than prompts, or two are the same.
    """
    if body.rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(body.rid, str) and is_many(body):
        return [f"{body.rid}_{place}" for place in range(count)]
    names = _each(body.rid, count, "rid")
    if len(set(names)) < count:
        raise ParameterError("rid", names[0], "ids that differ from each other")
    return names


def _sampling(params: SglangParams, told: Told, defaults: Mapping[str, Any]) -> SamplingParams:
    chosen = {name: value for name in _SAME if (value := getattr(params, name)) is not None}
    if not params.keeps_all:
        chosen["top_k"] = params.top_k
    wanted = _DEFAULT_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    patterns = [params.stop_regex] if isinstance(params.stop_regex, str) else params.stop_regex or []
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or defaults.get("stop", ()))
    scored = told.logprobs and told.start >= 0
    return SamplingParams(
        **chosen,
        max_tokens=max(wanted, 1),
        min_tokens=params.min_new_tokens or 0,
        stop=stop,
        stop_regex=tuple(filter(None, patterns)),  # SGLang's clients send "" for none
        stop_token_ids=tuple(params.stop_token_ids or ()),
        include_stop_str_in_output=bool(params.no_stop_trim),
        logit_bias=tuple((int(token), bias) for token, bias in (params.logit_bias or {}).items()),
        seed=params.sampling_seed,
        logprobs=told.top if told.logprobs and not told.no_output else None,
        prompt_logprobs=told.top if scored else None,
        prompt_logprobs_start=told.start + 1 if scored else 0,
        logits_processors=_processors(told.processor, params.custom_params),
    )


def _processors(name: str | None, arguments: Mapping[str, Any] | None) -> tuple[ProcessorCall, ...]:
    """The processor that a prompt names, with what it is given by name.

    Raises:
        RequestError: it is code, or there are arguments of none.
    """
    if name is None:
        if arguments:
            allowed = f"{{}}, or the arguments of a registered processor that {_PROCESSOR} names"
            raise ParameterError(f"{_WHERE}.custom_params", arguments, allowed)
        return ()
    if name.lstrip().startswith("{"):
        message = (
            f"{_PROCESSOR} holds code, which is never run here: a processor is registered when the server starts, "
            "with --logits-processors name=module:function; send its name."
        )
        raise RequestError(message, param=_PROCESSOR, code="unsupported_parameter")
    return as_calls([{"name": name, "kwargs": arguments}])


def _grammar(params: SglangParams) -> Grammar | None:
    """What the answer is held to.

    Raises:
        RequestError: several fields say it, or one is not of its form.
    """
    fields = [name for name in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(params, name) is not None]
    if len(fields) > 1:
        message = f"{fields[0]} and {fields[1]} both say what form the answer has; send one of them."
        raise RequestError(message, param=f"{_WHERE}.{fields[1]}", code="contradicting_fields")
    if params.json_schema == _ANY_JSON:
        return object_grammar(f"{_WHERE}.json_schema").grammar
    if params.json_schema is not None:
        return schema_grammar(params.json_schema, f"{_WHERE}.json_schema").grammar
    if params.regex is not None:
        return Grammar(GrammarKind.REGEX, params.regex)
    if params.ebnf is not None:
        return Grammar(GrammarKind.GBNF, params.ebnf)
    wish = asked({"structured_outputs": {"structural_tag": params.structural_tag}}) if fields else None
    return wish.grammar if wish else None
