"""The file that names MCP servers, in the form that desktop programs share, with a policy for their tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError, model_validator

from penstock.config import limits
from penstock.config.errors import ConfigError
from penstock.server.shapes import Body

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EVERY: Final = "*"


class Policy(str, Enum):
    """Whether a tool runs when it is called."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


class _Server(Body):
    """A server: a program to start, or an address."""

    command: Annotated[str, Field(min_length=1)] | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    timeout_ms: Annotated[int, Field(ge=1, le=limits.MAX_TOOL_S * 1000)] = limits.TOOL_S * 1000
    policy: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way(self) -> _Server:
        if (self.command is None) == (self.url is None):
            raise ValueError("exactly one of command and url is needed")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r}; allowed: an address that begins with http:// or https://")
        allowed = [policy.value for policy in Policy]
        if wrong := [value for value in self.policy.values() if value not in allowed]:
            raise ValueError(f"policy {wrong[0]!r}; allowed: {', '.join(allowed)}")
        return self


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server.

    Attributes:
        name: of it, which its tools' names begin with.
        command, arguments, environment, folder: of a program that speaks on its standard input and output.
        url, headers: of one that is spoken with over HTTP ("streamable").
        seconds: that a call may take.
        policies: by tool's name; "*" for the others, which is to ask unless it is said.
    """

    name: str
    command: str | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = float(limits.TOOL_S)
    policies: Mapping[str, Policy] = field(default_factory=dict)

    def policy(self, tool: str) -> Policy:
        return self.policies.get(tool) or self.policies.get(_EVERY) or Policy.ASK


def read_servers(path: Path) -> tuple[McpServer, ...]:
    """The servers of a file.

    Raises:
        ConfigError: it cannot be read, or is not what is described here.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--mcp-servers {path} cannot be read: {error}.") from None
    servers = given.get("mcpServers") if isinstance(given, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f'--mcp-servers {path} needs an object "mcpServers" of servers by their names.')
    return tuple(_server(path, name, about) for name, about in servers.items())


def _server(path: Path, name: str, about: object) -> McpServer:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--mcp-servers {path}: the name {name!r}; allowed: up to 64 letters, digits, _ and -.")
    try:
        read = _Server.model_validate(about)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("mcpServers", name, *first["loc"])))
        raise ConfigError(f"--mcp-servers {path}: {where}: {first['msg']}.") from None
    return McpServer(
        name=name,
        command=read.command,
        arguments=tuple(read.args),
        environment=read.env,
        folder=read.cwd,
        url=read.url,
        headers=read.headers,
        seconds=read.timeout_ms / 1000,
        policies={tool: Policy(value) for tool, value in read.policy.items()},
    )
