"""Stages are processes: they give the bits of one, and end with the lead, whoever dies first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import LLM
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.core.request import FinishReason
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.startup import workers as workers_module
from tests.engine.test_grammars import finish, held
from tests.startup.test_workers import SETTINGS, answers, ask, step_until, wait_until, worker_processes


@pytest.fixture(scope="module")
def model(shared_data: Path) -> str:
    return str(shared_data / "models" / "stories260K" / "hf")


def test_three_stages_answer_as_one_process_and_end_with_it(model: str) -> None:
    with LLM(model, **SETTINGS) as alone:
        expected = answers(alone)
    before = set(os.listdir("/proc/self/fd"))
    with LLM(model, pipeline_parallel_size=3, **SETTINGS) as llm:
        assert answers(llm) == expected
        started = worker_processes()
        assert len(started) == 3 - 1
        told = {one.name: one.value for one in llm.info.settings}
        assert told["ranks"] == "3" and told["layers of stages"].count(",") == 2 and told["step"] == "3 stages"
    assert not any(one.is_running() for one in started)
    assert set(os.listdir("/proc/self/fd")) == before


def engine_of(model: str, stages: int) -> Engine:
    return build_engine(EngineOptions(model=model, pipeline_parallel_size=stages, **SETTINGS))[0]


@pytest.mark.parametrize(("rank", "steps"), [(1, 3), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_a_stage_that_is_killed_is_one_error_at_once(model: str, rank: int, steps: int) -> None:
    engine = engine_of(model, 3)
    worker = worker_processes()[rank - 1]
    for name in "ab":
        ask(engine, name)
    for _ in range(steps):
        engine.step()
    worker.kill()
    outputs = []
    while engine.dead is None:
        outputs += engine.step()
    assert f"rank {rank} of 3 was killed by signal 9" in str(engine.dead)
    assert "a" in {output.request_id for output in outputs if output.finish_reason is FinishReason.ERROR}
    engine.close()
    assert not worker_processes()


def test_a_stage_that_is_stopped_is_waited_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "END_S", 0.1)
    engine = engine_of(model, 2)
    (worker,) = worker_processes()
    ask(engine, "a", 4)
    step_until(engine, lambda: not engine.has_work)
    worker.suspend()
    wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
    ask(engine, "b")
    plan = engine.scheduler.plan()
    assert plan is not None
    engine._submitted.append(plan)
    engine.runner.submit(plan)
    worker.resume()
    step_until(engine, lambda: not engine.has_work)
    assert engine.dead is None
    worker.suspend()  # and one that is stopped ends with the engine too
    engine.close()
    assert not worker_processes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pipeline_parallel_size": 7}, "7 pipeline stages for 5 layers"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_split": "4,2"}, "6 layers for 2 stages, but the model has 5"),
        ({"pipeline_parallel_size": 2, "speculative_config": '{"method": "self"}'}, "Take a draft model"),
    ],
)
def test_what_stages_cannot_do_is_refused(model: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(model, **{**SETTINGS, **options})
    assert not worker_processes()


def test_grammars_hold_in_stages() -> None:
    """Their masks and forced tokens are the lead's: each is known before its sequence is in another step."""
    text = TextPipeline.of(build_options(1))
    found: list[Any] = []
    for stages in (1, 2):
        engine, _ = build_engine(build_options(stages))
        asked = [held(text, "asked", n=2), *(replace(held(text, f"other{i}"), seed=i) for i in range(2))]
        steps = iter(range(10**6))

        def between(engine: Engine = engine, steps: Iterator[int] = steps) -> None:
            if next(steps) == 9:
                engine.scheduler.preempt("asked")

        found.append(finish(engine, *asked, replace(held(text, "free"), grammar=None), between=between))
        engine.close()
    assert found[0] == found[1]


def build_options(stages: int) -> EngineOptions:
    """Of the bundled model."""
    return EngineOptions(device="cpu", threads=1, max_num_seqs=8, kv_blocks=200, pipeline_parallel_size=stages)


def test_stages_whose_layers_are_shared(model: str) -> None:
    """By two ranks each, which hand on what all of them have."""
    found = []
    for ranks, stages in ((1, 1), (2, 2)):
        with LLM(model, **SETTINGS, tensor_parallel_size=ranks, pipeline_parallel_size=stages) as llm:
            assert len(worker_processes()) == ranks * stages - 1
            found.append(answers(llm))
    assert found[0] == found[1]
    assert not worker_processes()
