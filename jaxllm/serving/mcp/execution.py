"""Tools of MCP servers in chats: what requests are offered, and completions whose tools the server runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from jaxllm.chat.conversation import MAX_TOOLS, Conversation, Message, Tool, known_arguments, parse_arguments
from jaxllm.chat.conversation import Call as MadeCall
from jaxllm.chat.events import Content, Event, ParsedOutput, Reasoning, join_events
from jaxllm.errors import ContextLengthError, Field, InvalidRequestError
from jaxllm.mcp.tools import ServerTool, ToolResult, as_data, cut, defused
from jaxllm.requests.outputs import ParsedCall
from jaxllm.serving.call import Call
from jaxllm.serving.generation import GenerationSettings
from jaxllm.serving.http.api_error import unavailable
from jaxllm.serving.reply import Reply, ReplyLoop, begin_reply
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState
from jaxllm.wording import shown

SHORTEST_RESULT = 200
"""Characters: a context that does not hold so much of each result either is full."""
BETWEEN = "\n\n"
"""What stands between the texts of two answers."""


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
    """The last answer's end."""

    finish_reason: str
    stop_reason: int | str | None = None


Happening = Content | Reasoning | ToolRun | Ended
Happenings = list[tuple[int, Happening]]
"""All of choice 0."""


class Execution(ReplyLoop[Happenings, ToolRun]):
    """An async context, as a Generation is: entering begins the first answer, leaving ends whatever runs.

    `first` is the first reply; to the client its id is that of all of them.
    """

    silence: Happenings = []  # noqa: RUF012

    def __init__(
        self,
        call: Call,
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
        self._answer = ParsedOutput(None, None, [])
        """The last one that was read, with what it calls."""
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
        """What happens, in order; an empty list after `timeout` seconds of silence."""
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
        left = self._tokens_left()
        if left == 0:
            self._end = Ended("length")
            return False
        await self._next_answer(self._answer, self._runs, left)
        return True

    async def read_answer(self, timeout: float | None) -> AsyncIterator[Happenings]:
        if self._answer.content:
            yield [(0, Content(BETWEEN))]
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
        return await self._call.state.tool_servers.call(tool, arguments)

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

    def _tokens_left(self) -> int | None:
        """Of the request's max_tokens, which all answers share."""
        if self._settings.max_tokens is None:
            return None
        return max(self._settings.max_tokens - self.usage().completion_tokens, 0)

    async def _next_answer(self, answer: ParsedOutput, runs: Sequence[ToolRun], left: int | None) -> None:
        """Begin the answer to the results. Raises ContextLengthError where the context holds no part of them."""
        self._num_turns += 1
        asked = self._settings.request_id
        settings = dataclasses.replace(
            self._settings, max_tokens=left, request_id=None if asked is None else f"{asked}-{self._num_turns}"
        )
        longest = max(len(run.result.text) for run in runs if run.result is not None)
        while True:
            conversation = self._with_results(answer, runs, longest, last=self._num_turns >= self._max_turns)
            try:
                reply = await begin_reply(self._call, conversation, settings, prefix="chatcmpl-", goes_on=True)
                break
            except ContextLengthError:
                longest //= 2
                if longest < SHORTEST_RESULT:
                    raise
        self._conversation = conversation
        await self.enter(reply)

    def _with_results(self, answer: ParsedOutput, runs: Sequence[ToolRun], longest: int, *, last: bool) -> Conversation:
        calls = [MadeCall(run.call.id, run.call.name, known_arguments(run.call.arguments)) for run in runs]
        said = Message("assistant", answer.content or "", answer.reasoning, calls)
        special = list(self.model.special_tokens)
        results = []
        for run in runs:
            assert run.result is not None
            result = ToolResult(cut(run.result.text, longest), run.result.error)
            results.append(Message("tool", as_data(run.call.name, result, special), call_id=run.call.id))
        return dataclasses.replace(
            self._conversation,
            messages=[*self._conversation.messages, said, *results],
            tools=[] if last or self.num_calls >= self.most_calls else self._conversation.tools,
            tool_choice="auto",
        )


def _not_run(reason: str) -> ToolResult:
    text = f"The tool was not run: {reason}"
    return ToolResult(text, {"type": "mcp_protocol_error", "code": -32602, "message": reason})


async def injected_tools(state: ServerState, model: ServedModel) -> list[Tool]:
    """What is offered to a request that says nothing of tools; nothing where config.mcp_inject is off.

    Raises InvalidRequestError where there are more than a request may have.
    """
    if not state.config.mcp_inject or model.config.tool_call_parser == "none":
        return []
    await state.tool_servers.ready()
    tools = state.tool_servers.tools()
    return await state.offload(offered, model, tools) if tools else []


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
