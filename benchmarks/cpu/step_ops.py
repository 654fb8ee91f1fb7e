"""Where a decode step's time goes in native code: by kind of op, and how long its threads wait for each other.

python -m benchmarks.cpu.step_ops MODEL [--batches 1 4]

An op's time is that of the thread that calls, which includes its waiting. A thread waits from the end of its own part
of an op to the end of the others'; before the first op, until it has come. An op is told by its name and by that of the
one before it: of a Llama, `linear after attention` is the output projection, `linear after linear` the down projection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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

Figures = Iterable[tuple[str, float]]
WARM = 8  # steps before the measured ones


@dataclass(slots=True)
class OpTimes:
    """Of one kind of op, in seconds: `waited` of all threads together."""

    count: int = 0
    seconds: float = 0.0
    waited: float = 0.0


def by_kind(seconds: Figures, waited: Figures) -> dict[str, OpTimes]:
    """Sums over the ops of a program, in the order in which kinds first come."""
    found: dict[str, OpTimes] = {}
    before = "the start"
    for (name, time), (_, wait) in zip(seconds, waited, strict=True):
        kind = found.setdefault(f"{name} after {before}", OpTimes())
        kind.count, kind.seconds, kind.waited = kind.count + 1, kind.seconds + time, kind.waited + wait
        before = name
    return found


def programs_of(engine: Engine) -> dict[str, Any]:
    """The native programs of a decode step.

    Raises:
        SystemExit: the model's steps are not recorded.
    """
    runner: Any = engine.runner
    if runner._decoding is None:
        raise SystemExit(f"only recorded steps can be divided; this model runs {runner._executor.describe}")
    program = runner._decoding._program
    return {"body": program._body, "logits": program._head}


def measure(engine: Engine, vocab: int, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, by kind of op, and the share of the threads' time that they wait."""
    rng = np.random.default_rng(batch)
    sampling = SamplingParams(max_tokens=steps + batch + WARM + 8, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        engine.add(EngineRequest(f"{batch}-{i}", tuple(rng.integers(10, vocab, context).tolist()), sampling))
    for _ in range(batch + WARM):
        engine.step()
    programs = programs_of(engine)
    for program in programs.values():
        program.measure()
    begun = perf_counter()
    for _ in range(steps):
        engine.step()
    step = (perf_counter() - begun) / steps
    kinds = {name: by_kind(program.seconds, program.waited) for name, program in programs.items()}
    while engine.has_work:
        engine.step()
    threads = native.library().num_threads()
    waited = sum(kind.waited for found in kinds.values() for kind in found.values()) / steps
    ops = {
        f"{name}: {kind}": {"count": of.count, "ms": 1e3 * of.seconds / steps, "waited_ms": 1e3 * of.waited / steps}
        for name, found in kinds.items()
        for kind, of in found.items()
    }
    return {"batch": batch, "step_ms": 1e3 * step, "waiting_share": waited / (threads * step), "ops": ops}


def main() -> None:
    """Prints a table a batch and writes the figures."""
    parser = arguments(__doc__)
    parser.add_argument("model", help="folder or GGUF file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    engine, info = build_engine(EngineOptions(model=given.model, max_model_len=1024, enable_prefix_caching=False))
    found = [measure(engine, info.vocab_size, batch, given.context, given.steps) for batch in given.batches]
    engine.close()
    cells = [
        [of["batch"], kind, one["count"], one["ms"], one["waited_ms"]]
        for of in found
        for kind, one in of["ops"].items()
        if one["ms"] + one["waited_ms"] >= 0.01
    ]
    columns = ("sequences", "ops", "of them", "ms a step", "waited by all threads, ms")
    report("cpu_step_ops", given.results, {"model": info.model, "isa": native.isa(), "found": found}, columns, cells)
    for of in found:
        told = f"{of['step_ms']:.2f} ms a step, of which threads wait {100 * of['waiting_share']:.1f} %"
        print(f"{of['batch']} sequences: {told}")


if __name__ == "__main__":
    main()
