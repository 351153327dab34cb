"""Tools of MCP servers: their routes, and chats that are offered them or have the server run them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pydantic
from fastapi import APIRouter, Request, Response

from jaxllm.chat.conversation import MAX_TOOLS, Call, Conversation, Message, Tool, known_arguments, parse_arguments
from jaxllm.chat.events import Content, Event, ParsedOutput, Reasoning, join_events
from jaxllm.chat.pictures import Part, Picture, Sent
from jaxllm.chat.prompt import with_seen
from jaxllm.config import ModelConfig
from jaxllm.errors import ContextLengthError, Field, InvalidRequestError
from jaxllm.mcp.servers import ServerStatus
from jaxllm.mcp.settings import Transport
from jaxllm.mcp.tools import ServerTool, ToolResult, as_data, cut, defused
from jaxllm.requests.outputs import ParsedCall
from jaxllm.serving.call import ClientCall
from jaxllm.serving.generation import GenerationSettings, Reply, ReplyLoop, begin_reply
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.http.route import JSONRoute, until_disconnect
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState
from jaxllm.wording import shown

SHORTEST_RESULT = 200
"""Characters: a context that does not hold that much of each result is full."""


@dataclass
class ToolRun:
    """A call, while it runs and when it has ended; `index` counts all of one request's."""

    index: int
    call: ParsedCall
    server: str
    """Its label; empty where no server has such a tool."""
    result: ToolResult | None = None

    @property
    def status(self) -> Literal["in_progress", "completed", "failed"]:
        if self.result is None:
            return "in_progress"
        return "completed" if self.result.error is None else "failed"


@dataclass
class Ended:
    finish_reason: str
    stop_reason: int | str | None = None


Happening = Content | Reasoning | ToolRun | Ended
Happenings = list[tuple[int, Happening]]
"""All of choice 0."""


