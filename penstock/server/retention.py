"""How long what a request computes is to stay in the cache, as TensorRT-LLM, LMDeploy, OpenAI and Anthropic say it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.retention import NO_RETENTION, Retention, TokenRange, kept_for
from penstock.server.shapes import Exact

_MOST_RANGES: Final = 64
_MOST_MS: Final = 30 * 24 * 3600 * 1000
_PRESERVED_S: Final = 600.0
_HOSTED: Final = {"24h": 24 * 3600.0}  # OpenAI's; "in_memory" is what is done in any case
_MARKED: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}  # Anthropic's

Priority = Annotated[int, Field(ge=0, le=100)]
Milliseconds = Annotated[int, Field(ge=1, le=_MOST_MS)]
Position = Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)]


class TokenRangeRetention(Exact):
    """Tokens of the prompt, from `token_start` to before `token_end` (null: to its end), and how dear they are."""

    token_start: Position
    token_end: Position | None = None
    priority: Priority
    duration_ms: Milliseconds | None = None


class RetentionConfig(Exact):
    """Blocks of lower priorities, of 0 to 100, are evicted first; what nothing is said of has 35."""

    token_range_retention_configs: Annotated[list[TokenRangeRetention], Field(max_length=_MOST_RANGES)] | None = None
    decode_retention_priority: Priority | None = None
    decode_duration_ms: Milliseconds | None = None


def retention_of(body: Any) -> Retention:
    """What a body says in any of the ways that it has.

    Raises:
        ParameterError: a range ends before it begins.
    """
    config: RetentionConfig | None = getattr(body, "kv_cache_retention_config", None)
    if config is not None:
        return _configured(config)
    if getattr(body, "preserve_cache", None):
        return kept_for(_PRESERVED_S)
    seconds = _HOSTED.get(getattr(body, "prompt_cache_retention", None) or "")
    return NO_RETENTION if seconds is None else kept_for(seconds)


def _configured(config: RetentionConfig) -> Retention:
    ranges = []
    for place, one in enumerate(config.token_range_retention_configs or ()):
        if one.token_end is not None and one.token_end <= one.token_start:
            field = f"kv_cache_retention_config.token_range_retention_configs[{place}].token_end"
            raise ParameterError(field, one.token_end, f"more than token_start ({one.token_start}), or null")
        ranges.append(TokenRange(one.token_start, one.token_end, one.priority, _seconds(one.duration_ms)))
    answer = None
    if config.decode_retention_priority is not None:
        answer = TokenRange(0, None, config.decode_retention_priority, _seconds(config.decode_duration_ms))
    return Retention(tuple(ranges), answer) if ranges or answer else NO_RETENTION


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def marked_retention(parts: Iterable[Mapping[str, Any]]) -> Retention:
    """What `cache_control` says in any of these: the whole prompt stays for the longest time of all."""
    marks = (part.get("cache_control") for part in parts)
    times = [_MARKED.get(mark.get("ttl"), 0.0) for mark in marks if isinstance(mark, Mapping)]
    return kept_for(max(times)) if any(times) else NO_RETENTION
