"""A stage that fails ends the steps that are in the stages, and nothing else; one that is gone ends the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import EngineDeadError
from penstock.core.request import FinishReason
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.runtime.executor import Executor
from tests.models import tiny
from tests.runtime.pipeline.support import staged_engine
from tests.runtime.pipeline.test_equality import Answers, answers, asked, mixture

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")


class Failing:
    """An executor that fails when told so: in its forward pass, or where logits are made."""

    def __init__(self, executor: Executor, fails: dict[str, int]) -> None:
        self._executor = executor
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def forward(self, *arguments: Any) -> None:
        self._fail("forward")
        self._executor.forward(*arguments)

    def logits(self, *arguments: Any) -> Any:
        self._fail("logits")
        return self._executor.logits(*arguments)

    def _fail(self, where: str) -> None:
        if where in self._fails:
            self._fails[where] -= 1
            if self._fails[where] < 0:
                del self._fails[where]
                raise RuntimeError(f"told to fail: {where}")


def errors(engine: Engine, requests: Any) -> dict[str, str | None]:
    """How these end."""
    ends: dict[str, str | None] = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                ends[output.request_id] = output.error
        engine.scheduler.check_integrity()
    return ends


@pytest.mark.parametrize("failing", [(0, "forward", 4), (1, "forward", 4), (2, "forward", 9), (2, "logits", 3)])
def test_a_stage_that_fails_ends_the_steps_in_flight(
    failing: tuple[int, str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # the failures are meant
    tiny.save("qwen3", tmp_path)
    one = answers(staged_engine(tmp_path, 1), mixture())
    stage, where, after = failing
    fails: dict[str, int] = {}
    engine = staged_engine(
        tmp_path, 3, wrap=lambda number, executor: Failing(executor, fails) if number == stage else executor
    )
    fails[where] = after
    ends = errors(engine, [asked(f"r{number}", tuple(tiny.prompt(5, number))) for number in range(6)])
    assert len(ends) == 6  # those that were in no step then are answered
    assert set(ends.values()) - {None} == {"the engine failed while computing this request; send it again."}
    assert engine.dead is None
    found: Answers = answers(engine, mixture())
    assert found == one


def test_a_stage_that_is_gone_ends_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    tiny.save("qwen3", tmp_path)
    engine = staged_engine(tmp_path, 3)
    engine.add(asked("one", tuple(tiny.prompt(5, 1)), max_tokens=50))
    engine.step()
    stages = engine.runner._stages  # type: ignore[attr-defined]
    stages._dead = lambda error: EngineDeadError(str(error))
    stages._first.close()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.finish_reason for output in outputs][-1] is FinishReason.ERROR
    assert isinstance(engine.dead, EngineDeadError)
    engine.close()
