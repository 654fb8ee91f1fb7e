"""Python time of one decode step at a fixed batch size: Scheduler.plan, filling the batch, Scheduler.commit.

Every row holds `context` tokens when measuring starts and decodes one token a step. The batch is filled from the real
spans, by one native call as where steps are recorded, or, with --tensors, built as real tensors; the null runner gives
the tokens, and its own time is not counted.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

import torch

from benchmarks.replay import null_engine, request_of
from benchmarks.report import arguments, report
from penstock.cli.measure import percentile
from penstock.core.protocol import StepPlan, StepResult
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.kernels.cpu.step_program import address
from penstock.runtime.batch_builder import BatchBuilder

PARTS = ("plan", "build", "commit")


class Stopwatch:
    """Steps an engine by hand and times its three parts."""

    def __init__(self, engine: Engine, builder: BatchBuilder, tensors: bool) -> None:
        """Decode steps are filled natively, or built as `tensors`, as all others are."""
        self._engine = engine
        self._builder = builder
        self._rows = None
        if not tensors:
            slots, width = builder.tables[0].shape
            places = [(address(table), address(used)) for table, used in zip(builder.tables, builder.used, strict=True)]
            self._rows = native.library().DecodeRows(places, slots, width, builder.block_size)

    def step(self) -> dict[str, float]:
        """One step; seconds of each part."""
        begun = perf_counter()
        plan = self._engine.scheduler.plan()
        planned = perf_counter()
        if plan is None:
            raise RuntimeError("the scheduler has nothing to do")
        self._build(plan)
        built = perf_counter()
        result = self._run(plan)
        sampled = perf_counter()
        self._engine.scheduler.commit(result)
        self._engine.scheduler.take_outputs()
        return {"plan": planned - begun, "build": built - planned, "commit": perf_counter() - sampled}

    def _build(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self._builder.add_row(new)
        if self._rows is not None and self._rows.fill(plan.scheduled, False):
            return
        ends, total = [], 0
        for span in plan.scheduled:
            total += len(span.tokens)
            if span.sample:
                ends.append(total - 1)
        self._builder.build(plan.scheduled, ends)

    def _run(self, plan: StepPlan) -> StepResult:
        self._engine.runner.submit(plan)
        result = self._engine.runner.sample(plan.step)
        for row in result.results:
            for token in row.tokens:
                self._builder.note_sample(row.slot, token)
        return result


def measure(context: int, batch: int, steps: int, *, tensors: bool = False, block_size: int = 16) -> dict[str, Any]:
    """Milliseconds a step at that context: medians of the parts, median and p99 of their sum."""
    length = context + steps + 16
    width = -(-length // block_size)
    engine = null_engine(rows=batch, budget=8192, max_model_len=length, num_blocks=1 + batch * (width + 1))
    watch = Stopwatch(engine, BatchBuilder(1, batch, width, block_size, torch.device("cpu")), tensors)
    for row in range(batch):
        engine.add(request_of(str(row), [row, *range(context - 1)], steps + 15))
    while any(sequence.remaining > 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        watch.step()
    for _ in range(3):
        watch.step()
    times = [watch.step() for _ in range(steps)]
    whole = [1e3 * sum(parts.values()) for parts in times]
    medians = {part: 1e3 * statistics.median(parts[part] for parts in times) for part in PARTS}
    return {"context": context, **medians, "median": statistics.median(whole), "p99": percentile(whole, 99)}


def main() -> None:
    """Measures every context in turn, three rounds, and takes the medians."""
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensors", action="store_true", help="build batches as for torch")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [
        [measure(c, given.batch, given.steps, tensors=given.tensors) for c in given.contexts]
        for _ in range(given.rounds)
    ]
    found = [
        {key: statistics.median(round_[i][key] for round_ in rounds) for key in rounds[0][i]}
        for i in range(len(given.contexts))
    ]
    columns = ("context", *(f"{part}, ms" for part in PARTS), "step median, ms", "step p99, ms")
    rows = [tuple(entry.values()) for entry in found]
    growth = found[-1]["median"] / found[0]["median"]
    report("overhead", given.results, {"batch": given.batch, "contexts": found, "growth": growth}, columns, rows)
    print(
        f"\nfrom context {given.contexts[0]} to {given.contexts[-1]} the median step takes {growth:.2f} times as long"
    )


if __name__ == "__main__":
    main()
