"""The tool servers of one jaxllm server, or of one session, each with a supervisor task and a connection."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import anyio

from jaxllm.config.server import ServerConfig
from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.stdio import MAX_MESSAGE, Child, started
from jaxllm.mcp.tools import (
    CLOSED,
    Lost,
    Problem,
    ServerTool,
    ToolResult,
    failed_statuses,
    failure,
    list_tools,
    problem,
    tool_result,
)

if TYPE_CHECKING:
    from mcp import Client

logger = logging.getLogger(__name__)

ServerStatus = Literal["starting", "ready", "failed", "stopped"]
FIRST_DELAY = 0.5  # seconds before the next attempt to connect, doubled each time; none after a steady connection
STEADY_SECONDS = 5.0
LOST_SECONDS = 5.0  # the time that a call waits to hear why its connection was lost
LONGEST_DELAY = 60.0
LISTING_PAUSE = 1.0  # seconds between two listings, however often a server says that its tools have changed
RESULT_LIMIT: int = ServerConfig.model_fields["mcp_result_limit"].default
STARTING_SECONDS = 3.0  # the time that a request waits for servers which are just starting, so that it gets their tools


class ToolServers:
    """All tool servers; `servers` has them by label, in the order of the configuration."""

    def __init__(self, settings: Sequence[ServerSettings] = (), *, result_limit: int = RESULT_LIMIT):
        self._result_limit = result_limit
        self._reloading = asyncio.Lock()
        self.servers = {one.label: self._server(one) for one in settings}

    async def start(self) -> None:
        for server in self.servers.values():
            server.start()

    async def ready(self, timeout: float = STARTING_SECONDS) -> None:
        """Return once the start of each has succeeded or failed, or after `timeout` seconds."""
        await asyncio.gather(*(server.ready(timeout) for server in self.servers.values()))

    async def close(self) -> None:
        """End all of them; see ToolServer.close. Once begun they end, even if this is cancelled."""
        for server in self.servers.values():
            server.stop()
        await asyncio.gather(*(server.close() for server in self.servers.values()))

    async def reload(self, settings: Sequence[ServerSettings]) -> None:
        """Change to these servers; those whose settings are the same go on as they are."""
        async with self._reloading:
            before = self.servers
            kept = {label: server for label, server in before.items() if server.settings in settings}
            self.servers = {one.label: kept.get(one.label) or self._server(one) for one in settings}
            await asyncio.gather(*(server.close() for label, server in before.items() if label not in kept))
            for label, server in self.servers.items():
                if label not in kept:
                    server.start()

    def tools(self) -> list[ServerTool]:
        return [tool for server in self.servers.values() if server.status == "ready" for tool in server.tools]

    def find(self, full_name: str) -> ServerTool | None:
        return next((tool for tool in self.tools() if tool.full_name == full_name), None)

    async def call(self, tool: ServerTool, arguments: dict[str, Any]) -> ToolResult:
        server = self.servers.get(tool.server)
        if server is None:
            gone = Problem("mcp_protocol_error", CLOSED, "there is no such server any more")
            return failure(tool.name, tool.server, gone)
        return await server.call(tool.name, arguments)

    async def connect(self, settings: ServerSettings) -> ToolServer:
        """A further server, which is not listed here: the caller waits until it is ready, and closes it."""
        server = self._server(settings)
        server.start()
        return server

    def _server(self, settings: ServerSettings) -> ToolServer:
        return ToolServer(settings, result_limit=self._result_limit)


class ToolServer:
    """Its tools are what was listed last; there are none unless it is ready."""

    def __init__(self, settings: ServerSettings, *, result_limit: int):
        self.settings = settings
        self.label = settings.label
        self.description = settings.description
        self.status: ServerStatus = "starting"
        self.error: str | None = None  # the last problem, while status is failed
        self.tools: Sequence[ServerTool] = ()
        self.refused: Mapping[str, str] = {}  # names of tools that cannot be offered, and why
        self._result_limit = result_limit
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._scope: anyio.CancelScope | None = None
        self._settled = asyncio.Event()  # the last attempt has succeeded or failed
        self._problem: Problem | None = None  # the end of the connection before
        self._ready_at: float | None = None  # when the present connection was made
        self._in_haste = False  # whether the next attempt does not wait: the server is there, and has only forgotten us
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()  # the present connection should be left
        self._attempted = asyncio.Event()  # the present connection has been left, and `error` says why

    def start(self) -> None:
        self._scope = anyio.CancelScope()
        self._task = asyncio.create_task(self._supervise(), name=f"mcp-{self.label}")

    async def ready(self, timeout: float) -> None:
        """Return once the tools are listed, or it has failed, or after `timeout` seconds."""
        with anyio.move_on_after(timeout):
            await self._settled.wait()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run a tool by the server's name for it. The result tells of failures; cancelling this cancels the tool."""
        found = await self._call(name, arguments)
        if isinstance(found, Problem) and found.forgotten:
            self._in_haste = True
            self._settle("starting", found.message)
            self._lost.set()
            found = await self._call(name, arguments)
        return failure(name, self.label, found) if isinstance(found, Problem) else found

    def stop(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def close(self) -> None:
        """Disconnect; a stdio server and all its processes are gone when this returns."""
        self.stop()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._settle("stopped", None)

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult | Problem:
        await self.ready(self.settings.timeout)
        client = self._client
        if client is None:
            return Problem("http_error", CLOSED, f"it is not connected: {self.error or self.status}")
        statuses = failed_statuses.set([])
        try:
            result = await client.call_tool(name, arguments, read_timeout_seconds=self.settings.timeout)
            return tool_result(result, self._result_limit)
        except Exception as error:  # whatever the SDK makes of what the server sent
            found = problem(error, self.settings)
            return await self._why_lost(found) if found.closed else found
        finally:
            failed_statuses.reset(statuses)

    async def _why_lost(self, found: Problem) -> Problem:
        """The supervisor's reason for the end that a call has noticed, if it comes soon."""
        attempt, self._problem = self._attempted, None
        self._lost.set()
        with anyio.move_on_after(LOST_SECONDS):
            await attempt.wait()
        return self._problem or found

    async def _supervise(self) -> None:
        assert self._scope is not None
        delay = FIRST_DELAY
        with self._scope:
            await asyncio.to_thread(importlib.import_module, "mcp")  # takes a second
            while True:
                self._ready_at, self._in_haste, known = None, False, self.error
                found = await self._attempt()
                if self._in_haste or (
                    self._ready_at is not None and time.monotonic() - self._ready_at >= STEADY_SECONDS
                ):
                    delay = 0.0
                if found.message != known:
                    logger.warning("MCP server %s: %s", self.label, found.message)
                self._settle("failed" if delay else "starting", found.message)
                self._problem = found
                self._attempted.set()
                await anyio.sleep(delay)
                delay = min(max(2 * delay, FIRST_DELAY), LONGEST_DELAY)

    async def _attempt(self) -> Problem:
        self._lost, self._attempted = asyncio.Event(), asyncio.Event()
        failed_statuses.set([])
        connection = Connection(self.settings)
        try:
            with anyio.CancelScope(deadline=anyio.current_time() + self.settings.timeout) as opening:
                async with connection.open(ended=self._lost.set, changed=self._changed.set) as client:
                    await self._list(client)
                    opening.deadline = float("inf")
                    self._client, self._ready_at = client, time.monotonic()
                    self._settle("ready", None)
                    logger.info("MCP server %s: %d tools", self.label, len(self.tools))
                    await self._keep(client)
            raise TimeoutError
        except Exception as error:
            return connection.why(error)
        finally:
            self._client = None

    async def _keep(self, client: Client) -> None:
        """List the tools anew whenever they have changed. Raises Lost at the end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._subscribe, client)
            tasks.start_soon(self._follow_changes, client)
            await self._lost.wait()
            raise Lost

    async def _follow_changes(self, client: Client) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._list(client)
            await anyio.sleep(LISTING_PAUSE)

    async def _subscribe(self, client: Client) -> None:
        """Ask to be told of changes: servers of MCP's newer versions tell only those who ask."""
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
        from mcp.shared.exceptions import MCPError

        tools = client.server_capabilities.tools
        if tools is None or not tools.list_changed:
            return
        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._changed.set()
        except ListenNotSupportedError:
            return  # an older one, which tells everybody
        except (MCPError, SubscriptionLost, TimeoutError) as error:
            logger.debug("MCP server %s tells of no changes: %s", self.label, self.settings.shown(error))

    async def _list(self, client: Client) -> None:
        self._changed.clear()
        listing = await list_tools(client, self.settings)
        self.tools, self.refused = tuple(listing.tools), listing.refused
        for name, reason in listing.refused.items():
            logger.warning("MCP server %s: its tool %s is left out: %s", self.label, name, reason)

    def _settle(self, status: ServerStatus, error: str | None) -> None:
        self.status, self.error = status, error
        if status != "ready":
            self.tools, self.refused = (), {}
        if status == "starting":
            self._settled.clear()
        else:
            self._settled.set()


class Connection:
    """Opened once, and left by the task that opened it; any task may call meanwhile."""

    def __init__(self, settings: ServerSettings):
        self._settings = settings
        self._child: Child | None = None

    @asynccontextmanager
    async def open(self, *, ended: Callable[[], None], changed: Callable[[], None]) -> AsyncIterator[Client]:
        """A connected client. Calls `ended` when nothing more will be heard, and `changed` for new tools; see `why`."""
        from mcp import Client
        from mcp_types import Implementation, ToolListChangedNotification

        async def hear(message: Any) -> None:
            if isinstance(message, ToolListChangedNotification):
                changed()

        async with AsyncExitStack() as stack:
            client = Client(
                _watched(await self._transport(stack), ended), read_timeout_seconds=self._settings.timeout,
                client_info=Implementation(name="jaxllm", version=version("jaxllm")), message_handler=hear, cache=None,
            )  # fmt: skip
            await stack.enter_async_context(client)
            yield client

    def why(self, error: BaseException) -> Problem:
        """The reason for its end, to be asked once it is left."""
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
                settings.url, timeout=settings.timeout, sse_read_timeout=READ_SECONDS,
                httpx_client_factory=lambda headers=None, timeout=None, auth=None: http_client(settings),
            )  # fmt: skip
        from mcp.client.streamable_http import streamable_http_client

        http = await stack.enter_async_context(http_client(settings))
        return streamable_http_client(settings.url, http_client=http, max_sse_event_size=MAX_MESSAGE)


@asynccontextmanager
async def _watched(transport: Any, ended: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    async with transport as (messages, outbox):
        yield _Messages(messages, ended), outbox


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
