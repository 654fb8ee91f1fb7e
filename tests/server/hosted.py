"""A real HTTP server over a host, whose engines have no models and load when a test lets them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.config.options import ServerOptions
from penstock.host.host import Host
from penstock.host.source import ModelSource
from penstock.server.app import create_app
from penstock.server.lifecycle import Lifecycle
from penstock.server.serve import bind, http_server, url_of
from tests.host.support import Engines, host_of
from tests.server.support import until


@dataclass
class Hosting:
    """A server of many models."""

    url: str
    lifecycle: Lifecycle
    loop: asyncio.AbstractEventLoop
    host: Host
    engines: Engines

    def states(self) -> dict[str, str]:
        async def told() -> dict[str, str]:
            return {entry.name: entry.state.value for entry in self.host.told()}

        return asyncio.run_coroutine_threadsafe(told(), self.loop).result(60)


@contextlib.contextmanager
def hosting(
    engines: Engines, *sources: ModelSource, options: ServerOptions | None = None, **given: Any
) -> Iterator[Hosting]:
    """A server in a thread, on a free loopback port."""
    listener = bind("127.0.0.1", 0)
    started: list[tuple[asyncio.AbstractEventLoop, Lifecycle, Host, object]] = []

    async def main() -> None:
        lifecycle, host = Lifecycle(), host_of(engines, *sources, **given)
        server = http_server(create_app(host, options or ServerOptions(), lifecycle))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        started.append((asyncio.get_running_loop(), lifecycle, host, server))
        await serving
        await host.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    until(lambda: bool(started) or not thread.is_alive())
    loop, lifecycle, host, server = started[0]
    try:
        yield Hosting(url_of(listener), lifecycle, loop, host, engines)
    finally:
        for gate in engines.gates.values():
            gate.set()
        loop.call_soon_threadsafe(lifecycle.aborted.set)
        server.should_exit = True  # type: ignore[attr-defined]
        thread.join(60)
        assert not thread.is_alive()
