"""Workers are processes: started beside the engine's, named in its errors, and gone with it, whoever dies first."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import LLM
from penstock.config.errors import CheckpointError, ConfigError, EngineDeadError, MemoryPlanError, PenstockError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.startup import run_worker
from penstock.startup import workers as workers_module

PROMPTS = ("Once upon a time", "The weather", "One day a little girl named Lily went to the park", "x")
SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 256, "kv_blocks": 200}


@pytest.fixture(scope="module")
def model(shared_data: Path) -> str:
    return str(shared_data / "models" / "stories260K" / "hf")


def worker_processes(parent: int | None = None) -> list[psutil.Process]:
    children = psutil.Process(parent or os.getpid()).children()
    return [one for one in children if any("worker_process" in word for word in one.cmdline())]


def wait_until(condition: Callable[[], object]) -> None:
    """Waits until it is true, for a minute at most."""
    for _ in range(6000):
        if condition():
            return
        psutil.wait_procs(psutil.Process().children(), timeout=0.01)
    raise AssertionError("it has not become true within a minute")


def answers(llm: LLM) -> Any:
    """Tokens and log-probabilities of prompts of several lengths, with and without company, bit by bit."""
    found = llm.generate(PROMPTS, temperature=0.8, seed=3, max_tokens=30, logprobs=3, n=2)
    found += llm.generate(PROMPTS[2], temperature=0, max_tokens=8, logprobs=1)
    return [(one.token_ids, one.logprobs) for completion in found for one in completion.outputs]


def test_three_processes_answer_as_one_and_end_with_it(model: str) -> None:
    with LLM(model, **SETTINGS) as alone:
        expected = answers(alone)
    gc.collect()  # what earlier tests have left closes its files now, not meanwhile
    before = set(os.listdir("/proc/self/fd"))
    with LLM(model, tensor_parallel_size=3, **SETTINGS) as llm:
        assert answers(llm) == expected
        started = worker_processes()
        assert len(started) == 3 - 1
        told = {one.name: one.value for one in llm.info.settings}
        assert told["ranks"] == "3" and told["threads"] == "1"
    assert not any(one.is_running() for one in started)
    assert set(os.listdir("/proc/self/fd")) == before


def engine_of(model: str) -> Engine:
    return build_engine(EngineOptions(model=model, tensor_parallel_size=2, **SETTINGS))[0]


def step_until(engine: Engine, condition: Callable[[], object]) -> None:
    for _ in range(100_000):
        if condition():
            return
        engine.step()
    raise AssertionError("it has not become true in 100,000 steps")


def ask(engine: Engine, name: str, tokens: int = 200) -> None:
    how = SamplingParams(temperature=0.9, max_tokens=tokens, ignore_eos=True)
    engine.add(EngineRequest(name, tuple(range(3, 40)), how, seed=7))


@pytest.mark.parametrize(
    "steps", [0, 1, pytest.param(9, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)]
)
def test_a_worker_that_is_killed_is_one_error(model: str, steps: int) -> None:
    engine = engine_of(model)
    (worker,) = worker_processes()
    for name in "ab":
        ask(engine, name)
    for _ in range(steps):
        engine.step()
    worker.kill()
    step_until(engine, lambda: engine.dead)
    assert "rank 1 of 2 was killed by signal 9" in str(engine.dead)
    engine.close()
    assert not worker_processes()


def test_a_worker_that_is_stopped_is_waited_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for what it has of them; once it goes on, they do."""
    monkeypatch.setattr(workers_module, "END_S", 0.1)
    engine = engine_of(model)
    (worker,) = worker_processes()
    ask(engine, "a", 4)
    step_until(engine, lambda: not engine.has_work)
    told = engine.stats()
    assert 0 < told.ranks_seconds < told.build_seconds + told.forward_seconds + told.sample_seconds
    worker.suspend()
    wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
    ask(engine, "b")
    stepping = threading.Thread(target=step_until, args=(engine, lambda: not engine.has_work))
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    worker.resume()
    stepping.join()
    assert engine.dead is None
    assert engine.stats().ranks_seconds - told.ranks_seconds > 0.1  # so long it waited at least
    worker.suspend()  # and one that is stopped ends with the engine too
    engine.close()
    assert not worker_processes()


LEAD = """
import sys, time
from penstock.config.options import EngineOptions
from penstock.engine.build import build_engine
options = EngineOptions(model=sys.argv[1], device="cpu", threads=1, tensor_parallel_size=2, max_model_len=64)
engine = build_engine(options)[0]
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_end_with_the_one_that_leads(model: str, stopped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAD, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as lead:
        assert lead.stdout is not None and lead.stdout.readline() == "ready\n"
        workers = worker_processes(lead.pid)
        assert len(workers) == 1
        if stopped:
            workers[0].suspend()
        lead.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(workers, timeout=60)
    assert gone and not alive


FAILING = """
import sys
sys.path.append(sys.argv[1])
from penstock.startup import worker_process
def fail(*arguments):
    {failure}
worker_process.serve = fail
sys.exit(worker_process.main())
"""
IMPORTS = "from penstock.config.errors import CheckpointError; import os, signal, threading; "


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has workers fail in a way of their own, while they load."""
    yield lambda how: monkeypatch.setattr(run_worker, "PROGRAM", FAILING.format(failure=IMPORTS + how))
    assert not worker_processes()


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (
            "raise CheckpointError('layer 3 is not there')",
            CheckpointError,
            "^rank 1 of 2: layer 3 is not there$",
        ),
        ("raise MemoryError", MemoryPlanError, "^rank 1 of 2: memory ran out"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", EngineDeadError, "^rank 1 of 2 was killed by signal 11"),
    ],
)
def test_a_start_that_fails_names_the_rank(
    model: str, failing: Callable[[str], None], how: str, kind: type[PenstockError], said: str
) -> None:
    failing(how)
    with pytest.raises(kind, match=said):
        LLM(model, tensor_parallel_size=2, **SETTINGS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 9}, r"--tensor-parallel-size is 9; allowed: an integer from 1 to 8"),
        ({"tensor_parallel_size": 0}, r"--tensor-parallel-size is 0"),
        ({"pipeline_parallel_size": True}, r"--pipeline-parallel-size is True"),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 4}, r"is 16 processes; one model has at most 8"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, r"Take --device cpu"),
        ({"remote_workers": 1}, r"--remote-workers is 1; allowed: an integer from 0 to 0"),
        ({"distributed_executor_backend": "uni"}, r"--distributed-executor-backend is 'uni'; allowed: mp, ray\."),
        ({"distributed_executor_backend": "ray"}, r"ray is for stages"),
        ({"pipeline_parallel_size": 2, "remote_workers": 1}, r"--workers-address go together"),
        (
            {"tensor_parallel_size": 2, "remote_workers": 1, "workers_address": "a:1"},
            r"Deal layers to",
        ),
    ],
)
def test_what_several_processes_cannot_do_is_refused(model: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(model, **{**SETTINGS, **options})
    assert not worker_processes()
