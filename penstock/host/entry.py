"""A model in a host: its state, who uses it, and what it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ModelUnavailableError
from penstock.engine.api import EngineClient, EngineInfo, EngineState
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.source import ModelSource

FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 300.0  # between a load that failed and the next


class ModelState(str, Enum):
    """Where a model is. ASLEEP: its engine has ended, and what the next one starts from is at hand."""

    UNLOADED = "unloaded"
    WAITING = "waiting"  # for memory
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"  # its engine is ended
    ASLEEP = "asleep"
    FAILED = "failed"


_NEXT: Mapping[ModelState, frozenset[ModelState]] = MappingProxyType(
    {
        ModelState.UNLOADED: frozenset({ModelState.WAITING}),
        ModelState.WAITING: frozenset({ModelState.LOADING, ModelState.UNLOADED, ModelState.FAILED}),
        ModelState.LOADING: frozenset({ModelState.READY, ModelState.UNLOADED, ModelState.FAILED}),
        ModelState.READY: frozenset({ModelState.LEAVING}),
        ModelState.LEAVING: frozenset({ModelState.ASLEEP, ModelState.UNLOADED, ModelState.FAILED}),
        ModelState.ASLEEP: frozenset({ModelState.WAITING, ModelState.UNLOADED}),
        ModelState.FAILED: frozenset({ModelState.WAITING, ModelState.UNLOADED}),
    }
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model could not be loaded, in a sentence, and when it may be tried again (monotonic seconds)."""

    sentence: str
    until: float


@dataclass(slots=True)
class ModelEntry:
    """One model.

    Attributes:
        source: as it was listed.
        state: where it is; `become` changes it.
        frontend: what serves it while it is READY.
        engine: its engine, from LOADING to LEAVING.
        text: its text side, once read; kept while it sleeps.
        planned: bytes it holds of the budget.
        uses: leases.
        waiting: callers that wait for it.
        asked: whether somebody wants it loaded who does not wait.
        leaving: it is to be unloaded as soon as nobody uses it; new callers wait for the next load.
        stays: seconds without a use until it sleeps, None for ever, unless a caller says otherwise.
        keep_alive: the same, as a caller said last since it was loaded.
        used_at, loaded_at: monotonic seconds.
        expires_at: the same, when it will sleep; None while it is used, or for ever.
        progress: (bytes loaded, bytes in all).
        failure: why the last load failed, if it did.
        failures: loads that failed in a row.
        loads: how often it was loaded.
        generates: whether it continues prompts, once its text side was read.
        past: what engines that are gone have counted.
        task: the load in progress.
        timer: runs off when it has been idle for long enough.
    """

    source: ModelSource
    stays: float | None
    keep_alive: float | None
    state: ModelState = ModelState.UNLOADED
    frontend: Frontend | None = None
    engine: EngineClient | None = None
    text: TextPipeline | None = None
    planned: int = 0
    uses: int = 0
    waiting: int = 0
    asked: bool = False
    leaving: bool = False
    used_at: float = field(default_factory=time.monotonic)
    loaded_at: float = 0.0
    expires_at: float | None = None
    progress: tuple[int, int] = (0, 0)
    failure: Failure | None = None
    failures: int = 0
    loads: int = 0
    generates: bool = True
    past: EngineStats = field(default_factory=EngineStats)
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def idle(self) -> bool:
        """Whether nobody uses it, nor is about to."""
        return not (self.uses or self.waiting)

    @property
    def unwanted(self) -> bool:
        """Whether its engine may end without anybody's noticing: nobody uses it, waits for it or loads it."""
        return self.idle and self.task is None and not self.pinned

    @property
    def pinned(self) -> bool:
        """Whether it stays whoever else wants its memory."""
        return self.source.pinned

    @property
    def usable(self) -> bool:
        """Whether a caller can have it at once."""
        return self.state is ModelState.READY and not self.leaving

    @property
    def info(self) -> EngineInfo | None:
        """Facts of its engine, while a caller can have it at once."""
        return self.engine.info if self.usable and self.engine is not None else None

    @property
    def expires_in(self) -> float | None:
        """Seconds until it will sleep while it is loaded, as far as is known; None for never."""
        if self.state is not ModelState.READY or self.keep_alive is None:
            return None
        return self.keep_alive if self.expires_at is None else max(0.0, self.expires_at - time.monotonic())

    @property
    def told_state(self) -> str:
        """The state for people: that of a READY model's engine, if it is being started again, goes before."""
        engine = self.engine
        if self.state is ModelState.READY and engine is not None and engine.state is EngineState.RESTARTING:
            return str(engine.state.value)
        return self.state.value

    def become(self, state: ModelState) -> None:
        """Changes the state.

        Raises:
            ValueError: there is no way from the present one.
        """
        if state not in _NEXT[self.state]:
            raise ValueError(f"{self.name}: {self.state.value} cannot become {state.value}")
        self.state = state

    def failed(self, sentence: str) -> None:
        """Notes why it could not be loaded; each time in a row it rests twice as long."""
        pause = min(FIRST_PAUSE_S * 2**self.failures, LAST_PAUSE_S)
        self.failures = min(self.failures + 1, 16)
        self.failure = Failure(sentence, time.monotonic() + pause)
        self.become(ModelState.FAILED)

    def check_loaded(self) -> None:
        """Raises ModelUnavailableError, with the reason, for a model whose last load has failed."""
        failure = self.failure
        if self.state is ModelState.FAILED and failure is not None:
            left = max(1, round(failure.until - time.monotonic()))
            raise ModelUnavailableError(failure.sentence, retry_after=left, code="model_load_failed")

    def check_rested(self) -> None:
        """As `check_loaded`, while it is too early to try again."""
        if self.failure is not None and time.monotonic() < self.failure.until:
            self.check_loaded()

    def rest_again(self) -> None:
        """Forgets the last failure, for somebody who says that it has been mended."""
        self.failure, self.failures = None, 0

    def cancel_timer(self) -> None:
        """Whatever was to happen when it had been idle for long enough will not."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer, self.expires_at = None, None

    def sentence(self) -> str:
        """What it is doing, for those who wait."""
        if self.state is ModelState.LOADING:
            done, total = self.progress
            share = f", {100 * done // total} % of its weights" if total else ""
            return f"loading {self.name}{share}"
        if self.state is ModelState.WAITING:
            return f"{self.name} waits for memory that other models use"
        return f"{self.name} is {self.told_state}"
