"""Request lengths of the Azure LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from penstock.cli.workload import read_azure_lengths

TRACES = ("conv", "code")


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request: tokens of its prompt and of its answer."""

    context: int
    output: int


def azure(data: Path, name: str, count: int | None = None) -> list[Lengths]:
    """The first `count` requests of trace `name`, or all of them."""
    path = data / "trace" / f"AzureLLMInferenceTrace_{name}.csv"
    return [Lengths(*pair) for pair in islice(read_azure_lengths(path), count)]


def expected_maximum(values: Sequence[int], batch: int) -> float:
    """E[max of `batch` independent draws from the values], exactly: the sum over x ≥ 0 of P(max > x)."""
    ordered = sorted(values)
    total, previous = 0.0, 0
    for value in sorted(set(ordered)):
        below = bisect_right(ordered, previous) / len(ordered) if previous else 0.0
        total += (value - previous) * (1.0 - below**batch)
        previous = value
    return total


def ceiling(requests: Sequence[Lengths], batch: int) -> float:
    """Steps of static over steps of ideal continuous batching: E[max] / mean of the answers' lengths."""
    outputs = [request.output for request in requests]
    return expected_maximum(outputs, batch) * len(outputs) / sum(outputs)
