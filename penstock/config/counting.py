"""An engine's figures over its restarts: what was counted stays counted, so that no counter ever falls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final

from penstock.config.engine_stats import EngineStats

GAUGES: Final = frozenset(
    {
        *("running", "waiting", "waiting_tokens", "waiting_seconds", "slots_used", "slots_allocated"),
        *("blocks_used", "blocks_cached", "blocks_total", "kv_below_blocks", "kv_below_places", "paused"),
        *("accepted_now", "accepted_usually", "engines"),
    }
)
"""Fields that say how things are now; the others grow."""


_LARGEST: Final = frozenset({"waiting_seconds", "accepted_now", "accepted_usually"})


def of_all(engines: Sequence[EngineStats]) -> EngineStats:
    """The figures of several engines that serve one model, with each one's among them.

    Sums, but for what is a time or an average: of those the largest. All are paused, and as the one is that is least.
    """
    total = EngineStats()
    for stats in engines:
        before = _values(total)
        total = EngineStats(**{name: _sum(before[name], value) for name, value in _values(stats).items()})
    largest: dict[str, Any] = {name: max((getattr(stats, name) for stats in engines), default=0.0) for name in _LARGEST}
    return replace(total, paused=_paused([stats.paused for stats in engines]), engines=tuple(engines), **largest)


def _paused(states: Sequence[int]) -> int:
    """Of all: as the one that has still to rest, or that computes nothing at all; else as the least."""
    return next((state for state in (3, 2) if state in states), min(states, default=0))


def ended(stats: EngineStats) -> EngineStats:
    """What is left of an engine that is gone: its counters."""
    return EngineStats(**{name: value for name, value in _values(stats).items() if name not in GAUGES})


def together(past: EngineStats, now: EngineStats) -> EngineStats:
    """The figures of an engine, counted on from those of the ones before it."""
    before = _values(past)
    return EngineStats(
        **{name: value if name in GAUGES else _sum(before[name], value) for name, value in _values(now).items()}
    )


def _values(stats: EngineStats) -> dict[str, Any]:
    return {field.name: getattr(stats, field.name) for field in fields(stats)}


def _sum(past: Any, now: Any) -> Any:
    if isinstance(now, tuple):  # pairs of a reason and a count
        both = Counter(dict(past))
        both.update(dict(now))
        return tuple(both.items())
    return past + now
