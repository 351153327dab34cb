"""A connection to one tool server, over whichever transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jaxllm.mcp.problems import Problem, problem
from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.stdio import MAX_MESSAGE, Child, started

if TYPE_CHECKING:
    from mcp import Client


class Connection:
    """To be opened once, and left by the task that opened it; any task may call meanwhile."""

    def __init__(self, settings: ServerSettings):
        self._settings = settings
        self._child: Child | None = None

    @asynccontextmanager
    async def open(self, *, ended: Callable[[], None], changed: Callable[[], None]) -> AsyncIterator[Client]:
        """A client that has shaken hands. `ended` is told when nothing more will be heard, `changed` of new tools.

        Raises whatever the transport does: see `why`.
        """
        from mcp import Client
        from mcp_types import Implementation, ToolListChangedNotification

        async def hear(message: Any) -> None:
            if isinstance(message, ToolListChangedNotification):
                changed()

        async with AsyncExitStack() as stack:
            client = Client(
                _Watched(await self._transport(stack), ended),
                read_timeout_seconds=self._settings.timeout,
                client_info=Implementation(name="jaxllm", version=version("jaxllm")),
                message_handler=hear,
                cache=None,
            )
            await stack.enter_async_context(client)
            yield client

    def why(self, error: BaseException) -> Problem:
        """What ended it; to be asked once it is left."""
        found = problem(error, self._settings)
        if self._child is not None and found.closed:
            found.message = self._child.last_words()
        return found

    async def _transport(self, stack: AsyncExitStack) -> Any:
        settings = self._settings
        if settings.transport == "stdio":
            messages, outbox, self._child = await stack.enter_async_context(started(settings))
            return nullcontext((messages, outbox))
        assert settings.url is not None
        from jaxllm.mcp.http import READ_SECONDS, http_client

        if settings.transport == "sse":
            from mcp.client.sse import sse_client

            return sse_client(
                settings.url,
                timeout=settings.timeout,
                sse_read_timeout=READ_SECONDS,
                httpx_client_factory=lambda headers=None, timeout=None, auth=None: http_client(settings),
            )
        from mcp.client.streamable_http import streamable_http_client

        http = await stack.enter_async_context(http_client(settings))
        return streamable_http_client(settings.url, http_client=http, max_sse_event_size=MAX_MESSAGE)


class _Watched:
    """A transport that tells when its messages end."""

    def __init__(self, transport: Any, ended: Callable[[], None]):
        self._transport = transport
        self._ended = ended

    async def __aenter__(self) -> tuple[Any, Any]:
        messages, outbox = await self._transport.__aenter__()
        return _Messages(messages, self._ended), outbox

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._transport.__aexit__(*raised)


class _Messages:
    def __init__(self, stream: Any, ended: Callable[[], None]):
        self._stream = stream
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._ended()
            raise

    async def __aenter__(self) -> _Messages:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._stream.__aexit__(*raised)
