"""Tools as a server lists them, and which of them can be offered to a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxllm.errors import one_line
from jaxllm.mcp.problems import BadServer
from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.tools import ServerTool, full_name

if TYPE_CHECKING:
    from mcp import Client

MAX_LISTED = 1000
"""Tools of one server."""
MAX_PAGES = 100
MAX_DESCRIPTION = 4096
"""Characters; what is beyond is cut."""
MAX_SCHEMA = 64 * 1024
"""Characters of a schema as JSON."""
MAX_SHOWN_NAME = 80
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""OpenAI's."""


@dataclass
class Listing:
    tools: list[ServerTool] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Names of tools that cannot be offered, and why."""


async def list_tools(client: Client, settings: ServerSettings) -> Listing:
    """All tools of a server, page by page. Raises BadServer when there is no end to them."""
    listed: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        listed += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return offered(listed, settings)
        if len(listed) > MAX_LISTED:
            break
    raise BadServer(f"its list of tools does not end: {len(listed)} came; a server may have {MAX_LISTED}")


def offered(listed: Iterable[Any], settings: ServerSettings) -> Listing:
    """Those that the configuration allows, as the model will know them."""
    found = Listing()
    for tool in listed:
        if settings.allowed_tools is not None and tool.name not in settings.allowed_tools:
            continue
        problem = _problem(tool, full_name(settings.label, tool.name), {one.name for one in found.tools})
        if problem is None:
            found.tools.append(_server_tool(tool, settings))
        elif len(found.refused) < MAX_LISTED:
            found.refused[one_line(tool.name, MAX_SHOWN_NAME)] = problem
    for name in settings.allowed_tools or ():
        if all(name != tool.name for tool in found.tools):
            found.refused.setdefault(one_line(name, MAX_SHOWN_NAME), "allowed_tools names it, but the server has none")
    return found


def _problem(tool: Any, full_name: str, names: set[str]) -> str | None:
    if tool.name in names:
        return "the server has two of this name"
    if not tool.name:
        return "the server has a tool without a name"
    if not FUNCTION_NAME.fullmatch(full_name):
        if len(full_name) > 64:
            return f"with the server's name before it, it has {len(full_name)} characters; it may have 64"
        return "a name must be of letters, digits, _ and -"
    try:
        size = len(json.dumps(tool.input_schema))
    except (ValueError, RecursionError):
        return "the schema of its arguments is nested too deeply"
    if size > MAX_SCHEMA:
        return f"the schema of its arguments has {size} characters; it may have {MAX_SCHEMA}"
    return None


def _server_tool(tool: Any, settings: ServerSettings) -> ServerTool:
    annotations = None
    if tool.annotations is not None:
        annotations = tool.annotations.model_dump(by_alias=True, exclude_none=True)
    return ServerTool(
        server=settings.label,
        name=tool.name,
        full_name=full_name(settings.label, tool.name),
        description=None if tool.description is None else printable(tool.description)[:MAX_DESCRIPTION],
        parameters=tool.input_schema,
        read_only=bool((annotations or {}).get("readOnlyHint")),
        annotations=annotations,
    )


def printable(text: str) -> str:
    """A server's words without control characters, but for line ends and tabs."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
