"""Serving many models: each is loaded when it is first asked for, and unloaded for others."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from typing import Any

from penstock.config.cores import CoreBoard
from penstock.config.machine import read_machine
from penstock.config.options import HostOptions, ServerOptions
from penstock.host.engine import ProcessEngines
from penstock.host.front import Front
from penstock.host.front_host import FrontEngines, FrontHost
from penstock.host.host import Host
from penstock.host.source import Sources
from penstock.server.kserve_grpc.beside import grpc_beside
from penstock.server.lifecycle import Lifecycle
from penstock.server.serve import HttpServer, drain, greeting, http_server, on_signals, run, url_of, where_to_ask
from penstock.server.serve_front import open_once

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
    sources()  # whoever started the server is to see what is wrong with it
    work = _serve if options.api_server_count == 1 else _serve_front
    hosted = replace(hosted, memory=memory)
    with closing(CoreBoard()) as cores:
        run(options, lambda listener: work(sources, hosted, cores, options, listener, say))


async def _serve(
    sources: Sources,
    hosted: HostOptions,
    cores: CoreBoard,
    options: ServerOptions,
    listener: socket.socket,
    say: Callable[[str], None],
) -> None:
    lifecycle, stop = Lifecycle(), asyncio.Event()
    on_signals(lifecycle, stop)
    host = Host(
        sources, ProcessEngines(options.max_queue_seconds, cores), hosted.memory or 0, keep_alive=hosted.keep_alive
    )
    tasks: list[asyncio.Future[Any]] = []
    server: HttpServer | None = None
    serving: asyncio.Future[None] | None = None
    beside = AsyncExitStack()
    try:
        from penstock.server.app import create_app

        app = create_app(host, options, lifecycle)
        server = http_server(app)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await beside.enter_async_context(grpc_beside(app, options, say))
        gc.freeze()  # collecting garbage would look through all of this again and again
        tasks += (asyncio.ensure_future(stop.wait()), serving)
        await _until_first(tasks, _begin(host, hosted, options, url_of(listener), say))
        if stop.is_set():
            await drain(lifecycle, options.drain_timeout, say)
        if serving.done():
            serving.result()
    finally:
        for task in tasks:
            if task is not serving:
                task.cancel()
        if server is not None and serving is not None:
            server.should_exit = True
            lifecycle.aborted.set()
            await beside.aclose()
            await asyncio.wait([serving])
        await host.close()


async def _serve_front(
    sources: Sources,
    hosted: HostOptions,
    cores: CoreBoard,
    options: ServerOptions,
    listener: socket.socket,
    say: Callable[[str], None],
) -> None:
    """The same with several HTTP processes: this one speaks no HTTP, and keeps the models and them."""
    lifecycle, stop = Lifecycle(), asyncio.Event()
    on_signals(lifecycle, stop)
    front = Front(None, options, listener)
    host = Host(sources, FrontEngines(front, cores), hosted.memory or 0, keep_alive=hosted.keep_alive)
    front.hosted = models = FrontHost(host, front.processes)
    tasks: list[asyncio.Future[Any]] = []
    try:
        await open_once(front.options.responses_store)
        front.start(models.stats)
        tasks += (asyncio.ensure_future(work) for work in (stop.wait(), front.failed(), models.watch()))
        await _until_first(tasks, _begin(host, hosted, options, url_of(listener), say))
        for task in tasks:
            if task.done():
                task.result()
        await front.drain(options.drain_timeout, lifecycle.aborted)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await front.close()
        await models.close()
        await host.close()


async def _until_first(tasks: Sequence[asyncio.Future[Any]], beginning: Coroutine[Any, Any, None]) -> None:
    """Returns when one of these has ended; raises what the beginning, which goes on beside them, fails with."""
    begun = asyncio.ensure_future(beginning)
    try:
        await asyncio.wait((*tasks, begun), return_when=asyncio.FIRST_COMPLETED)
        if begun.done():
            begun.result()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)


async def _begin(host: Host, hosted: HostOptions, options: ServerOptions, url: str, say: Callable[[str], None]) -> None:
    """Says what there is, and loads what is to be there from the start.

    Raises:
        ModelUnavailableError: the model that the server starts with cannot be loaded.
    """
    keyed = bool(options.api_keys)
    host.load_pinned()
    if hosted.first is None:
        say(_greeting(url, host, keyed=keyed))
        return
    say(f"Listening on {url}; loading {hosted.first}.")
    entry = await host.load(await host.find(hosted.first))
    if entry.info is not None:
        say(greeting(url, entry.info, entry.name, keyed=keyed))


def _greeting(url: str, host: Host, *, keyed: bool) -> str:
    names = tuple(host.names.sources)
    told = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    count = "1 model is loaded when it is" if len(names) == 1 else f"{len(names)} models are loaded when they are"
    ready = f"Listening on {url}; {count} asked for: {told or 'none yet'}."
    return f"{ready}\n{where_to_ask(url, names[0] if names else 'MODEL', keyed=keyed)}"
