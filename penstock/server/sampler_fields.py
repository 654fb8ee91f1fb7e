"""The samplers as fields of bodies: under the names they have here, and under those of the servers they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.samplers import RANGES, SAMPLERS, check_token_ids, order_names, priority_names, sampler_names
from penstock.server.shapes import RequestBody, StopPatterns, TokenId, TokenIds, or_null, whole

_NAMES = sorted({name for sampler in SAMPLERS for name in (sampler.name, *sampler.names)})
_LIST = {"type": "array", "items": {"enum": _NAMES}, "maxItems": limits.MAX_SAMPLERS}
_Names = Annotated[
    list[Annotated[str, Field(max_length=limits.MAX_SAMPLER_CHARS)]], Field(max_length=limits.MAX_SAMPLERS)
]
_Text = Annotated[str, Field(max_length=limits.MAX_ORDER_CHARS)]
_LETTERS = {"type": "string", "pattern": "^[edskypmxta]{0,16}$"}
Samplers = Annotated[_Names | _Text, WithJsonSchema({"anyOf": [_LIST, _LETTERS, {"enum": _NAMES}]})]
Priority = Annotated[_Names | _Text, WithJsonSchema({"anyOf": [_LIST, {"enum": _NAMES}]})]
Order = Annotated[
    list[Annotated[int, Field(ge=0, le=6)]], Field(max_length=limits.MAX_SAMPLERS), BeforeValidator(whole)
]
Breaker = Annotated[str, Field(min_length=1, max_length=limits.MAX_BREAKER_CHARS)]
Breakers = Annotated[list[Breaker], Field(max_length=limits.MAX_BREAKERS)] | _Text
BannedText = Annotated[str, Field(min_length=1, max_length=limits.MAX_BANNED_STRING_CHARS)]
BannedTexts = BannedText | Annotated[list[BannedText], Field(max_length=limits.MAX_BANNED_STRINGS)]
BannedTokens = Annotated[
    list[TokenId | BannedText], Field(max_length=limits.MAX_BAD_WORD_TOKENS), BeforeValidator(whole)
]
PROCESSOR = {"type": "string", "pattern": r"^[\w.:/-]{1,128}$"}
_ARGUMENTS = {"args": or_null({"type": "array"}), "kwargs": or_null({"type": "object"})}
_CALLS: list[dict[str, Any]] = [
    {
        "type": "object",
        "required": [name],
        "properties": {name: PROCESSOR, **_ARGUMENTS},
        "additionalProperties": False,
    }
    for name in ("name", "qualname")
]
Processors = Annotated[
    list[Annotated[str, Field(max_length=128)] | dict[str, Any]],
    Field(max_length=limits.MAX_LOGITS_PROCESSORS),
    WithJsonSchema(
        {"type": "array", "items": {"anyOf": [PROCESSOR, *_CALLS]}, "maxItems": limits.MAX_LOGITS_PROCESSORS}
    ),
]


def within(name: str) -> Any:
    """Annotates a field with the range of a sampler's parameter."""
    allowed = RANGES[name]
    return Field(gt=allowed.low, le=allowed.high) if allowed.above else Field(ge=allowed.low, le=allowed.high)


