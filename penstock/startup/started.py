"""What a start leaves, however it was done: the runner, and what the engine tells of itself. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.config.cache_spec import CacheGroup
from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision
from penstock.core.protocol import Runner
from penstock.runtime.adapters import AdapterRoom
from penstock.startup.memory_plan import MemoryPlan

if TYPE_CHECKING:
    from penstock.runtime.ranks.gathered import OtherShares

log = logging.getLogger(__name__)


def log_plan(plan: MemoryPlan) -> None:
    """Tells the log where the memory goes."""
    for row in plan.table():
        log.info("%-12s %12s  %s", *row)


def log_notes(notes: Iterable[Decision]) -> None:
    """Tells the log what was decided while the model was loaded."""
    for note in notes:
        log.info("%-14s %s%s", note.name, note.value, f" ({note.reason})" if note.reason else "")


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine tells of itself; as in engine.api.EngineInfo."""

    architecture: str
    vocab_size: int
    determinism: str
    numbers: str
    settings: tuple[Decision, ...]
    kernels: tuple[Decision, ...]
    parameters: int = 0
    stored: str = ""
    row_width: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """A model that can compute steps.

    Attributes:
        options: concrete.
        plan: where the memory goes.
        model_path: where its files lie.
        groups: its cache groups.
        whole_prompts: it is an encoder.
        runner: runs its steps.
        told: facts of it.
        adapters: what its requests may have.
        others: memory of the model's other ranks; None where there are none.
    """

    options: EngineOptions
    plan: MemoryPlan
    model_path: str
    groups: tuple[CacheGroup, ...]
    whole_prompts: bool
    runner: Runner
    told: Told
    adapters: AdapterRoom = field(default_factory=AdapterRoom)
    others: OtherShares | None = None
