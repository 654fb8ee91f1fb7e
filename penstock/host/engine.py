"""The engine of one model in a host: a process of its own, with the options that the budget leaves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from penstock.config.cores import CoreBoard
from penstock.config.data_parallel import check_one_engine
from penstock.config.environment import pack_folder
from penstock.config.errors import EngineDeadError
from penstock.config.names import BUNDLED_MODEL
from penstock.config.options import EngineOptions
from penstock.core.policies.pause import Control
from penstock.engine.api import EngineClient, EngineState
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.process_client import ProcessClient
from penstock.library.resolve import resolve, with_draft_path
from penstock.weights.open import bundled_model_path

Progress = Callable[[int, int], None]


class HostedEngine(EngineClient, Protocol):
    """An engine that is started again when it dies, until that is given up."""

    async def given_up(self) -> EngineDeadError:
        """Returns, with why, when nobody tries any more."""


@runtime_checkable
class RestingEngine(Protocol):
    """An engine that can hold nothing until it is woken."""

    @property
    def state(self) -> EngineState: ...

    def control(self, control: Control) -> None:
        """As EngineClient."""

    @property
    def can_sleep(self) -> bool:
        """Whether nobody else uses this engine, who would take its sleep for its death."""

    async def sleep(self) -> None:
        """Ends its process, and with it all it holds; requests that wait go on once it has been woken.

        Raises:
            EngineDeadError: the engine is not ready.
        """

    async def wake(self) -> None:
        """Starts a sleeping engine again; does nothing where it is awake.

        Raises:
            PenstockError: it cannot be started; it sleeps on.
        """


MakeEngine = Callable[[EngineOptions, float | None, Progress | None], HostedEngine]
"""(options, seconds of work that may wait, told how loading goes) → the engine of a model, which is not started yet."""


def one_engine(options: EngineOptions, max_queue_seconds: float | None, progress: Progress | None) -> HostedEngine:
    """An engine in a process of its own; raises ConfigError where several are asked for, which are made elsewhere."""
    check_one_engine(options, "this server has one engine")
    return ProcessClient(options, on_progress=progress, max_queue_seconds=max_queue_seconds)


class Engines(Protocol):
    """How a host gets engines and the text sides of models."""

    def options(self, options: EngineOptions) -> EngineOptions:
        """The options a model is planned and started with; takes a while.

        Raises:
            ConfigError: there is no model of that name.
        """

    def engine(self, options: EngineOptions, progress: Progress) -> HostedEngine:
        """An engine that is not started yet."""

    def text(self, options: EngineOptions) -> TextPipeline:
        """The text side, ready for the first request; takes a while."""


class ProcessEngines:
    """Engines in processes of their own."""

    def __init__(self, max_queue_seconds: float | None = None, cores: CoreBoard | None = None) -> None:
        """`max_queue_seconds` and `cores` as for ProcessClient."""
        self._max_queue_seconds, self._cores = max_queue_seconds, cores

    def options(self, options: EngineOptions) -> EngineOptions:
        return hosted_options(options)

    def engine(self, options: EngineOptions, progress: Progress) -> HostedEngine:
        return ProcessClient(
            options, on_progress=progress, max_queue_seconds=self._max_queue_seconds, cores=self._cores
        )

    def text(self, options: EngineOptions) -> TextPipeline:
        text = TextPipeline.of(options)
        text.tokenizer.prepare()
        return text


def hosted_options(options: EngineOptions) -> EngineOptions:
    """The options of a model that comes and goes: it has a place on disk, and its next start goes on from this one's.

    Takes a while. A model alone starts once, so that keeping the start of a small one is not worth it; here it starts
    again and again.

    Raises:
        ConfigError: there is no model of that name.
    """
    folder = pack_folder(options.pack_cache)
    model = str(bundled_model_path() if options.model == BUNDLED_MODEL else resolve(options.model))
    drafts = with_draft_path(options.speculative_config)
    pack_cache = "off" if folder is None else str(folder)
    return replace(options, model=model, speculative_config=drafts, pack_cache=pack_cache)
