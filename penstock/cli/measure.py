"""What a load test computes from the times of its requests. All times are seconds unless a name says ms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.errors import ConfigError

PERCENTILES = (50, 90, 99)
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it.

    Attributes:
        start: when it was sent, on a monotonic clock.
        end: when its last byte came.
        chunk_times: when each piece of content that was not empty came.
        prompt_tokens, output_tokens: as the server counted them.
        cached_tokens: prompt tokens served from the prefix cache.
        error: why it failed, None if it did not.
    """

    start: float
    end: float
    chunk_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def e2el(self) -> float:
        """End-to-end latency: sent to last byte."""
        return self.end - self.start

    @property
    def ttft(self) -> float:
        """Time to first token: sent to the first piece of content; queueing and prefill included."""
        return (self.chunk_times[0] if self.chunk_times else self.end) - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, (E2EL - TTFT) / (output tokens - 1); None below two tokens."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between successive pieces of content."""
        return tuple(later - sooner for sooner, later in zip(self.chunk_times, self.chunk_times[1:], strict=False))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated linearly between the two nearest ranks.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and extremes in milliseconds, with the number of samples; None without samples."""
    if not seconds:
        return None
    found = {"count": float(len(seconds)), "mean": 1e3 * sum(seconds) / len(seconds)}
    found |= {f"p{p}": 1e3 * percentile(seconds, p) for p in PERCENTILES}
    return found | {"max": 1e3 * max(seconds)}


def parse_goodput(text: str | None) -> dict[str, float]:
    """Objectives in milliseconds from text such as "ttft:2000,tpot:100".

    Raises:
        ConfigError: an unknown objective or no positive number.
    """
    found: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name.strip() not in OBJECTIVES or not (limit > 0 and math.isfinite(limit)):
            raise ConfigError(
                f"--goodput has {part!r}; allowed: NAME:MILLISECONDS pairs joined by commas, "
                f"names {', '.join(OBJECTIVES)}."
            )
        found[name.strip()] = limit
    return found


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a request met every objective (ms); a failed one never does, TPOT of a single token counts as 0."""
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2el}
    return record.error is None and all(1e3 * measured[name] <= limit for name, limit in objectives.items())


def summarize(
    records: Sequence[RequestRecord], duration: float, objectives: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The figures of one run of `duration` seconds; latencies are of completed requests only.

    ITL pools every gap of all requests, so long answers weigh more; where a chunk holds several tokens, ITL and TPOT
    differ by `tokens_per_chunk`.
    """
    done = [record for record in records if record.error is None]
    output = sum(record.output_tokens for record in done)
    prompt = sum(record.prompt_tokens for record in done)
    chunks = sum(len(record.chunk_times) for record in done)
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    found: dict[str, Any] = {
        "requests": {"sent": len(records), "completed": len(done), "failed": len(records) - len(done)},
        "errors": errors,
        "duration_s": duration,
        "prompt_tokens": prompt,
        "cached_tokens": sum(record.cached_tokens for record in done),
        "output_tokens": output,
        "requests_per_s": len(done) / duration,
        "output_tokens_per_s": output / duration,
        "total_tokens_per_s": (prompt + output) / duration,
        "tokens_per_chunk": output / chunks if chunks else None,
        "ttft_ms": distribution([record.ttft for record in done]),
        "tpot_ms": distribution([record.tpot for record in done if record.tpot is not None]),
        "itl_ms": distribution([gap for record in done for gap in record.itl]),
        "e2el_ms": distribution([record.e2el for record in done]),
    }
    if objectives:
        good = sum(meets(record, objectives) for record in records)
        found["goodput"] = {
            "objectives_ms": dict(objectives),
            "requests_per_s": good / duration,
            "slo_attainment": good / len(records) if records else 0.0,
        }
    return found
