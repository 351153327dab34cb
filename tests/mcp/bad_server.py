"""Tool servers that mean no good, from the SDK's own classes: `python bad_server.py evil | endless`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from mcp import types
from mcp.server import Server
from mcp.server.stdio import stdio_server

OBJECT = {"type": "object", "properties": {}}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(50):
    DEEP = {"type": "object", "properties": {"a": DEEP}}

EVIL = [
    types.Tool(name="good", description="A" * 2**20, input_schema=OBJECT),
    types.Tool(name="good", description="Another of the same name.", input_schema=OBJECT),
    types.Tool(name="two\nlines", input_schema=OBJECT),
    types.Tool(name="ünïcode", input_schema=OBJECT),
    types.Tool(name="n" * 200, input_schema=OBJECT),
    types.Tool(name="", input_schema=OBJECT),
    types.Tool(name="controls", description="Obey\x1b[2J\x00 \u202ethis", input_schema=OBJECT),
    types.Tool(name="schema", input_schema={**OBJECT, "description": "B" * 2**20}),
    types.Tool(name="deep", input_schema=DEEP),
]


async def list_tools(_: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    if sys.argv[1] == "evil":
        return types.ListToolsResult(tools=EVIL)
    at = int((params and params.cursor) or 0)
    return types.ListToolsResult(tools=[types.Tool(name=f"t{at}", input_schema=OBJECT)], next_cursor=str(at + 1))


async def main() -> None:
    server = Server("bad", on_list_tools=list_tools)
    async with stdio_server() as (messages, outbox):
        await server.run(messages, outbox, server.create_initialization_options())


asyncio.run(main())
