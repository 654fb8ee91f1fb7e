"""The engine of one model in a host: a process of its own, with the options that the budget leaves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from penstock.config.cores import CoreBoard
from penstock.config.environment import pack_folder
from penstock.config.errors import EngineDeadError
from penstock.config.names import BUNDLED_MODEL
from penstock.config.options import EngineOptions
from penstock.engine.api import EngineClient
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.process_client import ProcessClient
from penstock.library.resolve import resolve, with_draft_path
from penstock.weights.open import bundled_model_path

Progress = Callable[[int, int], None]


class HostedEngine(EngineClient, Protocol):
    """An engine that is started again when it dies, until that is given up."""

    async def given_up(self) -> EngineDeadError:
        """Returns, with why, when nobody tries any more."""


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
