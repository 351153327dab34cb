"""The tools of a session: MCP servers on a thread of their own, so that they outlive the loops of callers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, Field, InvalidRequestError
from jaxllm.mcp.config_file import parse_settings, read_settings, refuse_collisions
from jaxllm.mcp.servers import RESULT_LIMIT, ToolServers
from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.tools import ServerTool, ToolResult
from jaxllm.serving.conversation import parse_arguments
from jaxllm.session.thread import LoopThread

READY_SECONDS = 60.0


class SessionTools:
    """Servers begin when the tools are first asked for; settings that come later begin then."""

    def __init__(self, thread: LoopThread, result_limit: int = RESULT_LIMIT):
        self._thread = thread
        self._servers = ToolServers(result_limit=result_limit)
        self._settings: list[ServerSettings] = []

    def add(self, name: str, fields: dict[str, Any]) -> None:
        """A server with the fields that one in mcp.json has. Raises ConfigError."""
        self._extend(parse_settings("add_mcp_server", [{"name": name, **fields}]))

    def add_file(self, path: Path) -> None:
        """All servers of a file. Raises ConfigError."""
        self._extend(read_settings(path))

    async def offered(self, allowed: Sequence[str] | None) -> list[ServerTool]:
        """The tools, of `allowed` names only. Raises InvalidRequestError where there is no tool of such a name."""
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
        """Run a tool; one that is not offered, and arguments that are no object, are told in the result."""
        tool = next((tool for tool in offered if tool.full_name == name), None)
        if tool is None:
            has = (
                f"those that may be called are {', '.join(one.full_name for one in offered)}" if offered else "none is"
            )
            return refused(f"the tool {name!r} may not be called; {has}")
        try:
            parsed = parse_arguments(arguments, Field("arguments"))
        except InvalidRequestError as error:
            return refused(str(error))
        return await self._thread.run(self._servers.call(tool, parsed))

    async def aclose(self) -> None:
        """On the servers' own thread."""
        await self._servers.close()

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


def refused(problem: str) -> ToolResult:
    """A call that no tool was given."""
    return ToolResult(problem, {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": problem}]})
