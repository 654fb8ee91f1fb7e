"""Continuous against static batching, in steps, on the lengths of the Azure traces.

Counted are steps of the whole batch, one for every token each row generates; a step costs the same in both, and a
prompt is computed whole in the step that brings its first token, so that answers alone decide. Static takes the
requests in order, `batch` at a time, and runs each group until its longest answer has ended: the sum of the maxima.
Continuous is the engine's own scheduler with the null runner. The ceiling is E[max of `batch`] / mean of the same
answers. Prefix caching is off.
"""

from __future__ import annotations

from typing import Any

from benchmarks.replay import engine_for, replay
from benchmarks.report import arguments, report
from benchmarks.traces import TRACES, Lengths, azure, ceiling


def static_steps(requests: list[Lengths], batch: int) -> int:
    """Steps of batches in order, each run to its longest answer."""
    outputs = [request.output for request in requests]
    return sum(max(outputs[start : start + batch]) for start in range(0, len(outputs), batch))


def measure(requests: list[Lengths], batch: int) -> dict[str, Any]:
    """Steps of both kinds and their ratio as a share of the ceiling."""
    static = static_steps(requests, batch)
    continuous = replay(engine_for(requests, rows=batch), requests, rows=batch)
    bound = ceiling(requests, batch)
    return {
        "requests": len(requests),
        "static_steps": static,
        "continuous_steps": continuous,
        "ratio": static / continuous,
        "ceiling": bound,
        "share": static / continuous / bound,
    }


def main() -> None:
    """Measures both traces."""
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--requests", type=int, help="only the first so many of each trace")
    given = parser.parse_args()
    figures = {name: measure(azure(given.data, name, given.requests), given.batch) for name in TRACES}
    columns = ("trace", "requests", "static steps", "continuous steps", "ratio", "ceiling", "share of ceiling")
    rows = [(name, *list(found.values())[:-1], f"{found['share']:.1%}") for name, found in figures.items()]
    report("batching", given.results, {"batch": given.batch, "traces": figures}, columns, rows)


if __name__ == "__main__":
    main()