class SamplerBody(RequestBody):
    """Samplers that OpenAI has not, and other names of those that `SamplingBody` has."""

    samplers: Samplers | None = None
    temperature_last: bool | None = None
    repeat_last_n: Annotated[int, within("repeat_last_n")] | None = None
    repetition_decay: Annotated[int, within("repetition_decay")] | None = None
    no_repeat_ngram_size: Annotated[int, within("no_repeat_ngram_size")] | None = None
    dry_multiplier: Annotated[float, within("dry_multiplier")] | None = None
    dry_base: Annotated[float, within("dry_base")] | None = None
    dry_allowed_length: Annotated[int, within("dry_allowed_length")] | None = None
    dry_penalty_last_n: Annotated[int, within("dry_penalty_last_n")] | None = None
    dry_sequence_breakers: Breakers | None = None
    stop_regex: StopPatterns | None = None
    logits_processors: Processors | None = None
    watermark: bool | None = None
    watermark_gamma: Annotated[float, within("watermark_gamma")] | None = None
    watermark_delta: Annotated[float, within("watermark_delta")] | None = None
    top_n_sigma: Annotated[float, within("top_n_sigma")] | None = None
    dynatemp_range: Annotated[float, within("dynatemp_range")] | None = None
    dynatemp_exponent: Annotated[float, within("dynatemp_exponent")] | None = None
    smoothing_factor: Annotated[float, within("smoothing_factor")] | None = None
    smoothing_curve: Annotated[float, within("smoothing_curve")] | None = None
    top_a: Annotated[float, within("top_a")] | None = None
    tfs: Annotated[float, within("tfs")] | None = None
    epsilon_cutoff: Annotated[float, within("epsilon_cutoff")] | None = None
    eta_cutoff: Annotated[float, within("eta_cutoff")] | None = None
    xtc_probability: Annotated[float, within("xtc_probability")] | None = None
    xtc_threshold: Annotated[float, within("xtc_threshold")] | None = None
    adaptive_target: Annotated[float, within("adaptive_target")] | None = None
    adaptive_decay: Annotated[float, within("adaptive_decay")] | None = None
    mirostat: Annotated[int, within("mirostat")] | None = None
    mirostat_tau: Annotated[float, within("mirostat_tau")] | None = None
    mirostat_eta: Annotated[float, within("mirostat_eta")] | None = None
    banned_strings: BannedTexts | None = None
    guidance_scale: Annotated[float, Field(ge=limits.GUIDANCE_SCALES[0], le=limits.GUIDANCE_SCALES[1])] | None = None
    negative_prompt: str | None = None
    token_healing: bool | None = None

    # Other servers' names.
    banned_tokens: BannedTokens | None = None
    custom_token_bans: Annotated[TokenIds, Field(max_length=limits.MAX_BAD_WORD_TOKENS)] | _Text | None = None
    sampler_priority: Priority | None = None
    sampler_order: Order | None = None
    repeat_penalty: Annotated[float, within("repetition_penalty")] | None = None
    penalty_range: Annotated[int, within("repeat_last_n")] | None = None
    repetition_penalty_range: Annotated[int, within("repeat_last_n")] | None = None
    dry_range: Annotated[int, within("dry_penalty_last_n")] | None = None
    nsigma: Annotated[float, within("top_n_sigma")] | None = None
    typical: Annotated[float, within("typical_p")] | None = None
    tfs_z: Annotated[float, Field(ge=0)] | None = None
    mirostat_mode: Annotated[int, within("mirostat")] | None = None
    dynatemp_min: Annotated[float, within("temperature")] | None = None
    dynatemp_max: Annotated[float, within("temperature")] | None = None
    cfg_scale: Annotated[float, Field(ge=limits.GUIDANCE_SCALES[0], le=limits.GUIDANCE_SCALES[1])] | None = None
    cfg_negative_prompt: str | None = None


def _all_for_nothing(tokens: int) -> int:
    """A range of which 0 says all."""
    return tokens or -1


def tail_free(z: float) -> float:
    """The value here of a `tfs_z`, which keeps all from 1 on."""
    return min(z, 1.0)


def breaker_texts(text: str) -> list[str]:
    """DRY's breakers as text-generation-webui's clients send them: a JSON list in a text, its brackets left out or not.

    Raises:
        ParameterError: it is none.
    """
    written = text.strip()
    try:
        found = json.loads(written if written.startswith("[") else f"[{written}]")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        allowed = 'a list of strings, or a text that holds one as JSON, such as "\\n", ":"'
        raise ParameterError("dry_sequence_breakers", text, allowed)
    return found


