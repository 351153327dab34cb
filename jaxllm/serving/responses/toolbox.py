"""The tools of one response: found at servers, offered to the model, approved and called."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import NoReturn

from jaxllm.chat.conversation import MAX_TOOLS, NamedTool, Tool, ToolChoice, parse_arguments
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.mcp.servers import ToolServer
from jaxllm.mcp.tools import ServerTool, ToolResult, refused
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.mcp import offered
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.objects import OutputMcpCall
from jaxllm.serving.responses.request import PromptFields
from jaxllm.serving.responses.tools import AllowedFunctions, ChosenFunction, ChosenServer, McpTool
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState
from jaxllm.wording import shown

READY_SECONDS = 30.0
"""The time that a response waits for a server that is not ready."""

MAX_BROUGHT = 16
"""Servers of a request's own."""


@dataclass(frozen=True)
class OfferedTool:
    """A server's tool, on the terms of one request; the model is told of it as `told`."""

    tool: ServerTool
    told: Tool
    needs_approval: bool


@dataclass(frozen=True)
class Listing:
    """A server's tools for one request, or the reason why there are none."""

    label: str
    tools: list[ServerTool]
    error: str | None


class Toolbox:
    """The allowed tools of the servers in a request's tools; `open` connects to its own servers, `aclose` leaves them.

    Raises InvalidRequestError where no configured server has the label, or the request may not bring its own.
    """

    def __init__(self, state: ServerState, model: ServedModel, body: PromptFields):
        self.listings: list[Listing] = []
        self.by_name: dict[str, OfferedTool] = {}
        """By the names that the model calls them by."""
        self._state = state
        self._model = model
        self._wanted = {at: tool for at, tool in enumerate(body.tools) if isinstance(tool, McpTool)}
        self._taken = body.function_names
        self._servers: dict[str, ToolServer] = {}
        self._stack = AsyncExitStack()
        num_brought = 0
        for at, asked in self._wanted.items():
            if asked.server_url is None:
                label, servers = asked.server_label, state.tool_servers.servers
                if label not in servers:
                    known = f"this server has {', '.join(servers)}" if servers else "this server has none"
                    raise InvalidRequestError([Field("tools", at, "server_label"), f" is {label!r}; {known}"])
                self._servers[label] = servers[label]
                continue
            num_brought += 1
            field = Field("tools", at, "server_url")
            if not state.config.allow_mcp_urls:
                raise InvalidRequestError([field, " is not accepted by this server (allow_mcp_urls is not set)"])
            if num_brought > MAX_BROUGHT:
                raise InvalidRequestError([field, f" is one more than the {MAX_BROUGHT} that a request may bring"])

    async def open(self) -> None:
        """Wait for the servers. Raises InvalidRequestError where the model could not tell two tools apart."""
        for asked in self._wanted.values():
            if asked.server_url is not None:
                server = await self._state.tool_servers.connect(asked.settings())
                self._stack.push_async_callback(server.close)
                self._servers[asked.server_label] = server
        await asyncio.gather(*(server.ready(READY_SECONDS) for server in self._servers.values()))
        for at, asked in self._wanted.items():
            server = self._servers[asked.server_label]
            ready = server.status == "ready"
            tools = [tool for tool in server.tools if asked.allows(tool)] if ready else []
            error = None if ready else server.error or f"the server {asked.server_label!r} is {server.status}"
            self.listings.append(Listing(asked.server_label, tools, error))
            for tool, told in zip(tools, await self._state.offload(offered, self._model, tools), strict=True):
                described = "\n".join(filter(None, (asked.server_description, told.description)))
                told = replace(told, description=described, parameters_field=Field("tools", at))
                self._add(OfferedTool(tool, told, asked.asks_approval(tool)), at)

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def call(self, call: OutputMcpCall) -> ToolResult:
        """Run a tool. What fails is told in the result, a tool that is not there and wrong arguments too."""
        try:
            arguments = parse_arguments(call.arguments, Field("arguments"))
        except InvalidRequestError as error:
            return refused(str(error))
        label, name = call.server_label, call.name
        known = [one.tool.name for one in self.by_name.values() if one.tool.server == label]
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none now"
            return refused(f"server {label!r} has no tool {name!r} here; {has}")
        return await self._servers[label].call(name, arguments)

    def _add(self, one: OfferedTool, at: int) -> None:
        name = one.tool.full_name
        other = next((place for place, taken in self._taken.items() if taken == name), None)
        if other is None and name in self.by_name:
            other = f"server {self.by_name[name].tool.server!r}"
        if other is not None:
            problem = f" ({one.tool.server!r}) has a tool that the model would call {name!r}, as one of {other}"
            raise InvalidRequestError([Field("tools", at), problem])
        self.by_name[name] = one


