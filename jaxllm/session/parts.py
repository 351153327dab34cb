"""The model and the tools of a session, and the thread on which its servers outlive the loops of callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxllm.chat.conversation import parse_arguments
from jaxllm.chat.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.errors import ConfigError, Field, InvalidRequestError, JaxLLMError
from jaxllm.mcp.servers import RESULT_LIMIT, ToolServers
from jaxllm.mcp.settings import ServerSettings, parse_settings, read_settings, refuse_collisions
from jaxllm.mcp.tools import ServerTool, ToolResult, refused

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from jaxllm.engine.doors.async_llm import AsyncLLM
    from jaxllm.llm import LLM
    from jaxllm.serving.openai.chat_types import ChatRequest

READY_SECONDS = 60.0


class SessionTools:
    """Servers start when the tools are first asked for, or later if they are added later."""

    def __init__(self, thread: LoopThread, result_limit: int = RESULT_LIMIT):
        self._thread = thread
        self._servers = ToolServers(result_limit=result_limit)
        self._settings: list[ServerSettings] = []

    def add(self, name: str, fields: dict[str, Any]) -> None:
        """Add a server with the fields of one in mcp.json. Raises ConfigError."""
        self._extend(parse_settings("add_mcp_server", [{"name": name, **fields}]))

    def add_file(self, path: Path) -> None:
        """Add all servers of a file. Raises ConfigError."""
        self._extend(read_settings(path))

    async def offered(self, allowed: Sequence[str] | None) -> list[ServerTool]:
        """The tools, or those in `allowed` only. Raises InvalidRequestError if there is no tool of such a name."""
        tools = await self._thread.run(self._ready())
        if allowed is None:
            return tools
        names = [tool.full_name for tool in tools]
        unknown = next((name for name in allowed if name not in names), None)
        if unknown is not None:
            failed = "".join(
                f"; {one.label}: {one.error}" for one in self._servers.servers.values() if one.error is not None
            )
            has = f"the tools are {', '.join(names)}" if names else "there are no tools"
            raise InvalidRequestError(f"allowed_tools has {unknown!r}; {has}{failed}", "allowed_tools")
        return [tool for tool in tools if tool.full_name in allowed]

    async def call(self, name: str, arguments: str, offered: Sequence[ServerTool]) -> ToolResult:
        """Run a tool; a tool that is not offered, and arguments that are no object, become an error in the result."""
        tool = next((tool for tool in offered if tool.full_name == name), None)
        if tool is None:
            names = ", ".join(one.full_name for one in offered)
            has = f"those that may be called are {names}" if names else "none is"
            return refused(f"the tool {name!r} may not be called; {has}")
        try:
            parsed = parse_arguments(arguments, Field("arguments"))
        except InvalidRequestError as error:
            return refused(str(error))
        return await self._thread.run(self._servers.call(tool, parsed))

    def close(self) -> None:
        """End the servers and the thread."""
        self._thread.close(self._servers.close())

    def _extend(self, settings: Sequence[ServerSettings]) -> None:
        labels = [one.label for one in (*self._settings, *settings)]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError(f"there are two servers named {label!r}")
        refuse_collisions("add_mcp_server", labels)
        self._settings += settings

    async def _ready(self) -> list[ServerTool]:
        await self._servers.reload(self._settings)
        await asyncio.gather(*(server.ready(READY_SECONDS) for server in self._servers.servers.values()))
        return self._servers.tools()


T = TypeVar("T")


class LoopThread:
    """Runs coroutines of callers in other threads, or on other loops; it starts with the first."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it. Raises JaxLLMError once this is closed."""
        with self._lock:
            if self._closed:
                work.close()
                raise JaxLLMError("the session is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="jaxllm-session", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it while the calling thread waits; an interruption of that cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it while the calling task waits; cancelling that cancels it."""
        return await asyncio.wrap_future(self.submit(work))

    async def iterate(self, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """Items that are made on the thread, here; ending the reading ends their making."""
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[T | None] = asyncio.Queue()

        def tell(item: T | None) -> None:
            here.call_soon_threadsafe(arrived.put_nowait, item)

        async def read() -> None:
            try:
                async for item in items:
                    tell(item)
            finally:
                tell(None)

        reading = asyncio.wrap_future(self.submit(read()))
        try:
            while (item := await arrived.get()) is not None:
                yield item
            await reading
        finally:
            reading.cancel()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, if anything has run, and end the thread: nothing more can be submitted."""
        with self._lock:
            self._closed = True
            loop = self._loop
        if loop is None:
            last.close()
            return
        try:
            asyncio.run_coroutine_threadsafe(last, loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


@dataclass(frozen=True)
class Ended:
    """The end of a reply: "stop", "tool_calls", "length" or whatever its server says."""

    reason: str | None


class EngineModel:
    """An engine of this process, asked as a chat request asks the server, without HTTP."""

    def __init__(self, engine: LLM | AsyncLLM, thread: LoopThread):
        from jaxllm.chat.prompt import ChatModel
        from jaxllm.engine.doors.async_llm import AsyncLLM

        self._engine = engine if isinstance(engine, AsyncLLM) else engine.asynchronous()
        self.model = ChatModel(self._engine)
        self._thread = thread

    @property
    def special_tokens(self) -> Sequence[str]:
        return list(self.model.special_tokens)

    def reply(self, body: Mapping[str, Any]) -> AsyncGenerator[Event | Ended, None]:
        """The model's words to a chat request's body, as they come; an Ended is the last."""
        return self._thread.iterate(self._reply(body))

    async def _reply(self, body: Mapping[str, Any]) -> AsyncGenerator[Event | Ended, None]:
        from jaxllm.chat.answer import speak
        from jaxllm.chat.conversation import naming
        from jaxllm.chat.prompt import prepare

        request = _chat_request(body)
        settings = request.generation_settings()
        for name, value in (("lora", settings.lora), ("kv_transfer_params", settings.hand_over)):
            if value is not None:
                raise InvalidRequestError(f"{name} is not available in a session with an engine", name)
        with naming(request.own_names()):
            ready = await asyncio.to_thread(prepare, self.model, request.conversation(), settings)
        pieces = speak(self._engine, ready, priority=settings.priority, cache_salt=settings.cache_salt)
        async with aclosing(pieces):
            async for piece in pieces:
                for event in piece.events:
                    yield event
                if piece.finish_reason is not None:
                    yield Ended(piece.finish_reason)


class ClientModel:
    """A server that an AsyncOpenAI client asks; without a `name` for the first model that it lists."""

    special_tokens: Sequence[str] = ()
    model = None  # that of a client may see or not

    def __init__(self, client: AsyncOpenAI, name: str | None):
        self._client = client
        self._name = name

    async def reply(self, body: Mapping[str, Any]) -> AsyncGenerator[Event | Ended, None]:
        """As `EngineModel.reply`."""
        if self._name is None:
            self._name = (await self._client.models.list()).data[0].id
        chunks = await self._client.chat.completions.create(model=self._name, stream=True, **body)
        reason: str | None = None
        async with chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    for event in _events(choice.delta):
                        yield event
                    reason = choice.finish_reason or reason
        yield Ended(reason)


Speaker = EngineModel | ClientModel


def _chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Raises InvalidRequestError naming the field."""
    from fastapi.exceptions import RequestValidationError
    from pydantic import ValidationError

    from jaxllm.serving.http.answers import to_api_error
    from jaxllm.serving.openai.chat_types import ChatRequest

    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        told = to_api_error(RequestValidationError(errors, body=body))
        raise InvalidRequestError(str(told), told.body["error"]["param"]) from None


def _events(delta: Any) -> list[Event]:
    events: list[Event] = []
    if reasoning := getattr(delta, "reasoning_content", None):
        events.append(Reasoning(reasoning))
    if delta.content:
        events.append(Content(delta.content))
    for call in delta.tool_calls or ():
        if call.id and call.function and call.function.name:
            events.append(ToolCall(call.index, call.id, call.function.name))
        if call.function and call.function.arguments:
            events.append(ToolArguments(call.index, call.function.arguments))
    return events
