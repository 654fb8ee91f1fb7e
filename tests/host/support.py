"""A host whose engines are real ones without a model, in threads, and load when a test lets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.errors import EngineDeadError, PenstockError
from penstock.config.options import EngineOptions
from penstock.engine.api import EngineInfo
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.host.engine import HostedEngine, Progress
from penstock.host.host import Host
from penstock.host.memory import ModelPlan, Planner
from penstock.host.source import ModelSource
from penstock.startup.memory_plan import MemoryPlan
from tests.engine.support import null_engine

SIZE = 100  # bytes that each model takes, unless a test says otherwise


class SupervisedThread(ThreadClient):
    """An engine in a thread, which dies for good when `lose` is called."""

    def __init__(self, engines: Engines, name: str, progress: Progress) -> None:
        super().__init__(lambda: engines.build(name, progress))
        self._engines, self._name = engines, name
        self._lost = asyncio.Event()

    async def given_up(self) -> EngineDeadError:
        await self._lost.wait()
        return EngineDeadError("lost")

    def lose(self) -> None:
        self._lost.set()

    async def close(self) -> None:
        await super().close()
        self._engines.live.discard(self._name)


@dataclass
class Engines:
    """Makes them, and watches that no model has two at once.

    Attributes:
        pipeline: the text side that every model has.
        gates: models whose load waits until their event is set.
        errors: models that cannot be loaded, and why.
        live: models that have an engine.
        loads: every load, in order.
        most: engines there were at once.
        dying: so many of the next engines die before they serve.
        made: the newest engine of each model.
    """

    pipeline: TextPipeline
    gates: dict[str, threading.Event] = field(default_factory=dict)
    errors: dict[str, PenstockError] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    loads: list[str] = field(default_factory=list)
    most: int = 0
    dying: int = 0
    made: dict[str, SupervisedThread] = field(default_factory=dict)

    def options(self, options: EngineOptions) -> EngineOptions:
        return options

    def engine(self, options: EngineOptions, progress: Progress) -> HostedEngine:
        name = str(options.served_model_name)
        assert name not in self.live, f"{name} has an engine"
        self.live.add(name)
        self.loads.append(name)
        self.most = max(self.most, len(self.live))
        self.made[name] = SupervisedThread(self, name, progress)
        return self.made[name]

    def build(self, name: str, progress: Progress) -> tuple[Engine, EngineInfo]:
        progress(1, 2)
        if name in self.gates:
            assert self.gates[name].wait(60)
        if self.dying:
            self.dying -= 1
            raise EngineDeadError("The engine process was ended by signal 9.")
        if name in self.errors:
            raise self.errors[name]
        progress(2, 2)
        return null_engine()

    def text(self, options: EngineOptions) -> TextPipeline:
        return self.pipeline


def plan_of(sizes: Mapping[str, int]) -> Planner:
    def plan(options: EngineOptions, room: int) -> ModelPlan:
        size = sizes.get(str(options.served_model_name), SIZE)
        made = MemoryPlan(size, size, 0, (2,), (1,), 0, 16, 1.0, room)
        return ModelPlan(size, 0, made, exact=False)

    return plan


def source(name: str, **given: Any) -> ModelSource:
    return ModelSource(name, EngineOptions(model=name), **given)


def host_of(
    engines: Engines,
    *sources: ModelSource,
    memory: int = 2 * SIZE,
    keep_alive: float | None = 300.0,
    sizes: Mapping[str, int] | None = None,
) -> Host:
    listed = {item.name: item for item in sources}
    return Host(lambda: listed, engines, memory, keep_alive=keep_alive, plan=plan_of(sizes or {}))
