"""MCP servers' tools for the model to call, in requests that bring none of their own."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.mcp.results import defused
from jaxllm.mcp.tools import ServerTool
from jaxllm.serving.conversation import MAX_TOOLS, Tool
from jaxllm.serving.http.api_error import unavailable
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.shown import shown
from jaxllm.serving.state import ServerState


async def injected_tools(state: ServerState, model: ServedModel) -> list[Tool]:
    """What is offered to a request that says nothing of tools; nothing where config.mcp_inject is off.

    Raises InvalidRequestError where there are more than a request may have.
    """
    if not state.config.mcp_inject or model.config.tool_call_parser == "none":
        return []
    await state.tool_servers.ready()
    return await state.offload(offered, model, state.tool_servers.tools())


async def asked_tools(
    state: ServerState, model: ServedModel, allowed: Collection[str] | None, place: Field
) -> list[Tool]:
    """What is offered to a request that asks for the servers' tools: all, or those that are `allowed` by name.

    Raises InvalidRequestError of `place` where there are none, or not all of these; 503 while no server is ready.
    """
    await state.tool_servers.ready()
    servers, tools = state.tool_servers.servers, state.tool_servers.tools()
    if not servers:
        raise InvalidRequestError([place, " is set, but this server has no tool servers (mcp_config)"])
    if not tools:
        raise unavailable("no tool server is ready; /v1/mcp/servers says more", code="tool_servers_unavailable")
    names = [tool.full_name for tool in tools]
    unknown = next((name for name in allowed or () if name not in names), None)
    if unknown is not None:
        where = Field(*place.path, "allowed_tools")
        raise InvalidRequestError([where, f" has {shown(unknown)}; the tools are {', '.join(names)}"])
    chosen = [tool for tool in tools if allowed is None or tool.full_name in allowed]
    return await state.offload(offered, model, chosen)


def offered(model: ServedModel, tools: Sequence[ServerTool]) -> list[Tool]:
    """As a conversation has them; what a server says of them holds no special token of the model's."""
    if len(tools) > MAX_TOOLS:
        limit = f"the tool servers have {len(tools)} tools, and a request may have {MAX_TOOLS}"
        raise InvalidRequestError([Field("tools"), f" must be given: {limit}"])
    special = list(model.special_tokens)
    return [
        Tool(
            name=tool.full_name,
            description=defused(tool.description or "", special),
            parameters=json.loads(defused(json.dumps(tool.parameters, ensure_ascii=False), special)),
        )
        for tool in tools
    ]