def approved_calls(context: Sequence[Item], own: Sequence[Item], labels: Collection[str]) -> list[Item]:
    """The approval requests in `context` that `own`, its end, approves, and that have not been run since.

    Raises InvalidRequestError where an answer has no request, is the second one, or is of a server not in `labels`.
    """
    requests: dict[str, Item] = {}
    answered: set[str] = set()
    places = {id(item): at for at, item in enumerate(own)}
    approved: dict[str, Item] = {}
    for item in context:
        match item["type"]:
            case "mcp_approval_request":
                requests[item["id"]] = item
            case "mcp_call":
                approved.pop(item["approval_request_id"], None)
            case "mcp_approval_response" if (at := places.get(id(item))) is not None:
                asked = item["approval_request_id"]
                _check(item, at, requests, answered, labels)
                if item["approve"]:
                    approved[asked] = requests[asked]
                answered.add(asked)
            case "mcp_approval_response":
                answered.add(item["approval_request_id"])
    return list(approved.values())


def _check(
    answer: Item, at: int, requests: dict[str, Item], answered: Collection[str], labels: Collection[str]
) -> None:
    field, asked = Field("input", at, "approval_request_id"), answer["approval_request_id"]
    if asked not in requests:
        waiting = [name for name in requests if name not in answered]
        known = f"those that wait are {', '.join(waiting)}" if waiting else "nothing waits for approval there"
        raise InvalidRequestError([field, f" is {shown(asked)}, which no mcp_approval_request before it has; {known}"])
    if asked in answered:
        raise InvalidRequestError([field, f" is {shown(asked)}, which has been answered already"])
    label = requests[asked]["server_label"]
    if answer["approve"] and label not in labels:
        raise InvalidRequestError([field, f" is of a call of server {shown(label)}, which is not in tools"])


@dataclass(frozen=True)
class Offer:
    """The `tools` and `tool_choice` of a conversation."""

    tools: list[Tool]
    choice: ToolChoice


def check_choice(body: PromptFields) -> None:
    """Raises InvalidRequestError where tool_choice asks for what is not in tools."""
    choice = body.tool_choice
    if choice == "required" and not body.tools:
        raise InvalidRequestError("tool_choice is 'required', but tools is empty", "tool_choice")
    chosen: dict[str, ChosenFunction | ChosenServer] = {}
    if isinstance(choice, ChosenFunction | ChosenServer):
        chosen = {"tool_choice": choice}
    elif isinstance(choice, AllowedFunctions):
        named = (ChosenFunction, ChosenServer)
        chosen = {f"tool_choice.tools[{at}]": one for at, one in enumerate(choice.tools) if isinstance(one, named)}
    for place, tool in chosen.items():
        if isinstance(tool, ChosenFunction):
            field, name, known = f"{place}.name", tool.name, body.function_names.values()
        else:
            field, name, known = f"{place}.server_label", tool.server_label, body.server_labels.values()
        if name not in known:
            has = f"tools has {', '.join(known)}" if known else "tools has none"
            raise InvalidRequestError(f"{field} is {shown(name)}; {has}", field)


def make_offer(body: PromptFields, toolbox: Toolbox, *, forces: bool, runs: bool) -> Offer:
    """The tools that one turn offers, and whether one must be called.

    Without `forces`, once servers' tools have run, the model decides; else it would call for ever. Without `runs` only
    functions are offered. Raises InvalidRequestError or APIError for too many tools, or none where one must be called.
    """
    choice = body.tool_choice
    if choice == "none":
        return Offer([], "auto")
    functions = [tool.told() for tool in body.client_tools]
    served = list(toolbox.by_name.values()) if runs else []
    if isinstance(choice, AllowedFunctions):
        names = {chosen.name for chosen in choice.tools if isinstance(chosen, ChosenFunction)}
        functions = [tool for tool in functions if tool.name in names]
        served = [one for one in served if any(_has(chosen, one.tool) for chosen in choice.tools)]
    elif isinstance(choice, ChosenServer) and forces:
        functions, served = [], [one for one in served if _has(choice, one.tool)]
    tools = [*functions, *(one.told for one in served)]
    if len(tools) > MAX_TOOLS:
        problem = (
            f" are {len(tools)}, those of servers among them; at most {MAX_TOOLS} can be offered: use allowed_tools"
        )
        raise InvalidRequestError([Field("tools"), problem])
    asked = _asked(body.tool_choice) if forces else "auto"
    if asked != "auto" and not tools:
        _refuse_choice(toolbox, runs)
    if isinstance(choice, ChosenServer) and isinstance(asked, NamedTool):
        asked = NamedTool(tools[0].name)
    return Offer(tools, asked)


def _refuse_choice(toolbox: Toolbox, runs: bool) -> NoReturn:
    message = "tool_choice asks for a call, but there is no such tool"
    for listing in toolbox.listings:
        if listing.error is not None:
            message += f": {listing.label}: {listing.error}"
            raise APIError(424, message, param="tool_choice", code="tool_server_failed")
    raise InvalidRequestError(message if runs else f"{message} to call where max_tool_calls is 0", "tool_choice")


def _asked(choice: object) -> ToolChoice:
    match choice:
        case ChosenFunction(name=name) | ChosenServer(name=str(name)):
            return NamedTool(name)
        case ChosenServer():
            return "required"
        case AllowedFunctions(mode=mode):
            return mode
        case "required":
            return "required"
        case _:
            return "auto"


def _has(chosen: object, tool: ServerTool) -> bool:
    return isinstance(chosen, ChosenServer) and chosen.server_label == tool.server and chosen.name in (None, tool.name)
