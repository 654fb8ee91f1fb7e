"""What a start leaves, however it was done: the runner, and what the engine tells of itself. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision
from penstock.core.kv.cache_spec import CacheGroup
from penstock.core.protocol import Runner
from penstock.startup.memory_plan import MemoryPlan


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
    """

    options: EngineOptions
    plan: MemoryPlan
    model_path: str
    groups: tuple[CacheGroup, ...]
    whole_prompts: bool
    runner: Runner
    told: Told
