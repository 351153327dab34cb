"""ResponsesSession: a model that calls the tools of MCP servers, from a script or a notebook."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.chat.answer import ToolLoop
from jaxllm.chat.conversation import known_arguments
from jaxllm.chat.events import Content, Event, ParsedOutput, Reasoning, join_events
from jaxllm.errors import ConfigError
from jaxllm.mcp.servers import RESULT_LIMIT
from jaxllm.mcp.tools import ServerTool, ToolResult, as_data
from jaxllm.session.parts import ClientModel, Ended, EngineModel, LoopThread, SessionTools, Speaker

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from jaxllm.engine.doors.async_llm import AsyncLLM
    from jaxllm.llm import LLM


@dataclass(frozen=True)
class Said:
    """Words of the model to the user."""

    text: str


@dataclass(frozen=True)
class Thought:
    """The model's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCalled:
    """A call of a tool by the model, by the model's name for it, with the JSON text of its arguments."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolReturned:
    """The result of a call; `error` is OpenAI's, None if the tool ran."""

    call: ToolCalled
    output: str
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class ConversationResult:
    """The end of a conversation.

    Attributes:
        final_message: the text of the model's last message.
        tool_calls: every call and its result, in the order in which they were made.
        turns_taken: how often the model spoke.
        completed: the model ended by itself; false if max_turns or max_tokens ended it.
        messages: all messages, in the form with which the conversation can be continued.
    """

    final_message: str
    tool_calls: list[ToolReturned]
    turns_taken: int
    completed: bool
    messages: list[dict[str, Any]] = field(repr=False)


Step = Said | Thought | ToolCalled | ToolReturned | ConversationResult  # the last one is the result


Messages = Iterable[Mapping[str, Any]]  # as chat completions take them: {"role": "user", "content": "…"}
MAX_TURNS = 10


