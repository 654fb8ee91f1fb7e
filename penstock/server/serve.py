"""Serving: one process for HTTP, one for the engine, from the first connection to the last."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import json
import logging
import math
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import uvicorn

from penstock.config import limits
from penstock.config.data_parallel import check_one_engine
from penstock.config.environment import read_environment
from penstock.config.errors import ConfigError, ParameterError
from penstock.config.logs import log_handler
from penstock.config.names import served_name
from penstock.config.options import EngineOptions, ServerOptions
from penstock.config.resolve import validate
from penstock.config.sampling import SamplingParams
from penstock.engine.api import EngineInfo
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.engine import MakeEngine, one_engine
from penstock.server.auth import ApiKeys, check_exposure, check_origins
from penstock.server.crowd import Crowd, CrowdedProtocol, connection_limit, raise_file_limit
from penstock.server.kserve_grpc.beside import check_grpc, grpc_beside
from penstock.server.lifecycle import Lifecycle
from penstock.server.root_path import check_root_path
from penstock.server.traces import check_traces
from penstock.server.unix_socket import bind_unix, remove_unix
from penstock.server.websocket import Incoming

if TYPE_CHECKING:
    from fastapi import FastAPI

_UNIX: Final = "http+unix://"
_SWITCH_S = 0.001  # longest wait of the event loop for the interpreter's lock
_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 2**18  # glibc's number of the setting; bytes
_LAST_WORDS_S = 2.0  # for responses that were aborted to reach their clients


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: whoever runs it decides when it ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the process's signal handlers alone."""
        yield

    def connection(self) -> asyncio.Protocol:
        """What speaks with the client of a connection that was taken elsewhere; once the server has started."""
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def http_server(app: Callable[..., object]) -> HttpServer:
    """A uvicorn server with Penstock's connection limits for an app made by `create_app`."""
    config = uvicorn.Config(
        app,
        http=functools.partial(CrowdedProtocol, crowd=Crowd(connection_limit()), incoming=Incoming()),  # type: ignore[arg-type]
        ws="none",  # connections are handed on by our own protocol
        ws_max_size=limits.MAX_BODY_BYTES,
        ws_per_message_deflate=False,  # which would be undone on the event loop
        ws_ping_timeout=limits.SOCKET_SILENCE_S,
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        timeout_keep_alive=limits.KEEP_ALIVE_S,
        server_header=False,
        timeout_graceful_shutdown=int(_LAST_WORDS_S),
    )
    return HttpServer(config)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose.

    Raises:
        ConfigError: the address is unknown, taken or not allowed.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}; allowed: 0 to 65535, where 0 takes any free one.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on host {host!r}, port {port}: {error}. Name a local address.") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(limits.LISTEN_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = f"cannot listen on host {host!r}, port {port}: {reason}. Choose another port, or 0 for any free one."
        raise ConfigError(message) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The base URL of a listening socket, as a client on this machine writes it."""
    if listener.family == socket.AF_UNIX:
        return _UNIX + quote(os.path.abspath(listener.getsockname()), safe="")
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    engine_options: EngineOptions,
    server_options: ServerOptions,
    *,
    say: Callable[[str], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    make_engine: MakeEngine = one_engine,
) -> None:
    """Serves a model until SIGTERM or SIGINT; returns when everything has ended.

    The server listens at once and answers 503 while the model loads. The first signal drains: new requests get 503,
    running ones have `drain_timeout` seconds to finish. A second signal ends them at once.

    Args:
        say: told what the person who started the server should read; by default prints it.
        on_progress: told (bytes loaded, bytes in all) while weights load.
        make_engine: makes what answers.

    Raises:
        ConfigError: an option is out of range, or the address cannot be used or would be open to others without a key.
        PenstockError: the engine cannot start; the message is its own. Or it died and cannot be started again.
    """
    validate(engine_options)
    if server_options.api_server_count > 1:
        from penstock.server.serve_front import serve_front as work

        check_one_engine(engine_options, "with --api-server-count there is one engine for all HTTP processes")
    else:
        work = functools.partial(_serve, make_engine=make_engine)
    run(server_options, lambda listener: work(engine_options, server_options, listener, say or _print, on_progress))


def run(options: ServerOptions, work: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
    """Checks the options, settles the process, and does `work`, which answers on the socket it is given.

    Raises:
        ConfigError: an option is out of range, or the address cannot be used or would be open to others without a key.
    """
    _check_numbers(options)
    for flag, named in (("--pre", options.pre), ("--post", options.post)):
        if named is not None:
            from penstock.server.hooks import load_hook

            load_hook(named, flag)
    if options.otlp_traces_endpoint is not None:
        check_traces(options.otlp_traces_endpoint)
    if options.uds is None:
        check_exposure(options)
    check_root_path(options.root_path)
    try:
        SamplingParams(**dict(options.default_sampling))  # type: ignore[arg-type]
    except ParameterError as error:
        raise ConfigError(f"--{str(error).replace('_', '-', 1)}") from None
    ApiKeys((*options.api_keys, *options.admin_keys))
    raise_file_limit()
    check_origins(options.allowed_origins)
    _log_to_stderr()
    settle_process()
    if options.uds is None:
        listener = bind(options.host, options.port)
    else:
        listener = bind_unix(options.uds, private=not options.api_keys)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(work(listener))
    finally:
        if options.uds is not None:
            listener.close()
            remove_unix(options.uds)
        listener.close()


def settle_process() -> None:
    """Settings of a process that answers requests."""
    sys.setswitchinterval(_SWITCH_S)
    _give_back_memory()


def _check_numbers(options: ServerOptions) -> None:
    if not 1 <= options.api_server_count <= limits.MAX_API_SERVERS:
        allowed = f"allowed: 1 to {limits.MAX_API_SERVERS}"
        raise ConfigError(f"--api-server-count is {options.api_server_count}; {allowed}.")
    if options.uds is not None and options.api_server_count > 1:
        raise ConfigError("--uds is for one HTTP process; leave out --api-server-count, or listen on an address.")
    if options.grpc_port is not None:
        if options.api_server_count > 1 or options.uds is not None:
            told = "leave out --api-server-count and --uds"
            raise ConfigError(f"--grpc-port is for one HTTP process on an address; {told}.")
        if not 0 <= options.grpc_port <= 65535:
            raise ConfigError(f"--grpc-port is {options.grpc_port}; allowed: 0 to 65535.")
        check_grpc()
    if not 0 <= options.drain_timeout < math.inf:
        raise ConfigError(f"--drain-timeout is {options.drain_timeout:g}; allowed: a number of seconds from 0.")
    if not options.max_queue_seconds > 0:
        allowed = "a number of seconds above 0, or inf for no bound"
        raise ConfigError(f"--max-queue-seconds is {options.max_queue_seconds:g}; allowed: {allowed}.")


def _print(text: str) -> None:
    print(text, flush=True)


def _log_to_stderr() -> None:
    """Makes the server's own lines visible, unless whoever called has set up logging."""
    logger = logging.getLogger("penstock")
    if not logger.hasHandlers():
        logger.addHandler(log_handler(form=read_environment().log_format))
        logger.setLevel(logging.INFO)


