"""An MCP server for tests: `python mcp_server.py` speaks on its standard input, with a port over HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("test")


@server.tool(description="Both together.")
def add(a: int, b: int) -> str:
    return str(a + b)


@server.tool()
def secret(name: str) -> str:
    return os.environ.get(name, "not there")


@server.tool()
def much() -> str:
    return "x" * 1_000_000


@server.tool()
def slow() -> str:
    time.sleep(60)
    return "late"


@server.tool()
def fail() -> str:
    raise ValueError("no such thing")


@server.tool()
def die() -> str:
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
