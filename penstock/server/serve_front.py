"""Serving a model with several HTTP processes: a small process holds the socket and watches the engine and them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from penstock.config.engine_stats import EngineStats
from penstock.config.names import served_name
from penstock.config.options import EngineOptions, ServerOptions
from penstock.host.front import Front
from penstock.host.process_client import ProcessClient
from penstock.server.lifecycle import Lifecycle
from penstock.server.serve import greeting, on_signals, url_of

Result = TypeVar("Result")


async def open_once(responses_store: str) -> None:
    """Makes the file in which all processes keep responses, and ends what an earlier server left running in it."""
    from penstock.server.store import ResponseStore

    await (await asyncio.to_thread(ResponseStore, responses_store)).aclose()


async def serve_front(
    engine_options: EngineOptions,
    options: ServerOptions,
    listener: socket.socket,
    say: Callable[[str], None],
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Serves until a signal; as `penstock.server.serve.serve`."""
    name = engine_options.served_model_name or served_name(engine_options.model)
    engine_options = replace(engine_options, served_model_name=name)
    lifecycle, stop = Lifecycle(), asyncio.Event()
    on_signals(lifecycle, stop)
    front = Front(engine_options, options, listener)
    engine = front.engine()
    engine.client = client = ProcessClient(engine_options, on_progress=on_progress, watcher=engine)
    tasks: list[asyncio.Future[Any]] = []

    def begin(work: Coroutine[Any, Any, Result]) -> asyncio.Future[Result]:
        tasks.append(task := asyncio.ensure_future(work))
        return task

    try:
        await open_once(front.options.responses_store)
        starting, dead = begin(client.start()), begin(client.given_up())
        stopping = begin(stop.wait())

        async def stats() -> Mapping[str, EngineStats]:
            return {name: await client.stats()}

        front.start(stats)
        failed = begin(front.failed())
        say(f"Listening on {url_of(listener)}; loading {name}.")
        await asyncio.wait((starting, stopping, failed), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            say(greeting(url_of(listener), starting.result(), name, keyed=bool(options.api_keys)))
            await asyncio.wait((stopping, failed, dead), return_when=asyncio.FIRST_COMPLETED)
            if dead.done():  # a supervisor may start it again
                await front.drain(0, lifecycle.aborted)  # clients are told
                raise dead.result()
        if failed.done():
            failed.result()
        await front.drain(options.drain_timeout, lifecycle.aborted)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await front.close()
        await client.close()