class Execution(ReplyLoop[Happenings, ToolRun]):
    """An async context, as a Generation is; to the client the id of the `first` reply is that of all replies."""

    silence: Happenings = []  # noqa: RUF012

    def __init__(
        self,
        call: ClientCall,
        reply: Reply,
        conversation: Conversation,
        settings: GenerationSettings,
        *,
        max_turns: int,
        max_calls: int,
    ):
        super().__init__(call.model, max_calls)
        self.id = reply.generation.id
        self.first = reply
        self._call = call
        self._conversation = conversation
        self._settings = settings
        self._max_turns = max_turns
        self._offered = {tool.name for tool in conversation.tools}
        self._num_turns = 1
        self._answer = ParsedOutput(None, None, [])  # the last one that was read, with what it calls
        self._runs: list[ToolRun] = []
        self._num_runs = 0
        self._end = Ended("abort")

    async def __aenter__(self) -> Execution:
        await self.enter(self.first)
        self.model.running.discard(self.first.generation)
        self.model.running.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.model.running.discard(self)
        await self.end_calls()
        await self.leave()

    async def arrivals(self, timeout: float | None = None) -> AsyncIterator[Happenings]:
        """The happenings, in order; an empty list after `timeout` seconds of silence."""
        async with aclosing(self.turns(timeout)) as turns:
            async for happenings in turns:
                yield happenings
        yield [(0, self._end)]

    async def begin_answer(self) -> bool:
        if self.reply is not None:
            return True
        if not self._runs:
            return False
        if self.ended_by is not None:
            raise self.ended_by
        most = self._settings.max_tokens
        left = None if most is None else max(most - self.usage().completion_tokens, 0)
        if left == 0:
            self._end = Ended("length")
            return False
        await self._next_answer(left)
        return True

    async def read_answer(self, timeout: float | None) -> AsyncIterator[Happenings]:
        if self._answer.content:
            yield [(0, Content("\n\n"))]
        reply = self.reply
        assert reply is not None
        events: list[Event] = []
        self._end = Ended("abort")
        async for gains in reply.generation.arrivals(timeout):
            pieces = [reply.parse(index, delta) for index, delta in gains]
            new = [event for piece in pieces for event in piece.events]
            events += new
            for piece in pieces:
                if piece.finish_reason is not None:
                    self._end = Ended(piece.finish_reason, piece.stop_reason)
            said = [event for event in new if isinstance(event, Content | Reasoning)]
            if said or not gains:
                yield [(0, event) for event in said]
        await self.leave()
        self._answer = join_events(events)
        calls = self._answer.tool_calls if self._end.finish_reason == "tool_calls" else []
        self._runs = [self._run(call) for call in calls]
        if calls:
            yield [(0, run) for run in self._runs]

    def calls(self) -> Iterable[ToolRun]:
        return self._runs

    async def call(self, asked: ToolRun) -> ToolResult:
        tool = self._find(asked.call.name)
        if tool is None:
            return _not_run(f"there is no tool {shown(asked.call.name)}")
        try:
            arguments = parse_arguments(asked.call.arguments, Field("arguments"))
        except InvalidRequestError as error:
            return _not_run(str(error))
        result = await self._call.state.tool_servers.call(tool, arguments)
        return await self._call.state.offload(with_seen, self.model, result) if result.images else result

    def ended(self, asked: ToolRun, result: ToolResult) -> Happenings:
        asked.result = result
        return [(0, asked)]

    def no_call_left(self) -> ToolResult:
        return _not_run(f"no more than {self.most_calls} tools may be called for one answer; answer without it")

    def _run(self, call: ParsedCall) -> ToolRun:
        tool = self._find(call.name)
        self._num_runs += 1
        return ToolRun(self._num_runs - 1, call, "" if tool is None else tool.server)

    def _find(self, name: str) -> ServerTool | None:
        return self._call.state.tool_servers.find(name) if name in self._offered else None

    async def _next_answer(self, left: int | None) -> None:
        """Begin the answer to the results. Raises ContextLengthError where the context holds no part of them."""
        self._num_turns += 1
        asked = self._settings.request_id
        request_id = None if asked is None else f"{asked}-{self._num_turns}"
        room = min(left or 1, self.model.engine.info.max_model_len // 2)
        settings = dataclasses.replace(self._settings, max_tokens=left, room=room, request_id=request_id)
        longest = max(len(run.result.text) for run in self._runs if run.result is not None)
        while True:
            conversation = self._with_results(longest)
            try:
                reply = await begin_reply(self._call, conversation, settings, prefix="chatcmpl-", goes_on=True)
                break
            except ContextLengthError:
                longest //= 2
                if longest < SHORTEST_RESULT:
                    raise
        self._conversation = conversation
        await self.enter(reply)

    def _with_results(self, longest: int) -> Conversation:
        calls = [Call(run.call.id, run.call.name, known_arguments(run.call.arguments)) for run in self._runs]
        said = Message("assistant", self._answer.content or "", self._answer.reasoning, calls)
        special = list(self.model.special_tokens)
        results = []
        for run in self._runs:
            assert run.result is not None
            result = ToolResult(cut(run.result.text, longest), run.result.error)
            parts: list[Part] = [as_data(run.call.name, result, special), *map(Picture, map(Sent, run.result.images))]
            results.append(Message.of("tool", parts, call_id=run.call.id))
        is_last = self._num_turns >= self._max_turns or self.num_calls >= self.most_calls
        tools = [] if is_last else self._conversation.tools
        messages = [*self._conversation.messages, said, *results]
        return dataclasses.replace(self._conversation, messages=messages, tools=tools, tool_choice="auto")


def _not_run(reason: str) -> ToolResult:
    text = f"The tool was not run: {reason}"
    return ToolResult(text, {"type": "mcp_protocol_error", "code": -32602, "message": reason})


def injects_tools(state: ServerState, config: ModelConfig) -> bool:
    """Whether requests to a model that say nothing of tools are offered the servers' tools."""
    has_servers = bool(state.tool_servers.servers)
    return state.config.mcp_inject and has_servers and config.tool_call_parser != "none"


async def injected_tools(state: ServerState, model: ServedModel) -> list[Tool]:
    """The tools for a request that says nothing of tools. Raises as `offered`."""
    if not injects_tools(state, model.config):
        return []
    await state.tool_servers.ready()
    tools = state.tool_servers.tools()
    return await state.offload(offered, model, tools) if tools else []


async def asked_tools(
    state: ServerState, model: ServedModel, allowed: Collection[str] | None, place: Field
) -> list[Tool]:
    """The servers' tools, or those `allowed`. Raises InvalidRequestError of `place`; 503 while no server is ready."""
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
    """The tools without special tokens of the model. Raises InvalidRequestError for more than a request may have."""
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


router = APIRouter(route_class=JSONRoute, tags=["tool servers"])


class FunctionShown(msgspec.Struct):
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
    arguments: dict[str, Any] = pydantic.Field(default_factory=dict)
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
    shown = [FunctionShown(one.full_name, one.description, one.parameters) for one in state.tool_servers.tools()]
    return json_response(ToolList(data=[ToolShown(function=function) for function in shown]))


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
    output = ToolOutput(name=tool.full_name, server_label=tool.server, output=result.text, error=result.error)
    return json_response(output)


@router.get("/mcp/servers", responses=returns(ServerList))
async def list_servers(request: Request) -> Response:
    """The MCP servers of the configuration, and how they are."""
    state: ServerState = request.app.state.server
    servers = [
        ServerShown(
            label=server.label,
            description=server.description,
            transport=server.settings.transport,
            status=server.status,
            error=server.error,
            tools=[tool.full_name for tool in server.tools],
            refused=[RefusedTool(name=name, reason=reason) for name, reason in server.refused.items()],
        )
        for server in state.tool_servers.servers.values()
    ]
    return json_response(ServerList(data=servers))
