"""Kobold bodies to the internal request. Pure: no engine, no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from penstock.config import limits
from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.errors import ContextLengthError, ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.dialects.kobold.schema import KoboldBody
from penstock.server.errors import Unavailable, refuse_unavailable
from penstock.server.prompts import cache_salt
from penstock.server.sampler_fields import sampler_options
from penstock.server.sampling import least

DEFAULT_LENGTH = 768
"""Tokens of an answer that does not say, KoboldCpp's."""
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.75, "top_k": 100, "top_p": 0.92, "repeat_last_n": 320}
)  # KoboldCpp's
_PROMPT_ROOM = 16  # tokens that an answer leaves to the prompt, as in KoboldCpp
_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty")
_UNAVAILABLE: Unavailable = {"images": (([],), "Media are not available; leave it out.")}
SENT: Mapping[str, str] = MappingProxyType(
    {
        "repetition_penalty": "rep_pen",
        "repeat_last_n": "rep_pen_range",
        "seed": "sampler_seed",
        "stop": "stop_sequence",
        "max_tokens": "max_length",
        "banned_strings": "banned_tokens",
    }
)
"""What the client sent for fields of the internal request."""


@dataclass(frozen=True, slots=True)
class KoboldCall:
    """A translated call: what to run, and the name under which the answer is asked for and ended."""

    request: GenerationRequest
    genkey: str


def kobold_call(
    body: KoboldBody, prompt: tuple[int, ...], memory: tuple[int, ...], room: int, defaults: Mapping[str, Any]
) -> KoboldCall:
    """Translates a call.

    The answer's tokens are kept free; what the context then has no room for is left out at the prompt's beginning,
    behind the memory, as Kobold's clients expect.

    Args:
        body: the client's.
        prompt: its tokens.
        memory: those of what stays in front of it.
        room: tokens of the model's context.
        defaults: the model's own sampling parameters.

    Raises:
        RequestError: a value that is not served, or a memory that leaves no room.
    """
    refuse_unavailable(body, _UNAVAILABLE)
    context = min(body.max_context_length or room, room)
    length = body.max_length or min(DEFAULT_LENGTH, max(1, context // 2))
    length = min(length, context - min(context - 4, _PROMPT_ROOM))
    kept = context - length - len(memory)
    if kept < 1:
        told = f"max_length ({length}) and the memory ({len(memory)} tokens) leave no room for the prompt in a context"
        raise ContextLengthError(
            f"{told} of {context} tokens. Lower max_length or shorten the memory.", param="max_length"
        )
    request = GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=replace(sampling_of(body, defaults), max_tokens=length),
        prompt_ids=(*memory, *prompt[-kept:]),
        grammar=Grammar(GrammarKind.GBNF, body.grammar) if body.grammar else None,
        priority=body.priority or 0,
        cache_salt=cache_salt(body),
    )
    return KoboldCall(request, body.genkey or "")


def sampling_of(body: KoboldBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """The client's fields over the model's own over KoboldCpp's.

    Raises:
        RequestError: a value that is not served.
    """
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    given |= sampler_options(body)
    for name, ours, value in (
        ("rep_pen", "repetition_penalty", body.rep_pen),
        ("rep_pen_range", "repeat_last_n", None if body.rep_pen_range is None else body.rep_pen_range or -1),
    ):
        if value is not None and ours in given:
            raise ParameterError(name, value, f"one name of {ours}; leave the other out")
        if value is not None:
            given[ours] = value
    chosen = {**_DEFAULTS, **defaults, **given}
    chosen["top_p"] = least(chosen["top_p"])
    told = tuple(word for word in body.stop_sequence or () if word)[: limits.MAX_STOP_STRINGS]
    stop = told or tuple(chosen.pop("stop", ()))
    chosen.pop("stop", None)
    return SamplingParams(
        **chosen,
        n=body.n or 1,
        seed=None if body.sampler_seed in (None, -1) else body.sampler_seed,
        stop=stop,
        include_stop_str_in_output=body.trim_stop is False,
        ignore_eos=bool(body.bypass_eos or body.use_default_badwordsids),
        skip_special_tokens=not body.render_special,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
    )
