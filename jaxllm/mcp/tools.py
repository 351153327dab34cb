"""A tool that some server runs, and what running it gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def full_name(server: str, name: str) -> str:
    """("weather", "forecast") -> "weather_forecast": what a model calls a server's tool."""
    return f"{server}_{name}"


@dataclass(frozen=True)
class ServerTool:
    server: str
    """The label of the server that runs it, as "weather"."""
    name: str
    """What the server calls it, as "forecast"."""
    full_name: str
    """What the model calls it, as "weather_forecast"; of OpenAI's pattern for names of functions."""
    description: str | None
    parameters: dict[str, Any]
    """JSON schema of its arguments."""
    read_only: bool = False
    """Whether the server says that it changes nothing."""
    annotations: dict[str, Any] | None = None


@dataclass(frozen=True)
class ToolResult:
    text: str
    """For the model to read: cut to the limit already. Where there is an error, it says that too."""
    error: dict[str, Any] | None = None
    """OpenAI's: type is mcp_protocol_error, mcp_tool_execution_error or http_error."""
