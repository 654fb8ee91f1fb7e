"""What a model will take, planned before it is loaded and without torch; and who holds how much of the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.config.errors import MemoryPlanError
from penstock.config.machine import Machine
from penstock.config.options import EngineOptions
from penstock.config.resolve import resolve
from penstock.startup.header_plan import plan_from_headers, this_machine
from penstock.startup.kept_start import KeptStart, known
from penstock.startup.memory_plan import MemoryPlan, format_bytes
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
from penstock.weights.pack_cache import PackCacheError

PROCESS_BYTES = 57 << 20  # an engine process that goes on from an earlier start: interpreter, numpy, native library
FIRST_PROCESS_BYTES = 256 << 20  # one that loads torch
_SLACK = 1.01  # over a plan: blocks are whole, and estimates are rounded


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What a model will take.

    Attributes:
        engine_bytes: weights, a step and KV cache: `EngineOptions.memory` of its engine.
        process_bytes: what its process takes besides.
        plan: where the engine's bytes go.
        exact: from an earlier start's caches and weights, not from the checkpoint's headers alone.
    """

    engine_bytes: int
    process_bytes: int
    plan: MemoryPlan
    exact: bool

    @property
    def total_bytes(self) -> int:
        return self.engine_bytes + self.process_bytes


Planner = Callable[[EngineOptions, int], ModelPlan]
"""(options, bytes that it may take) → what a model will take. Takes a while; raises PenstockError if it cannot fit."""


def plan_model(options: EngineOptions, room: int, machine: Machine | None = None) -> ModelPlan:
    """Plans a model, whose KV cache shrinks to what there is room for.

    Raises:
        CheckpointError: it cannot be read.
        MemoryPlanError: it does not fit; ConfigError: an option cannot be honoured.
    """
    machine = machine or this_machine()
    kept = known(options)
    if kept is not None:
        try:
            return _planned(options, room, machine, kept)
        except PackCacheError:
            pass  # the engine will not go on from it either
    return _planned(options, room, machine, None)


def _planned(options: EngineOptions, room: int, machine: Machine, kept: KeptStart | None) -> ModelPlan:
    """Of an engine that goes on from what was kept, or of a first start; raises PackCacheError if it cannot go on."""
    process = FIRST_PROCESS_BYTES if kept is None else PROCESS_BYTES
    if room <= process:
        message = f"an engine process alone takes {format_bytes(process)}, and there is {format_bytes(max(0, room))}."
        raise MemoryPlanError(message)
    asked = room if options.memory is None else min(room, options.memory)
    machine = replace(machine, memory_available=int((asked - process) / _SLACK))
    facts = kept.facts if kept is not None else model_facts(open_checkpoint(options.model, options.hf_overrides))
    wished = replace(options, memory=None)
    concrete = resolve(wished, facts, machine).options
    if kept is not None:
        plan = kept.plan(wished, concrete, machine)
        kept.check(concrete, plan)
    else:
        plan = plan_from_headers(facts, wished, concrete, machine)
    return ModelPlan(int(plan.total_bytes * _SLACK), process, plan, kept is not None)


class MemoryBudget:
    """Bytes that models may take together, and which of them hold how many."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: dict[str, int] = {}

    @property
    def held(self) -> Mapping[str, int]:
        return self._held

    @property
    def free(self) -> int:
        return self.total - sum(self._held.values())

    def take(self, name: str, count: int) -> None:
        """Raises ValueError for more than is free, or a model that holds some already."""
        if count > self.free or name in self._held:
            raise ValueError(f"{name} cannot take {count} bytes: {self.free} are free, held: {self._held}")
        self._held[name] = count

    def give_back(self, name: str) -> None:
        """Safe to call for a model that holds nothing."""
        self._held.pop(name, None)
