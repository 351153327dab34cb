"""/mcp/tools and /mcp/servers"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from jaxllm.mcp.servers import ServerStatus, ToolServer
from jaxllm.mcp.settings import Transport
from jaxllm.mcp.tools import ServerTool
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.http.streaming import until_disconnect
from jaxllm.serving.state import ServerState
from jaxllm.wording import shown

router = APIRouter(route_class=JSONRoute, tags=["tool servers"])


class FunctionShown(msgspec.Struct, kw_only=True):
    name: str
    description: str | None
    parameters: dict[str, Any]


class ToolShown(msgspec.Struct, kw_only=True):
    """As a chat completion takes it in `tools`."""

    type: Literal["function"] = "function"
    function: FunctionShown


class ToolList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ToolShown]


class ToolCallRequest(RequestModel):
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the tool is called with."""


class ToolOutput(msgspec.Struct, kw_only=True):
    object: Literal["mcp.tool_result"] = "mcp.tool_result"
    name: str
    server_label: str
    output: str
    error: dict[str, Any] | None
    """null where the tool succeeded; else its type is one of OpenAI's, and the output says it in words."""


class RefusedTool(msgspec.Struct, kw_only=True):
    name: str
    reason: str


class ServerShown(msgspec.Struct, kw_only=True):
    label: str
    description: str | None
    transport: Transport
    status: ServerStatus
    error: str | None
    """What is wrong, where the status is failed."""
    tools: list[str]
    """What the model calls them."""
    refused: list[RefusedTool]
    """Tools that cannot be offered, by the server's own names."""


class ServerList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ServerShown]


@router.get("/mcp/tools", responses=returns(ToolList))
async def list_tools(request: Request) -> Response:
    """The tools of all MCP servers that are ready."""
    state: ServerState = request.app.state.server
    await state.tool_servers.ready()
    return json_response(ToolList(data=[_tool(tool) for tool in state.tool_servers.tools()]))


@router.post("/mcp/tools/{name}", responses=returns(ToolOutput))
async def call_tool(name: str, body: ToolCallRequest, request: Request) -> Response:
    """Run one of them. Its failure is told in the answer; a client that goes away ends it."""
    state: ServerState = request.app.state.server
    await state.tool_servers.ready()
    tool = state.tool_servers.find(name)
    if tool is None:
        message = f"there is no tool {shown(name)}; /v1/mcp/tools lists those that there are"
        raise APIError(404, message, param="name", code="tool_not_found")
    result = await until_disconnect(request.receive, state.tool_servers.call(tool, body.arguments))
    return json_response(
        ToolOutput(name=tool.full_name, server_label=tool.server, output=result.text, error=result.error)
    )


@router.get("/mcp/servers", responses=returns(ServerList))
async def list_servers(request: Request) -> Response:
    """The MCP servers of the configuration, and how they are."""
    state: ServerState = request.app.state.server
    return json_response(ServerList(data=[_server(server) for server in state.tool_servers.servers.values()]))


def _tool(tool: ServerTool) -> ToolShown:
    function = FunctionShown(name=tool.full_name, description=tool.description, parameters=tool.parameters)
    return ToolShown(function=function)


def _server(server: ToolServer) -> ServerShown:
    return ServerShown(
        label=server.label,
        description=server.description,
        transport=server.settings.transport,
        status=server.status,
        error=server.error,
        tools=[tool.full_name for tool in server.tools],
        refused=[RefusedTool(name=name, reason=reason) for name, reason in server.refused.items()],
    )
