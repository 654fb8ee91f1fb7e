"""A real HTTP server, on a port the system chooses, over a real engine whose runner says what a test wants it to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.config.engine_stats import EngineStats
from penstock.config.options import EngineOptions, ServerOptions
from penstock.core.protocol import NewSequence, Runner, SlotResult, StepPlan, StepResult, TokenLogprobs
from penstock.engine.api import EngineClient, EngineInfo, EngineState
from penstock.engine.frontend import Frontend
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import THREAD_NAME, ThreadClient
from penstock.host.process_client import ProcessClient
from penstock.server.app import create_app
from penstock.server.kserve_grpc.beside import grpc_beside
from penstock.server.lifecycle import Lifecycle
from penstock.server.serve import bind, http_server, url_of
from tests.engine.support import Wrapped, null_engine, null_process

ANSWER = "Hello! A table for two at seven, of course."
Result = TypeVar("Result")


class ScriptedRunner(Wrapped):
    """A runner that answers every row with the same tokens, over and over.

    Attributes:
        script: the tokens.
        endless: the last token of the script, which ends it, is left out.
        delay: seconds a step takes.
        first_delay: seconds more where a sequence draws its first token.
        die_after: each sequence fails after so many tokens.
        likelier: tokens told to be likelier than the one that is drawn.
        seen: every request admitted, as the row of its first sequence.
        drawn: how many tokens the sequence in each slot has.
        held: set when the engine has come to where it was told to wait.
    """

    def __init__(self, runner: Runner, script: tuple[int, ...]) -> None:
        super().__init__(runner)
        self.script = script
        self.seen: list[NewSequence] = []
        self._rows: dict[int, NewSequence] = {}
        self.drawn: Counter[int] = Counter()
        self._go, self.held = threading.Event(), threading.Event()
        self._held_at: int | None = None
        self.reset()

    def reset(self) -> None:
        """Back to the default behaviour, with nothing seen."""
        self.delay, self.first_delay, self.likelier, self.endless = 0.0, 0.0, 0, False
        self.die_after: int | None = None
        self.seen.clear()
        self.go()

    def hold(self, drawn: int | None = None) -> None:
        """The engine waits, until `go`, in its next step, or before a sequence gets more than `drawn` tokens."""
        self._held_at = drawn
        self.held.clear()
        self._go.clear()

    def go(self) -> None:
        self._held_at = None
        self._go.set()

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        for new in plan.new_sequences:
            self._rows[new.slot], self.drawn[new.slot] = new, len(new.generated_ids)
            if new.sequence == 0 and not new.generated_ids:
                self.seen.append(new)
        super().submit(plan, masks)

    def sample(self, step: int) -> StepResult:
        result = super().sample(step)
        first = any(row.tokens and not self.drawn[row.slot] for row in result.results)
        time.sleep(self.delay + first * self.first_delay)
        at = self._held_at
        if at is None or any(row.tokens and self.drawn[row.slot] >= at for row in result.results):
            self.held.set()
            self._go.wait()
        return result._replace(results=tuple(map(self._scripted, result.results)))

    def _scripted(self, row: SlotResult) -> SlotResult:
        sampling, drawn = self._rows[row.slot].sampling, self.drawn[row.slot]
        scored = tuple(_logprobs(entry.token, sampling.prompt_logprobs or 0) for entry in row.prompt_logprobs)
        if row.pooled is not None:
            return row
        if not row.tokens:
            return SlotResult(row.slot, prompt_logprobs=scored)
        if drawn == self.die_after:
            return SlotResult(row.slot, error="The engine stopped.")
        self.drawn[row.slot] += 1
        token = self.script[drawn % (len(self.script) - self.endless)]
        logprobs = () if sampling.logprobs is None else (_logprobs(token, sampling.logprobs, self.likelier),)
        if named := sampling.logprob_token_ids:
            told = tuple((one, -1.0 - place) for place, one in enumerate(named))
            logprobs = () if not logprobs else (replace(logprobs[0], top=told),)
        return SlotResult(row.slot, (token,), logprobs, scored)


def _logprobs(token: int, alternatives: int, likelier: int = 0) -> TokenLogprobs:
    ids = max(alternatives, token + 21)  # where all of the vocabulary is asked for, those behind the last are the first
    top = tuple(((token - likelier + step) % ids, -0.5 - step) for step in range(alternatives))
    return TokenLogprobs(token, -0.5, 1, top)


@dataclass
class Serving:
    """A server that runs, whatever its engine does."""

    url: str
    port: int
    lifecycle: Lifecycle
    loop: asyncio.AbstractEventLoop
    client: EngineClient

    def connect(self, timeout: float = 60.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def raw(self, data: bytes, timeout: float = 60.0) -> bytes:
        """Sends bytes, and returns what comes until the server closes or `timeout` passes without news."""
        with self.connect(timeout) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
            return read_all(connection)

    def call(self, action: Callable[[], object]) -> None:
        """Runs `action` in the server's event loop."""
        self.loop.call_soon_threadsafe(action)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The server's event loop does nothing meanwhile: what is sent has come before it looks."""
        paused, go = threading.Event(), threading.Event()
        self.call(lambda: (paused.set(), go.wait()))
        paused.wait()
        try:
            yield
        finally:
            go.set()

    def wait(self, work: Coroutine[Any, Any, Result], seconds: float = 60.0) -> Result:
        """The result of `work`, done in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)


@dataclass
class Running(Serving):
    """A server whose engine is ready, in a thread, and does what its runner's script says."""

    client: ThreadClient
    engine: Engine
    runner: ScriptedRunner

    @property
    def live(self) -> int:
        """Requests the engine has and has not ended."""
        return len({s.request.request_id for s in self.engine.scheduler.ledger.live()})

    @property
    def cancelled(self) -> int:
        """Sequences the engine has ended before they had ended themselves, so far."""
        return self.engine.scheduler.ledger.counters.cancelled

    def stats(self) -> EngineStats:
        return self.wait(self.client.stats())

    def until_told(self) -> None:
        """Waits until the engine has been told to end whatever it has, held or not."""
        until(lambda: all(stream.closed for stream in self.client._streams.live()))

    def until_idle(self, seconds: float = 60.0) -> None:
        """Fails unless every request of the engine ends in time and leaves nothing behind."""
        until(lambda: not (self.client._streams or self.live), seconds)
        stats = self.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        self.engine.scheduler.check_integrity()


