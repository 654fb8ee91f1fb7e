"""What the scheduler counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.core.request import FinishReason


@dataclass(slots=True)
class Counters:
    """What the scheduler counts since it started; see EngineStats for meanings."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    miss_reasons: Counter[str] = field(default_factory=Counter)
    held_back: Counter[str] = field(default_factory=Counter)
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    failed_loads: int = 0

    def end(self, reason: FinishReason) -> None:
        """A request has ended."""
        if reason is FinishReason.CANCELLED:
            self.cancelled += 1
        elif reason is FinishReason.ERROR:
            self.failed += 1
        else:
            self.finished += 1

    def snapshot(self) -> dict[str, Any]:
        """Every count by its name, those of reasons as pairs."""
        values = ((counted.name, getattr(self, counted.name)) for counted in fields(self))
        return {name: tuple(value.items()) if isinstance(value, Counter) else value for name, value in values}
