"""What a decode step of a real shape spends outside native code: planning, building the batch, calling, committing.

python -m benchmarks.cpu.step_share MODEL

The run of a step's programs and its call of the sampler are timed; the rest is Python's and the scheduler's. Of a GGUF
file, which a step reads once (a model without tied embeddings less), it is told how fast that was, beside what plain
reading reached before and after the same steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.report import arguments, report
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native

READ_BYTES = 1 << 30
PARTS = ("plan", "build", "forward", "sample", "commit")


class _Timed:
    """An object of which one method is timed."""

    def __init__(self, inner: Any, method: str, clock: NativeClock) -> None:
        self._inner = inner
        setattr(self, method, clock.timed(getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class NativeClock:
    """Seconds spent in calls of native code since the last look."""

    def __init__(self, engine: Engine) -> None:
        runner: Any = engine.runner
        if runner._decoding is None:
            raise SystemExit(f"only recorded steps can be divided; this model runs {runner._executor.describe}")
        self._seconds = 0.0
        program = runner._decoding._program
        program._rows = _Timed(program._rows, "run", self)
        runner._sampler._kernel = _Timed(runner._sampler._kernel, "drawn", self)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_timed(*args: Any) -> Any:
            begun = perf_counter()
            result = call(*args)
            self._seconds += perf_counter() - begun
            return result

        return call_timed

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def measure(engine: Engine, clock: NativeClock, vocab: int, batch: int, context: int, steps: int) -> dict[str, float]:
    """Medians over steps of one batch, milliseconds."""
    rng = np.random.default_rng(batch)
    sampling = SamplingParams(max_tokens=steps + batch + 12, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        engine.add(EngineRequest(f"{batch}-{i}", tuple(rng.integers(10, vocab, context).tolist()), sampling))
    full = 0
    while full < 4:  # steps in which every sequence has generated
        before = engine.stats().generated_tokens
        engine.step()
        full += engine.stats().generated_tokens - before == batch
    clock.take()
    whole: list[float] = []
    outside: list[float] = []
    started = engine.stats()
    for _ in range(steps):
        begun = perf_counter()
        engine.step()
        whole.append(perf_counter() - begun)
        outside.append(whole[-1] - clock.take())
    after = engine.stats()
    while engine.has_work:
        engine.step()
    parts = {p: 1e3 * (getattr(after, f"{p}_seconds") - getattr(started, f"{p}_seconds")) / steps for p in PARTS}
    median, python = statistics.median(whole), statistics.median(outside)
    return {"batch": batch, "step_ms": 1e3 * median, "outside_ms": 1e3 * python, "share": python / median, **parts}


def memory_rate() -> float:
    """GB/s that plain reading reaches now, with the engine's threads."""
    return float(native.library().measure_limit("read", READ_BYTES)) / 1e9


def with_memory(
    engine: Engine, clock: NativeClock, vocab: int, batch: int, given: argparse.Namespace
) -> dict[str, float]:
    """As `measure`, with GB/s at which the file was read in a step, those of plain reading, and their ratio."""
    before = memory_rate()
    found = measure(engine, clock, vocab, batch, given.context, given.steps)
    limit = (before + memory_rate()) / 2
    path = Path(given.model)
    rate = path.stat().st_size / found["step_ms"] / 1e6 if path.is_file() else 0.0
    return {**found, "read": rate, "plain_read": limit, "of_plain": rate / limit}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", help="folder or GGUF file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    engine, info = build_engine(EngineOptions(model=given.model, max_model_len=1024, enable_prefix_caching=False))
    clock = NativeClock(engine)
    found = [with_memory(engine, clock, info.vocab_size, batch, given) for batch in given.batches]
    engine.close()
    told = ("sequences", "step, ms", "outside native code, ms", "share", *(f"{part}, ms" for part in PARTS))
    columns = (*told, "read, GB/s", "plain reading, GB/s", "of it")
    figures = {"model": info.model, "context": given.context, "found": found}
    report("cpu_step_share", given.results, figures, columns, [tuple(entry.values()) for entry in found])


if __name__ == "__main__":
    main()
