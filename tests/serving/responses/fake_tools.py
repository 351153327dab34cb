"""Tool servers that are Python functions, in the place of MCP's; test_real_tools.py runs the same loop on real ones."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.tools import ServerTool, ToolResult

TEMPLATE = (
    "{% if tools %}(tools={{ tools | tojson }}){% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template that knows tools."""
ANYTHING = {"type": "object", "properties": {}, "additionalProperties": True}


class FakeServer:
    """`tools` are functions of keyword arguments, by name; those in `read_only` say that they change nothing."""

    def __init__(self, label: str, read_only: Sequence[str] = (), **tools: Callable[..., Any]):
        self.label = label
        self.description = None
        self.status = "ready"
        self.error: str | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.most_running = 0
        self.closed = False
        self._running = 0
        self._functions = tools
        self.tools = [
            ServerTool(label, name, f"{label}_{name}", f"Does {name}", ANYTHING, name in read_only) for name in tools
        ]

    async def ready(self, timeout: float) -> None:
        pass

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        self.loop = asyncio.get_running_loop()
        self.calls.append((name, arguments))
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            result = self._functions[name](**arguments)
            return ToolResult(await result if inspect.isawaitable(result) else result)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        except Exception as error:
            told = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": str(error)}]}
            return ToolResult(f"The tool failed: {error}", told)
        finally:
            self._running -= 1

    async def close(self) -> None:
        self.closed = True


class FakeServers:
    """What ToolServers is to the loop. `elsewhere` is who answers at a request's server_url."""

    def __init__(self, *servers: FakeServer, elsewhere: FakeServer | None = None):
        self.servers = {server.label: server for server in servers}
        self.elsewhere = elsewhere
        self.asked: list[ServerSettings] = []

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ready(self) -> None:
        pass

    def tools(self) -> list[ServerTool]:
        return [tool for server in self.servers.values() for tool in server.tools if server.status == "ready"]

    async def connect(self, settings: ServerSettings) -> FakeServer:
        self.asked.append(settings)
        assert self.elsewhere is not None
        return self.elsewhere


async def hang() -> str:
    await asyncio.Event().wait()
    return "never"


def weather(**servers_tools: Callable[..., Any]) -> FakeServer:
    tools = {"forecast": lambda city: f"Rain in {city}.", "warn": lambda: "Warned everybody."}
    return FakeServer("weather", read_only=["forecast"], **{**tools, **servers_tools})


def says(*calls: tuple[str, Any], before: str = "") -> str:
    """A reply that makes calls, in Hermes' notation. Arguments that are text are written as they are."""
    texts = [
        f'{{"name": "{name}", "arguments": {arguments if isinstance(arguments, str) else json.dumps(arguments)}}}'
        for name, arguments in calls
    ]
    return before + "".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


FORECAST = ("weather_forecast", {"city": "Paris"})
WARN = ("weather_warn", {})
MCP = {"type": "mcp", "server_label": "weather", "require_approval": "never"}