class ResponsesSession:
    """A model and the tools of several MCP servers, which it calls until it has an answer.

    Args:
        engine: an LLM or AsyncLLM of this process, or an openai.AsyncOpenAI client of any server.
        model: the name that a client asks for; by default the first that its server lists.
        result_limit: characters of a tool's result that the model is given.
        request: further fields of every chat request, as temperature, max_tokens or reasoning_effort. A tool_choice
            holds for the first turn of a conversation.

    Servers start when the tools are first needed, on a thread of the session's own, and end with `close`, with `with`
    or `async with`, or when the session is garbage-collected. The engine or client remains its owner's; a client
    belongs to one event loop, so a session with one uses either `run` or the async methods on one loop.
    """

    def __init__(
        self, engine: LLM | AsyncLLM | AsyncOpenAI, model: str | None = None, *, result_limit: int = RESULT_LIMIT,
        **request: Any,
    ):  # fmt: skip
        self._thread = LoopThread()
        self._tools = SessionTools(self._thread, result_limit)
        self._model: Speaker = _model(engine, model, self._thread)
        self._request = request
        self._closing = weakref.finalize(self, self._tools.close)

    @classmethod
    def from_config_path(
        cls, path: str | Path, engine: LLM | AsyncLLM | AsyncOpenAI, **arguments: Any
    ) -> ResponsesSession:
        """A session with the servers of an mcp.json. Raises ConfigError if the file cannot be used."""
        session = cls(engine, **arguments)
        session._tools.add_file(Path(path))
        return session

    def add_mcp_server(self, name: str, **fields: Any) -> ResponsesSession:
        """Add a server, whose name begins its tools' names; returns the session.

        `fields` are those of mcp.json: command, args, env, cwd, or url, auth, headers, and timeout_secs, instructions,
        allowed_tools. Raises ConfigError if they cannot be used.
        """
        self._tools.add(name, fields)
        return self

    async def list_openai_tools(self, allowed: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The tools as chat completions take them; `allowed` are exact names, as "weather_forecast".

        Raises InvalidRequestError if there is no tool of such a name.
        """
        return [_openai_tool(tool) for tool in await self._tools.offered(allowed)]

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | str = "{}") -> ToolResult:
        """Run one tool. A failure is told in the result, whose `error` is None if the tool ran."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return await self._tools.call(name, text, await self._tools.offered(None))

    async def run_conversation(
        self, messages: Messages, *, max_turns: int = MAX_TURNS, allowed_tools: Sequence[str] | None = None
    ) -> ConversationResult:
        """Let the model answer, and call tools, until it calls none or has spoken `max_turns` times.

        Tools that fail, are unknown or not in `allowed_tools` are reported to the model.
        Raises InvalidRequestError, or the client's error, if a request cannot be honoured.
        """
        steps = self.stream_conversation(messages, max_turns=max_turns, allowed_tools=allowed_tools)
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, ConversationResult):
                    return step
        raise AssertionError("the last step is the result")

    async def stream_conversation(
        self, messages: Messages, *, max_turns: int = MAX_TURNS, allowed_tools: Sequence[str] | None = None
    ) -> AsyncGenerator[Step, None]:
        """The same, step by step; the last is the result."""
        loop = _Loop(self, messages, await self._tools.offered(allowed_tools), max_turns)
        try:
            async with aclosing(loop.turns()) as steps:
                async for step in steps:
                    yield step
        finally:
            await loop.end_calls()
        yield loop.result()

    def run(
        self, messages: Messages, *, max_turns: int = MAX_TURNS, allowed_tools: Sequence[str] | None = None
    ) -> ConversationResult:
        """`run_conversation` for programs without an event loop, and for notebooks: it waits for the end."""
        return self._thread.wait(self.run_conversation(messages, max_turns=max_turns, allowed_tools=allowed_tools))

    def close(self) -> None:
        """End the servers."""
        self._closing()

    async def aclose(self) -> None:
        """End the servers, without blocking the running event loop."""
        await asyncio.to_thread(self._closing)

    def __enter__(self) -> ResponsesSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> ResponsesSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Loop(ToolLoop[Step, ToolCalled]):
    def __init__(self, session: ResponsesSession, messages: Messages, offered: Sequence[ServerTool], max_turns: int):
        super().__init__()
        self._model, self._tools, self._request = session._model, session._tools, session._request
        self._said: list[dict[str, Any]] = [dict(message) for message in messages]
        self._offered = offered
        self._max_turns = max_turns
        self._num_turns = 0
        self._answer = ParsedOutput(None, None, [])
        self._whole = False
        self._calls: list[ToolCalled] = []
        self._results: dict[ToolCalled, ToolResult] = {}
        self._past: list[ToolReturned] = []

    async def begin_answer(self) -> bool:
        if self._num_turns and not self._calls:
            return False
        for call in self._calls:
            result = self._results[call]
            self._past.append(ToolReturned(call, result.text, result.error))
            known = any(tool.full_name == call.name for tool in self._offered)
            # a tool's own words are data
            text = as_data(call.name, result, self._model.special_tokens) if known else result.text
            images = [{"type": "image_url", "image_url": {"url": image}} for image in result.images]
            content: Any = [{"type": "text", "text": text}, *images] if images else text
            self._said.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return True

    async def read_answer(self, timeout: float | None) -> AsyncIterator[Step]:
        events: list[Event | Ended] = []
        async with aclosing(self._model.reply(self._body())) as reply:
            async for event in reply:
                events.append(event)
                if isinstance(event, Content | Reasoning):
                    yield Said(event.text) if isinstance(event, Content) else Thought(event.text)
        self._num_turns += 1
        self._answer = join_events(event for event in events if not isinstance(event, Ended))
        self._whole = events[-1] in (Ended("stop"), Ended("tool_calls"))
        calls = self._answer.tool_calls if self._whole and self._num_turns < self._max_turns else []
        self._calls = [ToolCalled(call.id, call.name, call.arguments) for call in calls]
        for call in self._calls:
            yield call
        self._said.append(_message(self._answer.content, self._calls))

    def calls(self) -> Iterable[ToolCalled]:
        return self._calls

    async def call(self, asked: ToolCalled) -> ToolResult:
        from jaxllm.chat.prompt import with_seen

        result = await self._tools.call(asked.name, asked.arguments, self._offered)
        return await asyncio.to_thread(with_seen, self._model.model, result)

    def ended(self, asked: ToolCalled, result: ToolResult) -> Step:
        self._results[asked] = result
        return ToolReturned(asked, result.text, result.error)

    def result(self) -> ConversationResult:
        completed = self._whole and not self._answer.tool_calls
        return ConversationResult(self._answer.content or "", self._past, self._num_turns, completed, self._said)

    def _body(self) -> dict[str, Any]:
        body = {**self._request, "messages": self._said}
        if self._num_turns:
            body.pop("tool_choice", None)  # or the model would have to call forever
        return body | ({"tools": [_openai_tool(tool) for tool in self._offered]} if self._offered else {})


def _model(engine: LLM | AsyncLLM | AsyncOpenAI, name: str | None, thread: LoopThread) -> Speaker:
    if hasattr(engine, "chat") and hasattr(engine, "base_url"):
        return ClientModel(engine, name)  # type: ignore[arg-type]
    if name is not None:
        raise ConfigError(f"model is {name!r}; it names one of a client's models, and an engine has only its own")
    return EngineModel(engine, thread)  # type: ignore[arg-type]


def _openai_tool(tool: ServerTool) -> dict[str, Any]:
    function = {"name": tool.full_name, "description": tool.description or "", "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _message(text: str | None, calls: Sequence[ToolCalled]) -> dict[str, Any]:
    made = []
    for call in calls:
        arguments = call.arguments if known_arguments(call.arguments) else "{}"  # the result says that it is malformed
        made.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    return {"role": "assistant", "content": text or ""} | ({"tool_calls": made} if made else {})
