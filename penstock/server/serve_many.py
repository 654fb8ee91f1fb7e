"""Serving many models: each is loaded when it is first asked for, and unloaded for others."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable

from penstock.config.errors import ConfigError
from penstock.config.machine import read_machine
from penstock.config.options import HostOptions, ServerOptions
from penstock.host.engine import ProcessEngines
from penstock.host.host import Host
from penstock.host.source import Sources
from penstock.server.lifecycle import Lifecycle
from penstock.server.serve import HttpServer, drain, http_server, on_signals, run, url_of, where_to_ask

_SHARE = 0.9  # of the memory that is free at the start: files that are mapped want some too


def serve_many(
    sources: Sources, hosted: HostOptions, options: ServerOptions, *, say: Callable[[str], None] = print
) -> None:
    """Serves models until SIGTERM or SIGINT, which drain as with one; returns when everything has ended.

    Args:
        sources: the models there are.
        hosted, options: how they are kept, and how the server listens.
        say: told what the person who started the server should read.

    Raises:
        ConfigError: an option is out of range, the list of models is wrong, or the address cannot be used or would be
            open to others without a key.
    """
    memory = hosted.memory or int(_SHARE * read_machine().memory_available)
    if options.api_server_count > 1:
        raise ConfigError(
            f"--api-server-count is {options.api_server_count}, but models that come and go are served by one HTTP "
            "process; leave it out, or name one model."
        )
    sources()  # whoever started the server is to see what is wrong with it
    run(options, lambda listener: _serve(sources, memory, hosted.keep_alive, options, listener, say))


async def _serve(
    sources: Sources,
    memory: int,
    keep_alive: float | None,
    options: ServerOptions,
    listener: socket.socket,
    say: Callable[[str], None],
) -> None:
    lifecycle, stop = Lifecycle(), asyncio.Event()
    on_signals(lifecycle, stop)
    host = Host(sources, ProcessEngines(options.max_queue_seconds), memory, keep_alive=keep_alive)
    server: HttpServer | None = None
    serving: asyncio.Future[None] | None = None
    try:
        from penstock.server.app import create_app

        server = http_server(create_app(host, options, lifecycle))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        gc.freeze()  # collecting garbage would look through all of this again and again
        say(_greeting(url_of(listener), host, keyed=bool(options.api_keys)))
        host.load_pinned()
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await drain(lifecycle, options.drain_timeout, say)
        stopping.cancel()
        if serving.done():
            serving.result()
    finally:
        if server is not None and serving is not None:
            server.should_exit = True
            lifecycle.aborted.set()
            await asyncio.wait([serving])
        await host.close()


def _greeting(url: str, host: Host, *, keyed: bool) -> str:
    names = tuple(host.names.sources)
    told = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    ready = f"Listening on {url}; {len(names)} models are loaded when they are asked for: {told or 'none yet'}."
    return f"{ready}\n{where_to_ask(url, names[0] if names else 'MODEL', keyed=keyed)}"
