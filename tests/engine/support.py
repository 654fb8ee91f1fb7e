"""Engines without a model, and requests for them."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.errors import EngineDeadError
from penstock.config.options import SchedulerOptions
from penstock.config.sampling import SamplingParams
from penstock.core.policies.adapters import AdapterGate
from penstock.core.policies.order import default_gates
from penstock.core.protocol import Runner, StepPlan, StepResult
from penstock.core.request import EngineOutput, EngineRequest
from penstock.core.scheduler import Scheduler
from penstock.engine.api import EngineInfo, Outputs
from penstock.engine.loop import Engine
from penstock.runtime.adapters import AdapterRoom
from penstock.runtime.null_runner import NullRunner
from penstock.structured.manager import StructuredOutputManager

VOCAB = 4096
POISON = VOCAB + 1  # no prompt of `request` has it
GROUPS = (CacheGroup(CacheKind.FULL, None, (0,), 2),)
_ids = itertools.count()

ADAPTER_SLOTS = 2


def null_engine(
    max_model_len: int = 2048,
    num_blocks: int = 1024,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    structured: StructuredOutputManager | None = None,
) -> tuple[Engine, EngineInfo]:
    """An engine over the null runner, which `wrap` may replace by one that misbehaves."""
    options = SchedulerOptions(64, 512, max_model_len, 16, (num_blocks,))
    runner = wrap(NullRunner(GROUPS, (num_blocks,), 16, VOCAB, check=False))
    info = EngineInfo(
        "null", "", "Null", max_model_len, VOCAB, 16, num_blocks, 64, 512, "float32", "cpu", "exact"
    )  # fmt: skip
    room = AdapterRoom(lambda use: (), ADAPTER_SLOTS, 1)
    scheduler = Scheduler(options, GROUPS, gates=(*default_gates(), AdapterGate(ADAPTER_SLOTS, room)))
    return Engine(scheduler, runner, structured, adapters=room), info


def request(
    prompt: int = 5, *, request_id: str | None = None, stop_ids: tuple[int, ...] = (), **sampling: Any
) -> EngineRequest:
    """A request with a prompt of that many tokens, all different from other requests'."""
    number = next(_ids)
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    tokens = tuple((number * 7919 + position * 31) % VOCAB for position in range(prompt))
    return EngineRequest(request_id or f"r{number}", tokens, params, stop_ids, seed=number)


async def read(outputs: Outputs) -> list[EngineOutput]:
    """Everything a stream yields."""
    return [output async for output in outputs]


def tokens_of(outputs: list[EngineOutput], sequence: int = 0) -> list[int]:
    return [token for output in outputs if output.sequence == sequence for token in output.tokens]


class Wrapped:
    """A runner around another one; subclasses change what it does."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        self._runner.submit(plan, masks)

    def sample(self, step: int) -> StepResult:
        return self._runner.sample(step)

    def prepare(self) -> bool:
        return self._runner.prepare()

    def abort(self) -> None:
        self._runner.abort()

    def close(self) -> None:
        self._runner.close()


class Slow(Wrapped):
    """A runner that takes `seconds` a step."""

    def __init__(self, runner: Runner, seconds: float) -> None:
        super().__init__(runner)
        self._seconds = seconds

    def sample(self, step: int) -> StepResult:
        time.sleep(self._seconds)
        return super().sample(step)


class Busy(Wrapped):
    """A runner that computes for `seconds` of processor time a step."""

    def __init__(self, runner: Runner, seconds: float) -> None:
        super().__init__(runner)
        self._seconds = seconds

    def sample(self, step: int) -> StepResult:
        until = time.thread_time() + self._seconds
        while time.thread_time() < until:
            pass
        return super().sample(step)


class Held(Wrapped):
    """A runner that takes a hundred steps more, and then waits, while a file is there."""

    def __init__(self, runner: Runner, file: str) -> None:
        super().__init__(runner)
        self._file, self._left = file, 100

    def sample(self, step: int) -> StepResult:
        while os.path.exists(self._file):
            if self._left:
                self._left -= 1
                break
            time.sleep(0.005)
        return super().sample(step)


class Lost(Wrapped):
    """A runner whose device fails for good in a step."""

    def __init__(self, runner: Runner, step: int) -> None:
        super().__init__(runner)
        self._step = step

    def sample(self, step: int) -> StepResult:
        if step >= self._step:
            raise EngineDeadError("The device failed: CUDA error: an illegal memory access was encountered")
        return super().sample(step)


class Deadly(Wrapped):
    """A runner that ends its process: where a prompt begins with POISON, in the step that computes a position that its
    second token names."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._deadly: dict[int, int] = {}  # positions, by slots

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        for slot in plan.released_slots:
            self._deadly.pop(slot, None)
        self._deadly |= {new.slot: new.prompt_ids[1] for new in plan.new_sequences if new.prompt_ids[0] == POISON}
        for span in plan.scheduled:
            if span.start + len(span.tokens) > self._deadly.get(span.slot, 2**31):
                os.kill(os.getpid(), signal.SIGKILL)
        super().submit(plan, masks)


PROCESS = """#!{python}
import os, sys, time, types
sys.path.insert(0, {root!r})
from penstock.config.errors import CheckpointError
from penstock.engine import process
from tests.engine.support import Busy, Deadly, Held, Lost, Slow, null_engine

def build_engine(options, progress, *, grammars):
    progress(1, 2)
    if os.path.exists({folder!r} + "/broken") or options.model == "missing":
        raise CheckpointError("no model at missing; give a folder")
    if options.model == "crash":
        os.abort()
    if options.model == "bug":
        raise ZeroDivisionError("division")
    if options.model == "loading":
        time.sleep(60)
    progress(2, 2)
    if options.model == "stuck":
        process.STEP_TIMEOUT_S = 0.2
        return null_engine(wrap=lambda runner: Slow(runner, 60))
    if options.model == "busy":
        process.STEP_TIMEOUT_S, process.HEARTBEAT_S = 4.0, 0.1
        return null_engine(wrap=lambda runner: Busy(runner, 0.1))
    if options.model == "mute":
        process.HEARTBEAT_S = 3600.0
    if options.model == "deadly":
        return null_engine(wrap=lambda runner: Deadly(Slow(runner, 0.002)))
    if options.model == "lost":
        return null_engine(wrap=lambda runner: Lost(Slow(runner, 0.01), 20))
    if options.model == "slow":
        return null_engine(wrap=lambda runner: Slow(runner, 0.05))
    wrap = lambda runner: Held(Slow(runner, 0.002), {folder!r} + "/hold")
    return null_engine(options.max_model_len or 2048, wrap=wrap)

build = types.ModuleType("penstock.engine.build")
build.build_engine = build_engine
sys.modules["penstock.engine.build"] = build
sys.exit(process.main())
"""


def null_process(folder: Path) -> Path:
    """A stand-in for the interpreter: the real engine process, around a null engine chosen by the options' model.

    Starts fail while a file `broken` lies in the folder.
    """
    script = folder / "python"
    root = Path(__file__).resolve().parents[2]
    script.write_text(PROCESS.format(python=sys.executable, root=str(root), folder=str(folder)))
    script.chmod(0o700)
    return script