def _give_back_memory() -> None:
    """Has large blocks go back to the system when they are freed: glibc would keep as much as was ever in use."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # no uvloop for this platform
        return None
    return uvloop.new_event_loop


async def _serve(
    engine_options: EngineOptions,
    options: ServerOptions,
    listener: socket.socket,
    say: Callable[[str], None],
    on_progress: Callable[[int, int], None] | None,
    make_engine: MakeEngine,
) -> None:
    name = engine_options.served_model_name or served_name(engine_options.model)
    engine_options = replace(engine_options, served_model_name=name)
    lifecycle, stop = Lifecycle(), asyncio.Event()
    on_signals(lifecycle, stop)
    client = make_engine(engine_options, options.max_queue_seconds, on_progress)
    starting, dead = asyncio.ensure_future(client.start()), asyncio.ensure_future(client.given_up())
    server: HttpServer | None = None
    serving: asyncio.Future[None] | None = None
    beside = AsyncExitStack()
    try:
        text, create_app = await asyncio.to_thread(http_side, engine_options, options)
        frontend = Frontend(client, text, served_name=name, seed=engine_options.seed)
        app = create_app(frontend, options, lifecycle)
        server = http_server(app)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        say(f"Listening on {url_of(listener)}; loading {name}.")
        await beside.enter_async_context(grpc_beside(app, options, say))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            gc.freeze()  # collecting garbage would look through all of this again and again
            say(greeting(url_of(listener), starting.result(), name, keyed=bool(options.api_keys)))
            await asyncio.wait((stopping, serving, dead), return_when=asyncio.FIRST_COMPLETED)
            if dead.done():  # a supervisor may start it again
                raise dead.result()
            await drain(lifecycle, options.drain_timeout, say)
        stopping.cancel()
        if serving.done():
            serving.result()
    finally:
        starting.cancel()
        dead.cancel()
        if server is not None and serving is not None:
            server.should_exit = True
            lifecycle.aborted.set()
            await beside.aclose()
            await asyncio.wait([serving])
        await asyncio.gather(starting, dead, return_exceptions=True)
        await client.close()


def http_side(options: EngineOptions, server: ServerOptions) -> tuple[TextPipeline, Callable[..., FastAPI]]:
    """The text side of a model as this server has it, ready for the first request, and what makes the application.

    That is imported here, since its modules take as long as an engine does to start again from what was kept.
    """
    from penstock.server.app import create_app

    text = TextPipeline.of(options)
    if server.chat_template is not None:
        text = text.templated(server.chat_template, options.tool_call_parser, options.reasoning_parser)
    if server.default_sampling:
        text = replace(text, defaults={**text.defaults, **dict(server.default_sampling)})
    text.tokenizer.prepare()
    return text, create_app


def on_signals(lifecycle: Lifecycle, stop: asyncio.Event) -> None:
    """Sets `stop` at the first SIGTERM or SIGINT, and aborts at the second."""

    def received() -> None:
        if stop.is_set():
            lifecycle.aborted.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)


async def drain(lifecycle: Lifecycle, timeout: float, say: Callable[[str], None]) -> None:
    """Lets running requests finish, and aborts what is left of them."""
    if lifecycle.in_flight:
        say(f"Stopping: {lifecycle.in_flight} requests may finish within {timeout:g} s; a second signal ends them now.")
    if not await lifecycle.drain(timeout):
        logging.getLogger("penstock.server").warning("%d requests were ended unfinished", lifecycle.in_flight)
        lifecycle.aborted.set()


def greeting(url: str, info: EngineInfo, name: str, *, keyed: bool) -> str:
    about = f"{name} ({info.architecture}, {info.dtype} on {info.device}, context {info.max_model_len} tokens)"
    return f"Ready: {about}\n{where_to_ask(url, name, keyed=keyed)}"


def where_to_ask(url: str, name: str, *, keyed: bool) -> str:
    """The server's addresses, and a line that asks a model, for people."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if keyed else ""
    base, through = url, ""
    if url.startswith(_UNIX):
        base, through = "http://localhost", f" --unix-socket {shlex.quote(unquote(url.removeprefix(_UNIX)))}"
    return (
        f"  OpenAI API  {url}/v1    Anthropic and Ollama APIs  {url}\n"
        f"  documentation  {url}/docs    metrics  {url}/metrics\n"
        f"  curl{through} {base}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )
