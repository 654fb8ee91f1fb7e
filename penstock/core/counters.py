"""What the scheduler counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
