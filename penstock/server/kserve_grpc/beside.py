"""The gRPC service beside an HTTP server; nothing of gRPC is imported where none is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from penstock.config.errors import ConfigError
from penstock.config.options import ServerOptions


def check_grpc() -> None:
    """Raises ConfigError where the packages that speak gRPC are not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("grpc", "google.protobuf")):
        raise ConfigError("--grpc-port needs grpcio and protobuf: pip install 'penstock-llm[grpc]'.")


@asynccontextmanager
async def grpc_beside(
    app: Callable[..., Any], options: ServerOptions, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Answers gRPC by an application while it runs, where the options name a port.

    Raises:
        ConfigError: the port cannot be used.
    """
    if options.grpc_port is None:
        yield
        return
    from penstock.server.kserve_grpc.service import start, stop

    server, port = await start(app, options.host, options.grpc_port)
    say(f"KServe over gRPC on port {port}.")
    try:
        yield
    finally:
        await stop(server)
