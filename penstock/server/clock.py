"""When the sequences of a call had their first and last tokens, and how fast that was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Clock:
    """One sequence's times: of its first token and of the last so far, and how many it has."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


def spoken(clocks: Mapping[int, Clock]) -> list[Clock]:
    """Of sequences that have tokens."""
    return [clock for clock in clocks.values() if clock.tokens]


def pace(of: str, tokens: int, seconds: float) -> dict[str, Any]:
    """So many tokens in such a time, which is told in ms; 0 where it cannot be divided."""
    seconds = max(seconds, 0.0)
    each = {
        f"{of}_per_token_ms": seconds * 1000 / tokens if tokens else 0.0,
        f"{of}_per_second": tokens / seconds if seconds else 0.0,
    }
    return {f"{of}_n": tokens, f"{of}_ms": seconds * 1000, **each}
