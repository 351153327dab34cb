"""Calls that the server runs itself: side by side, and whatever becomes of them is for the model to hear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.mcp.servers import ToolServers
from jaxllm.mcp.tools import ServerTool, ToolResult
from jaxllm.serving.conversation import parse_arguments
from jaxllm.serving.parsing.parsed import ParsedCall
from jaxllm.serving.shown import shown


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


class ToolRuns:
    """All the calls of one request: no more than `most` are run, and none but of the tools `offered` by name."""

    def __init__(self, servers: ToolServers, offered: Collection[str], most: int):
        self._servers = servers
        self._offered = offered
        self._most = most
        self._count = 0
        self._tasks: dict[asyncio.Task[ToolResult], ToolRun] = {}

    @property
    def exhausted(self) -> bool:
        """Whether no further call will be run."""
        return self._count >= self._most

    def begin(self, calls: Sequence[ParsedCall]) -> list[ToolRun]:
        """Start to run these; `ended` gives them back."""
        begun = []
        for call in calls:
            tool = self._find(call.name)
            begun.append(run := ToolRun(self._count, call, "" if tool is None else tool.server))
            self._tasks[asyncio.create_task(self._result(run))] = run
            self._count += 1
        return begun

    async def ended(self, timeout: float | None) -> AsyncIterator[ToolRun | None]:
        """Each that was begun as it ends, and None after `timeout` seconds of silence."""
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for task in done:
                run = self._tasks.pop(task)
                run.result = _failed("it was cancelled") if task.cancelled() else task.result()
                yield run

    def cancel(self) -> None:
        """End those that run."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """The same, and wait until they have ended."""
        self.cancel()
        tasks, self._tasks = self._tasks, {}
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, name: str) -> ServerTool | None:
        return self._servers.find(name) if name in self._offered else None

    async def _result(self, run: ToolRun) -> ToolResult:
        if run.index >= self._most:
            return _failed(f"no more than {self._most} tools may be called for one answer; answer without it")
        tool = self._find(run.call.name)
        if tool is None:
            return _failed(f"there is no tool {shown(run.call.name)}")
        try:
            arguments = parse_arguments(run.call.arguments, Field("arguments"))
        except InvalidRequestError as error:
            return _failed(str(error))
        return await self._servers.call(tool, arguments)


def _failed(reason: str) -> ToolResult:
    text = f"The tool was not run: {reason}"
    return ToolResult(text, {"type": "mcp_protocol_error", "code": -32602, "message": reason})
