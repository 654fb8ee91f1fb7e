"""An HTTP process of several: `python -m penstock.server.worker`, started by a host, a client of its engines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.engine_stats import EngineStats
from penstock.config.environment import read_environment
from penstock.config.errors import PenstockError
from penstock.config.logs import log_handler
from penstock.config.options import EngineOptions
from penstock.engine.frontend import Frontend
from penstock.host import front_messages as front
from penstock.host.attached_client import AttachedClient
from penstock.host.attached_host import AttachedHost
from penstock.server.accepting import Accepting
from penstock.server.lifecycle import Lifecycle
from penstock.server.serve import HttpServer, http_server, http_side, loop_factory, settle_process
from penstock.server.siblings import Siblings

if TYPE_CHECKING:
    from fastapi import FastAPI

MakeApp = Callable[..., "FastAPI"]
ALIVE_S = 1.0
_LOOK_S = 0.005
_HEARD_S = 0.1  # for what the host has told, or that it has gone, to be heard
_log = logging.getLogger(__name__)


class _OneModel:
    """This process's part in a server of one model: a client of its engine."""

    def __init__(self, launch: front.FrontLaunch, engine: EngineOptions, tell: Callable[[front.Up], None]) -> None:
        assert engine.served_model_name is not None  # the host has settled it
        self._engine, self._name = engine, engine.served_model_name
        self._options = options = launch.server
        self._client = AttachedClient(
            launch.client,
            Path(launch.folder),
            tell,
            max_queue_seconds=options.max_queue_seconds,
            processes=options.api_server_count,
        )

    async def served(self) -> tuple[Frontend, MakeApp]:
        """What is served, and what makes the application."""
        text, create_app = await asyncio.to_thread(http_side, self._engine, self._options)
        return Frontend(self._client, text, served_name=self._name, seed=self._engine.seed), create_app

    async def heard(self, told: front.OfEngine | front.OfHost) -> None:
        """The host has told of the engine."""
        if not isinstance(told, front.OfHost):
            await self._client.heard(told)

    def own(self) -> Mapping[str, EngineStats]:
        """What this process knows of its requests, by model."""
        return {self._name: self._client.own()}

    async def close(self) -> None:
        """Hangs up."""
        await self._client.close()


class _ManyModels:
    """This process's part in a server of many models: a client of their host, and of the engine of each."""

    def __init__(self, launch: front.FrontLaunch, tell: Callable[[front.Up], None]) -> None:
        self._host = AttachedHost(launch, tell)

    async def served(self) -> tuple[AttachedHost, MakeApp]:
        """What is served, and what makes the application."""
        return self._host, await asyncio.to_thread(_create_app)

    async def heard(self, told: front.OfEngine | front.OfHost) -> None:
        """The host has told something."""
        await self._host.heard(told)

    def own(self) -> Mapping[str, EngineStats]:
        """What this process knows of its requests, by model."""
        return self._host.own()

    async def close(self) -> None:
        """Hangs up."""
        await self._host.close()


def _create_app() -> MakeApp:
    """Imported beside the event loop, since its modules take as long as an engine does to start again."""
    from penstock.server.app import create_app

    return create_app


class Worker:
    """One HTTP process: it answers on the socket it was given until its host tells it to end, or ends itself."""

    def __init__(self, launch: front.FrontLaunch, writer: asyncio.StreamWriter) -> None:
        self._launch, self._writer = launch, writer
        self._lifecycle = Lifecycle()
        self._side: _OneModel | _ManyModels
        if launch.engine is not None:
            self._side = _OneModel(launch, launch.engine, self._tell)
        else:
            self._side = _ManyModels(launch, self._tell)
        self._siblings = Siblings(launch.place, launch.server.api_server_count, self._tell, self._side.own)
        self._draining: asyncio.Future[bool] | None = None
        self._orphaned = False

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Answers; returns when everything has ended."""
        told, alive = asyncio.ensure_future(self._listen_to_host(reader)), asyncio.ensure_future(self._live())
        server: HttpServer | None = None
        serving: asyncio.Future[None] | None = None
        accepting: Accepting | None = None
        try:
            server = await self._server()
            if told.done():  # it is to end before it has answered anybody
                return
            serving = asyncio.ensure_future(server.serve(sockets=[]))
            while not (server.started or serving.done() or told.done()):
                await asyncio.sleep(_LOOK_S)
            if server.started:
                there = server.server_state.connections
                listener = socket.socket(fileno=self._launch.listener)
                accepting = Accepting(listener, server.connection, lambda: len(there))
                self._tell(front.Listening())
                gc.freeze()  # collecting garbage would look through all of this again and again
                await asyncio.wait((told, serving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await asyncio.wait((told,), timeout=_HEARD_S)  # what failed may have failed because the host has gone
            told.cancel()
            if accepting is not None:
                accepting.close()
            if server is not None and serving is not None:
                server.should_exit = True
                self._lifecycle.aborted.set()
                await asyncio.wait([serving])
            alive.cancel()
            for end in (*await asyncio.gather(told, alive, return_exceptions=True), serving and serving.exception()):
                if isinstance(end, Exception):
                    _log.error("an HTTP process ends", exc_info=end)
            await self._side.close()
            if self._orphaned:
                shutil.rmtree(Path(self._launch.folder).parent, ignore_errors=True)

    async def _server(self) -> HttpServer:
        served, create_app = await self._side.served()
        return http_server(create_app(served, self._launch.server, self._lifecycle, siblings=self._siblings))

    async def _listen_to_host(self, reader: asyncio.StreamReader) -> None:
        """Does what the host tells; returns when this process is to end."""
        while True:
            reading = asyncio.ensure_future(front.read_down(reader))
            waiting: set[asyncio.Future[object]] = {reading}  # type: ignore[arg-type]
            if self._draining is not None:
                waiting.add(self._draining)  # type: ignore[arg-type]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return  # drained
            match reading.result():
                case None:
                    self._orphaned = True  # the host has gone, and the engine with it
                    return
                case front.Drain(now=False):
                    self._draining = asyncio.ensure_future(self._lifecycle.drain(self._launch.server.drain_timeout))
                case front.Drain():
                    return
                case told:
                    await self._take(told)

    async def _take(self, told: front.Down) -> None:
        """Takes note of what the host tells of engines, of models, and of the other processes."""
        match told:
            case front.TellFigures() | front.Figures() | front.TellRequests() | front.Requests():
                self._siblings.heard(told)
            case front.FrontLaunch() | front.Drain():
                pass
            case _:
                await self._side.heard(told)

    async def _live(self) -> None:
        """Shows the host that this event loop runs."""
        while True:
            self._tell(front.Alive())
            await asyncio.sleep(ALIVE_S)

    def _tell(self, message: front.Up) -> None:
        front.write(self._writer, message)


async def _work(channel: socket.socket) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    try:
        launch = await front.read_down(reader)
        if isinstance(launch, front.FrontLaunch):
            await Worker(launch, writer).run(reader)
    except PenstockError as error:
        front.write(writer, front.Failed(str(error)))
        return 1
    finally:
        with contextlib.suppress(OSError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    return 0


def main() -> int:
    """Works until its host has it end, or has gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the host's to judge
    logging.basicConfig(handlers=[log_handler(form=read_environment().log_format)])
    logging.getLogger("penstock").setLevel(logging.INFO)
    settle_process()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_work(socket.socket(fileno=int(sys.argv[-1]))))


if __name__ == "__main__":
    sys.exit(main())
