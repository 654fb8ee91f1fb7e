"""What text-generation-webui and the clients made for it, such as SillyTavern, call fields of OpenAI's bodies.

Such clients write for many servers at once: they say one thing under several names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.lengths import Truncation
from penstock.server.sampler_fields import within
from penstock.server.sampling import MaxTokens
from penstock.server.shapes import RequestBody, StopString

_Stops = Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)]


class WebuiBody(RequestBody):
    """Fields of chat and text completions."""

    do_sample: bool | None = None
    dynamic_temperature: bool | None = None
    dynatemp_low: Annotated[float, within("temperature")] | None = None
    dynatemp_high: Annotated[float, within("temperature")] | None = None
    ban_eos_token: bool | None = None
    add_bos_token: bool | None = None
    grammar_string: str | None = None
    stopping_strings: _Stops | None = None
    max_new_tokens: MaxTokens = None
    n_predict: MaxTokens = None
    truncation_length: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None

    @model_validator(mode="after")
    def _said_under_our_names(self) -> Self:
        for name, value in under_our_names(self).items():
            setattr(self, name, value)
        return self


class WebuiChatBody(WebuiBody):
    """Fields of chats."""

    enable_thinking: bool | None = None
    instruction_template_str: str | None = None
    chat_template_str: str | None = None
    continue_: bool | None = None


_OURS: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "ban_eos_token": ("ignore_eos", lambda banned: banned or None),
        "add_bos_token": ("add_special_tokens", lambda added: None if added else False),
        "grammar_string": ("grammar", lambda text: text or None),
        "stopping_strings": ("stop", lambda texts: texts or None),
        "max_new_tokens": ("max_tokens", int),
        "n_predict": ("max_tokens", int),
        "instruction_template_str": ("chat_template", lambda text: text or None),
        "chat_template_str": ("chat_template", lambda text: text or None),
        "continue_": ("continue_final_message", lambda wanted: wanted or None),
    }
)
"""By their name, ours, and what a value is here; None says nothing."""


def names_of_theirs(body: WebuiBody) -> dict[str, str]:
    """By our names, those under which a body said the same; see `param_names`."""
    given = {name: getattr(body, name, None) for name in _OURS}
    return {
        _OURS[name][0]: name for name, said in given.items() if said is not None and _OURS[name][1](said) is not None
    }


def under_our_names(body: WebuiBody) -> dict[str, Any]:
    """What a body says under these names, by ours, so that whoever reads or checks it knows of ours alone.

    `do_sample: false` and `dynamic_temperature: true` count for more than a temperature, as they do there.

    Raises:
        ParameterError: one thing said twice, and differently.
    """
    found: dict[str, Any] = {}
    for name, (ours, value) in _OURS.items():
        said = getattr(body, name, None)
        meant = None if said is None else value(said)
        if meant is None:
            continue
        other = found.get(ours, getattr(body, ours))
        if other is not None and other != meant:
            raise ParameterError(name, said, f"one of {name} and {ours}, which say the same, or one value of both")
        found[ours] = meant
    if body.do_sample is False:
        found["temperature"] = 0.0
    elif body.dynamic_temperature:
        found |= {"dynatemp_min": body.dynatemp_low, "dynatemp_max": body.dynatemp_high}
    found |= _cut(body, found)
    if isinstance(body, WebuiChatBody):
        found |= _of_chat(body, found)
    return found


def _cut(body: WebuiBody, found: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt's length, of that of prompt and answer; ours counts where it is said."""
    if not body.truncation_length or getattr(body, "truncate_prompt_tokens", None) is not None:
        return {}
    answer = found.get("max_tokens", getattr(body, "max_tokens", None)) or 0
    return {"truncate_prompt_tokens": max(1, body.truncation_length - answer)}


def within_context(
    requests: tuple[GenerationRequest, ...], body: WebuiBody, context: int | None
) -> tuple[GenerationRequest, ...]:
    """The requests of a body whose `truncation_length` may be more than the model has: then all it has is meant."""
    if not body.truncation_length or context is None:
        return requests
    return tuple(replace(request, truncation=_most(request.truncation, context)) for request in requests)


def _most(cut: Truncation | None, context: int) -> Truncation | None:
    """A cut to no more than the context takes."""
    beyond = cut is not None and cut.tokens is not None and cut.tokens > context
    return replace(cut, tokens=None) if cut is not None and beyond else cut


def _of_chat(body: WebuiChatBody, found: Mapping[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if "continue_final_message" in found:
        more["add_generation_prompt"] = False
    if body.enable_thinking is not None:
        said = getattr(body, "chat_template_kwargs", None) or {}
        more["chat_template_kwargs"] = {"enable_thinking": body.enable_thinking, **said}
    return more