_OURS: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "sampler_priority": ("samplers", priority_names),
        "sampler_order": ("samplers", order_names),
        "repeat_penalty": ("repetition_penalty", float),
        "penalty_range": ("repeat_last_n", int),
        "repetition_penalty_range": ("repeat_last_n", _all_for_nothing),
        "dry_range": ("dry_penalty_last_n", _all_for_nothing),
        "nsigma": ("top_n_sigma", float),
        "typical": ("typical_p", float),
        "tfs_z": ("tfs", tail_free),
        "mirostat_mode": ("mirostat", int),
        "cfg_scale": ("guidance_scale", float),
        "cfg_negative_prompt": ("negative_prompt", str),
    }
)
"""By another server's name, ours, and what its values are here."""
_PAIR = ("dynatemp_min", "dynatemp_max")
_BANS = ("banned_strings", "banned_tokens", "custom_token_bans")
_FIELDS = tuple(SamplerBody.model_fields.keys() - RequestBody.model_fields.keys())


def sampler_options(body: SamplerBody) -> dict[str, Any]:
    """What a body says of samplers, under the names of SamplingParams.

    Raises:
        ParameterError: a name that no sampler has, or one thing said twice.
    """
    said = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    found: dict[str, Any] = {name: said[name] for name in said if name not in (*_OURS, *_PAIR, *_BANS)}
    if "samplers" in found:
        found["samplers"] = sampler_names(found["samplers"])
    if isinstance(found.get("dry_sequence_breakers"), str):
        found["dry_sequence_breakers"] = breaker_texts(found["dry_sequence_breakers"])
    for name, (ours, value) in _OURS.items():
        if name not in said:
            continue
        meant = value(said[name])
        other = found.get(ours, getattr(body, ours, None))
        if other is not None and other not in (meant, said[name]):  # clients that write for many servers say both
            raise ParameterError(
                name, said[name], f"one of {name} and {ours}, which say the same, or one value of both"
            )
        found[ours] = meant
    if said.keys() & set(_PAIR):
        found |= _between(said)
    return found | _bans(said)


def _bans(said: Mapping[str, Any]) -> dict[str, Any]:
    """Banned texts and tokens: of `banned_tokens` numbers are TabbyAPI's and texts KoboldCpp's."""
    strings = said.get("banned_strings", ())
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    strings += tuple(one for one in said.get("banned_tokens", ()) if isinstance(one, str))
    ids = [one for one in said.get("banned_tokens", ()) if isinstance(one, int)]
    custom = said.get("custom_token_bans", ())
    ids += _numbers("custom_token_bans", custom) if isinstance(custom, str) else custom
    found: dict[str, Any] = {"banned_strings": strings} if strings else {}
    return found | ({"bad_words_ids": tuple((token,) for token in dict.fromkeys(ids))} if ids else {})


def _numbers(name: str, text: str) -> list[int]:
    """Token ids as text-generation-webui's clients write them, with commas between them."""
    try:
        ids = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ParameterError(name, text, "a list of token ids, or a text of them with commas between them") from None
    check_token_ids(name, tuple(ids), limits.MAX_BAD_WORD_TOKENS)
    return ids


def _between(said: Mapping[str, Any]) -> dict[str, float]:
    """Temperature and range of Aphrodite's `dynatemp_min` and `dynatemp_max`, where 0 and 0 say nothing."""
    low, high = said.get("dynatemp_min"), said.get("dynatemp_max")
    if low == 0 and high == 0:
        return {}
    if low is None or high is None or low > high:
        raise ParameterError("dynatemp_min", low, f"a number up to dynatemp_max ({high}), and both of them")
    extent = (high - low) / 2
    if said.get("dynatemp_range", extent) != extent:
        allowed = f"left out, or {extent}: dynatemp_min and dynatemp_max, which say the same, are so far apart"
        raise ParameterError("dynatemp_range", said["dynatemp_range"], allowed)
    return {"temperature": (low + high) / 2, "dynatemp_range": extent}
