"""Connections to MCP servers: made when a tool is first asked for, kept, and made anew when they have broken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from penstock import __version__
from penstock.config import limits
from penstock.config.errors import ConfigError
from penstock.server.errors import HttpError
from penstock.server.tools.servers_file import McpServer, Policy

if TYPE_CHECKING:
    from mcp import ClientSession

_BETWEEN: Final = "__"
_log = logging.getLogger("penstock.server")


def check_mcp() -> None:
    """Raises ConfigError where the package that speaks with MCP servers is not installed."""
    if find_spec("mcp") is None:
        raise ConfigError("--mcp-servers needs the package mcp; install it: pip install 'penstock-llm[mcp]'.")


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of an MCP server, under the name that models know it by."""

    name: str
    tool: str
    title: str
    description: str
    schema: dict[str, Any]
    writes: bool
    policy: Policy


@dataclass(slots=True)
class _Work:
    """What a connection's task is asked to do in it, which no other task may."""

    do: Callable[[ClientSession], Awaitable[Any]]
    answer: asyncio.Future[Any]


class Connection:
    """One MCP server. Its session lives in a task of its own."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._work: asyncio.Queue[_Work] = asyncio.Queue(limits.MAX_TOOL_CALLS_WAITING)
        self._task: asyncio.Task[None] | None = None
        self._tools: tuple[ServerTool, ...] | None = None
        self._broken = False

    async def tools(self) -> tuple[ServerTool, ...]:
        """Its tools but those that are denied; raises HttpError 502 or 504 where they cannot be had."""
        if self._tools is None:
            listed = await self._done(lambda session: session.list_tools())
            found = (self._tool(tool) for tool in listed.tools[: limits.MAX_TOOLS])
            self._tools = tuple(tool for tool in found if tool.policy is not Policy.DENY)
        return self._tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """What a tool says, as text, cut where it is too long.

        Raises:
            HttpError: 502 or 504, it cannot be called, or takes too long.
        """
        result = await self._done(lambda session: session.call_tool(tool, arguments))
        texts = [text for part in result.content if (text := getattr(part, "text", None)) is not None]
        other = len(result.content) - len(texts)
        said = "\n".join([*texts, *([f"[{other} parts that are no text]"] if other else [])])
        if len(said) > limits.MAX_TOOL_CHARS:
            said = said[: limits.MAX_TOOL_CHARS] + f"\n[cut after {limits.MAX_TOOL_CHARS} characters]"
        return f"error: {said}" if result.is_error else said

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _done(self, do: Callable[[ClientSession], Awaitable[Any]]) -> Any:
        if self._broken:  # what is still under way on it will not come either
            self._broken = False
            await self.aclose()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._work.put_nowait(_Work(do, answer))
        except asyncio.QueueFull:
            message = f"Too many calls wait for the MCP server {self.server.name}; retry shortly."
            raise HttpError(429, message, code="tool_server_busy", headers={"Retry-After": "1"}) from None
        try:
            async with asyncio.timeout(self.server.seconds):
                return await answer
        except TimeoutError:
            self._broken = True
            message = f"The MCP server {self.server.name} did not answer within {self.server.seconds:g} s."
            raise HttpError(504, message, code="tool_timeout") from None

    async def _run(self) -> None:
        """Serves what is asked, several at once; a connection that breaks fails all that wait for it."""
        calls: set[asyncio.Task[None]] = set()
        try:
            async with self._session() as session:
                while True:
                    work = await self._work.get()
                    call = asyncio.create_task(self._answer(session, work))
                    calls.add(call)
                    call.add_done_callback(calls.discard)
        except Exception:
            _log.warning("the MCP server %s cannot be spoken with", self.server.name, exc_info=True)
        finally:
            self._tools = None
            for call in calls:
                call.cancel()
            self._fail_all()

    async def _answer(self, session: ClientSession, work: _Work) -> None:
        """Does what is asked; a connection on which that failed is made anew before it is used again."""
        failure: HttpError | None = None
        try:
            result = await work.do(session)
            if not work.answer.done():
                work.answer.set_result(result)
        except asyncio.CancelledError:
            failure = HttpError(502, "The MCP server's connection broke.", code="tool_server_failed")
        except Exception as error:  # of the protocol, or the server's own
            self._broken = True
            failure = HttpError(502, f"The MCP server {self.server.name} refused: {error}", code="tool_failed")
        if failure is not None and not work.answer.done():
            work.answer.set_exception(failure)

    def _fail_all(self) -> None:
        while not self._work.empty():
            work = self._work.get_nowait()
            if not work.answer.done():
                message = f"The MCP server {self.server.name} cannot be spoken with; the server's log says why."
                work.answer.set_exception(HttpError(502, message, code="tool_server_failed"))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[ClientSession]:
        from mcp import ClientSession
        from mcp.types import Implementation

        about = Implementation(name="penstock", version=__version__)
        async with self._streams() as (read, write), ClientSession(read, write, client_info=about) as session:
            await session.initialize()
            yield session

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self.server
        if server.command is not None:
            environment = dict(server.environment) or None  # beside the few variables that every program gets
            program = StdioServerParameters(
                command=server.command, args=list(server.arguments), env=environment, cwd=server.folder
            )
            async with stdio_client(program) as streams:
                yield streams
        else:
            async with (
                httpx2.AsyncClient(headers=dict(server.headers), timeout=server.seconds) as client,
                streamable_http_client(server.url or "", http_client=client) as streams,
            ):
                yield streams[:2]

    def _tool(self, tool: Any) -> ServerTool:
        hints = tool.annotations
        return ServerTool(
            name=f"{self.server.name}{_BETWEEN}{tool.name}",
            tool=tool.name,
            title=tool.title or tool.name,
            description=tool.description or "",
            schema=dict(tool.input_schema),
            writes=not (hints is not None and hints.read_only_hint),
            policy=self.server.policy(tool.name),
        )


class ServerTools:
    """All tools of all servers."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._connections = [Connection(server) for server in servers]

    async def all(self) -> list[ServerTool]:
        """Those that can be had now: a server that fails is told in the log and left out."""
        found = await asyncio.gather(*(each.tools() for each in self._connections), return_exceptions=True)
        return [tool for tools in found if not isinstance(tools, BaseException) for tool in tools]

    async def find(self, name: str) -> tuple[Connection, ServerTool] | None:
        """A tool that is not denied, by the name that models know it by, and its server."""
        for connection in self._connections:
            if name.startswith(connection.server.name + _BETWEEN):
                for tool in await connection.tools():
                    if tool.name == name:
                        return connection, tool
        return None

    async def aclose(self) -> None:
        await asyncio.gather(*(connection.aclose() for connection in self._connections))
