"""A tool server that starts at once, for tests of what is done with one: `python light_server.py`.

Spoken without the SDK, whose import takes a second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
NOTE = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
TOOLS = [{"name": "add", "inputSchema": NUMBERS}, {"name": "slow", "inputSchema": NOTE}]

notes: dict[Any, Path] = {}
"""Of each call of `slow`, which is never answered: where it writes what becomes of it."""


def reply(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request; None where it is to wait."""
    params = asked.get("params") or {}
    match asked["method"], params.get("name"):
        case "initialize", _:
            named = {"name": "light", "version": "1"}
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": named}
        case "tools/list", _:
            return {"tools": TOOLS}
        case "tools/call", "add":
            text = str(params["arguments"]["a"] + params["arguments"]["b"])
            return {"content": [{"type": "text", "text": text}]}
        case "tools/call", "slow":
            notes[asked["id"]] = Path(params["arguments"]["note"])
            notes[asked["id"]].write_text("begun")
            return None
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "notifications/cancelled":
        notes[asked["params"]["requestId"]].write_text("cancelled")
    elif "id" in asked and (result := reply(asked)) is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
