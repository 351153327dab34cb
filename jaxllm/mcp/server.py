"""One tool server: a supervisor task enters its connection, keeps it, and leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.tools import ServerTool, ToolResult

Status = Literal["starting", "ready", "failed", "stopped"]


class ToolServer:
    def __init__(self, settings: ServerSettings, *, result_limit: int):
        self.settings = settings
        self.label = settings.label
        self.description = settings.description
        self.status: Status = "starting"
        self.error: str | None = None
        """What went wrong last, while status is failed."""
        self.tools: Sequence[ServerTool] = ()
        self._result_limit = result_limit

    def start(self) -> None:
        """Begin to connect, on the running event loop."""
        raise NotImplementedError

    async def ready(self, timeout: float) -> None:
        """Return once the tools are listed, or it has failed, or after `timeout` seconds."""
        raise NotImplementedError

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run one of its tools, by the server's own name for it.

        Whatever the server does is told in the result; cancelling this cancels the tool.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect; a stdio server and all it has started are gone when this returns."""
        raise NotImplementedError