def until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(65536):
            data += piece
    return data


def script_of(text: TextPipeline, answer: str = ANSWER) -> tuple[int, ...]:
    return (*text.tokenizer.encode(answer, add_special_tokens=False), text.eos_ids[0])


def engine_threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


@contextlib.contextmanager
def serving(
    client: EngineClient, text: TextPipeline, options: ServerOptions | None = None, said: list[str] | None = None
) -> Iterator[Serving]:
    """A real server in a thread, on a free loopback port, that starts the engine as it starts itself; what it tells its
    operator of gRPC is `said`."""
    options, threads = options or ServerOptions(), engine_threads()
    listener = bind("127.0.0.1", 0)
    started: list[tuple[asyncio.AbstractEventLoop, Lifecycle, object]] = []

    async def main() -> None:
        lifecycle = Lifecycle()
        starting = asyncio.ensure_future(client.start())
        frontend = Frontend(client, text, served_name="scripted")
        app = create_app(frontend, options, lifecycle)
        server = http_server(app)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        async with grpc_beside(app, options, (said if said is not None else []).append):
            started.append((asyncio.get_running_loop(), lifecycle, server))
            await serving
        await client.close()
        await starting

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    until(lambda: bool(started) or not thread.is_alive())
    loop, lifecycle, server = started[0]
    url = url_of(listener)
    try:
        yield Serving(url, int(url.rsplit(":", 1)[1]), lifecycle, loop, client)
    finally:
        loop.call_soon_threadsafe(lifecycle.aborted.set)
        server.should_exit = True  # type: ignore[attr-defined]
        thread.join(60)
        assert not thread.is_alive()
        assert client.state is EngineState.STOPPED
        assert engine_threads() == threads


@contextlib.contextmanager
def running(
    text: TextPipeline,
    options: ServerOptions | None = None,
    *,
    num_blocks: int = 1024,
    max_queue_seconds: float | None = None,
    said: list[str] | None = None,
) -> Iterator[Running]:
    """A server over a null engine that answers ANSWER."""
    built: list[tuple[Engine, ScriptedRunner]] = []

    def scripted(runner: Runner) -> ScriptedRunner:
        return ScriptedRunner(runner, script_of(text))

    def build() -> tuple[Engine, EngineInfo]:
        engine, info = null_engine(num_blocks=num_blocks, wrap=scripted)
        assert isinstance(engine.runner, ScriptedRunner)
        built.append((engine, engine.runner))
        return engine, replace(info, model_path="/secret/path", vocab_size=text.vocab_size)

    client = ThreadClient(build, max_queue_seconds=max_queue_seconds)
    with serving(client, text, options, said) as server:
        until(lambda: client.state is EngineState.READY)
        try:
            yield Running(server.url, server.port, server.lifecycle, server.loop, client, *built[0])
        finally:
            built[0][1].go()


@contextlib.contextmanager
def serving_a_process(
    text: TextPipeline, folder: Path, restart: float = 3600.0, model: str = "null"
) -> Iterator[tuple[Serving, ProcessClient]]:
    """A server over a null engine in a process of its own, which is started again after `restart` s if it dies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.host.child.sys.executable", str(null_process(folder)))
        patch.setattr("penstock.host.process_client.FIRST_RESTART_DELAY_S", restart)
        client = ProcessClient(EngineOptions(model=model))
        with serving(client, text) as server:
            until(lambda: client.state is EngineState.READY)
            yield server, client


def kill(client: ProcessClient) -> None:
    """Ends the engine's process as a crash would, and waits until the client has noticed."""
    os.kill(client.pid, signal.SIGKILL)
    until(lambda: client.state is EngineState.RESTARTING)


@contextlib.contextmanager
def serving_in_state(state: EngineState, text: TextPipeline, folder: Path) -> Iterator[Serving]:
    """A server whose engine came into that state as engines do: it loads, its process was killed, it was closed."""
    if state is EngineState.STARTING:
        loaded = threading.Event()

        def build() -> tuple[Engine, EngineInfo]:
            loaded.wait()
            return null_engine()

        with serving(ThreadClient(build), text) as server:
            try:
                yield server
            finally:
                loaded.set()
    elif state is EngineState.RESTARTING:
        with serving_a_process(text, folder) as (server, process):
            kill(process)
            yield server
    else:
        with running(text) as server:
            server.wait(server.client.close())
            yield server
