"""KV slots that running requests hold but have not written, on the true lengths of the Azure traces.

Sampled after every step: 1 - slots written / slots allocated, over all rows of the batch.
"""

from __future__ import annotations

from typing import Any

from benchmarks.replay import engine_for, replay
from benchmarks.report import arguments, report
from benchmarks.traces import TRACES, Lengths, azure
from penstock.cli.measure import percentile


def measure(requests: list[Lengths], batch: int, block_size: int) -> dict[str, Any]:
    """Mean and percentiles of the waste over all steps."""
    engine = engine_for(requests, rows=batch, block_size=block_size)
    waste: list[float] = []

    def sample() -> None:
        stats = engine.stats()
        if stats.slots_allocated:
            waste.append(1 - stats.slots_used / stats.slots_allocated)

    replay(engine, requests, rows=batch, after_step=sample)
    return {
        "requests": len(requests),
        "steps": len(waste),
        "mean": sum(waste) / len(waste),
        "p50": percentile(waste, 50),
        "p99": percentile(waste, 99),
        "max": max(waste),
    }


def main() -> None:
    """Measures both traces."""
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--requests", type=int, help="only the first so many of each trace")
    given = parser.parse_args()
    figures = {name: measure(azure(given.data, name, given.requests), given.batch, given.block_size) for name in TRACES}
    columns = ("trace", "requests", "steps", "mean", "p50", "p99", "max")
    rows = [
        (name, found["requests"], found["steps"], *(f"{found[key]:.2%}" for key in ("mean", "p50", "p99", "max")))
        for name, found in figures.items()
    ]
    setup = {"batch": given.batch, "block_size": given.block_size}
    report("kv_waste", given.results, {**setup, "traces": figures}, columns, rows)


if __name__ == "__main__":
    main()
