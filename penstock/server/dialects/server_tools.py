"""llama-server's routes of tools that run on the server's machine."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config.errors import format_value
from penstock.server.auth import AdminKeys
from penstock.server.body import read_body
from penstock.server.connected import while_connected
from penstock.server.document import gives, takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError
from penstock.server.lifecycle import Lifecycle
from penstock.server.shapes import Body
from penstock.server.tools.connected import ServerTool, ServerTools
from penstock.server.tools.servers_file import Policy


class ToolBody(Body):
    """POST /tools: a tool to be run. `confirmed`: a person has agreed, where the policy is to ask."""

    tool: Annotated[str, Field(min_length=1, max_length=256)]
    params: dict[str, Any] = Field(default_factory=dict)
    confirmed: bool = False


def server_tools_router(tools: ServerTools | None, admins: AdminKeys, lifecycle: Lifecycle) -> APIRouter:
    """The routes; None for a server that was started without tools, which is refused by name."""
    router = APIRouter()

    def there(request: Request) -> ServerTools:
        if tools is None:
            message = "This server has no tools; start it with --mcp-servers FILE to have those of MCP servers."
            raise HttpError(501, message, code="no_tools")
        admins.check_admin(request.headers)
        return tools

    @router.get("/tools", summary="Tools that the server runs", openapi_extra=gives("application/json"))
    async def listed(request: Request) -> Response:
        found = await while_connected(there(request).all(), request.receive, lifecycle)
        return json_response([_told(tool) for tool in found])

    @router.post("/tools", summary="Run a tool", openapi_extra=takes(ToolBody))
    async def run(request: Request) -> Response:
        known = there(request)
        body = await read_body(request, ToolBody)
        said = await while_connected(_run(known, body), request.receive, lifecycle)
        return json_response({"plain_text_response": said})

    return router


async def _run(tools: ServerTools, body: ToolBody) -> str:
    found = await tools.find(body.tool)
    if found is None:
        message = f"There is no tool {format_value(body.tool)} here, or it is denied; GET /tools lists those there are."
        raise HttpError(404, message, param="tool", code="tool_not_found")
    connection, tool = found
    if tool.policy is Policy.ASK and not body.confirmed:
        message = f"{tool.name} runs when a person has agreed: ask, then send it with confirmed: true."
        raise HttpError(403, message, param="confirmed", code="confirmation_required")
    return await connection.call(tool.tool, body.params)


def _told(tool: ServerTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {
        "display_name": tool.title,
        "tool": tool.name,
        "type": "mcp",
        "permissions": {"write": tool.writes},
        "policy": tool.policy.value,
        "definition": {"type": "function", "function": function},
    }
