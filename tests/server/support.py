"""A scripted engine, and a real HTTP server around it on a port the system chooses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from penstock.config.errors import EngineDeadError, OverloadedError
from penstock.config.options import ServerOptions
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineOutput, EngineRequest, EngineStats, FinishReason
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.app import create_app
from penstock.server.lifecycle import Lifecycle
from penstock.server.serve import bind, http_server, url_of

ANSWER = "Hello! A table for two at seven, of course."


@dataclass
class ScriptedClient:
    """An EngineClient that answers every request with the same tokens, one at a time, `delay` seconds apart.

    Attributes:
        script: the tokens; cut at max_tokens.
        first_delay: seconds before the first token (a long prefill).
        die_after: after so many tokens each branch ends with an error.
        full: refuse as overloaded.
        live: request ids now running; seen: every request ever submitted.
    """

    script: tuple[int, ...]
    vocab_size: int
    delay: float = 0.0
    first_delay: float = 0.0
    die_after: int | None = None
    full: bool = False
    state: EngineState = EngineState.READY
    live: set[str] = field(default_factory=set)
    seen: list[EngineRequest] = field(default_factory=list)
    generated: int = 0

    def reset(self) -> None:
        """Back to the default behaviour, with nothing seen."""
        self.delay, self.first_delay, self.die_after, self.full = 0.0, 0.0, None, False
        self.state = EngineState.READY
        self.seen.clear()

    async def start(self) -> EngineInfo:
        return self.info

    @property
    def info(self) -> EngineInfo:
        if self.state is EngineState.STARTING:
            raise EngineDeadError("not started")
        return EngineInfo(
            *("scripted", "/secret/path", "Scripted", 2048, self.vocab_size, 16, 64, 8, 256, "float32", "cpu"),
            determinism="always",
        )

    def submit(self, request: EngineRequest) -> ScriptedOutputs:
        if self.full:
            raise OverloadedError("The queue is full; retry later.", retry_after=3)
        self.seen.append(request)
        return ScriptedOutputs(self._run(request))

    async def _run(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.live.add(request.request_id)
        try:
            yield EngineOutput(request.request_id, 0)
            await asyncio.sleep(self.first_delay)
            script = self.script
            while len(script) < (request.sampling.max_tokens or 0) and request.sampling.ignore_eos:
                script += self.script
            script = script[: request.sampling.max_tokens]
            for position, token in enumerate(script):
                await asyncio.sleep(self.delay)
                for branch in range(request.sampling.n):
                    yield self._output(request, branch, position, token, position == len(script) - 1)
                if position + 1 == self.die_after:
                    return
        finally:
            self.live.discard(request.request_id)

    def _output(self, request: EngineRequest, branch: int, position: int, token: int, last: bool) -> EngineOutput:
        self.generated += 1
        sampling, reason, error = request.sampling, None, None
        if last:
            reason = FinishReason.STOP if token in request.stop_ids else FinishReason.LENGTH
        if position + 1 == self.die_after:
            reason, error = FinishReason.ERROR, "The engine stopped."
        prompt = ()
        if sampling.prompt_logprobs is not None and branch == 0 and position == 0:
            prompt = tuple(_logprobs(token, sampling.prompt_logprobs) for token in request.prompt_ids[1:])
        return EngineOutput(
            *(request.request_id, branch, (token,)),
            () if sampling.logprobs is None else (_logprobs(token, sampling.logprobs),),
            *(prompt, reason, error),
            cached_tokens=len(request.prompt_ids) // 2 if position == 0 and branch == 0 else None,
            queue_seconds=0.0 if position == 0 and branch == 0 else None,
        )

    def cancel(self, request_id: str) -> None:
        self.live.discard(request_id)

    async def stats(self) -> EngineStats:
        if self.state is not EngineState.READY:
            raise EngineDeadError("not there")
        return EngineStats(
            *(len(self.live), 0, 0, 16, 4, 64),
            steps=self.generated, generated_tokens=self.generated, prefix_queries=100, prefix_hits=25,
            miss_reasons=(("cold", 3),),
        )  # fmt: skip

    async def close(self) -> None:
        self.state = EngineState.STOPPED


class ScriptedOutputs:
    """The outputs of one request."""

    def __init__(self, outputs: AsyncIterator[EngineOutput]) -> None:
        self._outputs = outputs

    def __aiter__(self) -> ScriptedOutputs:
        return self

    async def __anext__(self) -> EngineOutput:
        return await anext(self._outputs)

    async def aclose(self) -> None:
        await self._outputs.aclose()  # type: ignore[attr-defined]


def _logprobs(token: int, alternatives: int) -> TokenLogprobs:
    top = tuple((token + step, -0.5 - step) for step in range(alternatives))
    return TokenLogprobs(token, -0.5, 1, top)


@dataclass
class Running:
    """A server that runs."""

    url: str
    port: int
    client: ScriptedClient
    lifecycle: Lifecycle
    loop: asyncio.AbstractEventLoop

    def connect(self, timeout: float = 10.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def raw(self, data: bytes, timeout: float = 10.0) -> bytes:
        """Sends bytes, and returns what comes until the server closes or `timeout` passes without news."""
        with self.connect(timeout) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
            return read_all(connection)

    def call(self, action: Callable[[], object]) -> None:
        """Runs `action` in the server's event loop."""
        self.loop.call_soon_threadsafe(action)

    def until_idle(self, seconds: float = 1.0) -> None:
        """Fails unless every request of the engine ends in time."""
        until(lambda: not self.client.live, seconds)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
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


@contextlib.contextmanager
def running(client: ScriptedClient, text: TextPipeline, options: ServerOptions | None = None) -> Iterator[Running]:
    """A real server in a thread, on a free loopback port."""
    options = options or ServerOptions()
    listener = bind("127.0.0.1", 0)
    started: list[tuple[asyncio.AbstractEventLoop, Lifecycle, object]] = []

    async def main() -> None:
        lifecycle = Lifecycle()
        frontend = Frontend(client, text, served_name="scripted")
        server = http_server(create_app(frontend, options, lifecycle))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        started.append((asyncio.get_running_loop(), lifecycle, server))
        await serving

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    until(lambda: bool(started) or not thread.is_alive())
    loop, lifecycle, server = started[0]
    url = url_of(listener)
    try:
        yield Running(url, int(url.rsplit(":", 1)[1]), client, lifecycle, loop)
    finally:
        loop.call_soon_threadsafe(lifecycle.aborted.set)
        server.should_exit = True  # type: ignore[attr-defined]
        thread.join(10)
        assert not thread.is_alive()
