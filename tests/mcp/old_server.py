"""A tool server as people have them: it knows MCP of 2025 only, lists in pages, and says more than it is asked.

Spoken without the SDK: `python old_server.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("blocks", "grow", "family", "die")]


def say(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


print("Starting up: this is no JSON")
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked["method"], asked.get("params") or {}
    if "id" not in asked:
        continue
    if method == "initialize":
        result: Any = {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "old", "version": "1"},
        }
    elif method == "tools/list":
        at = int(params.get("cursor", 0))
        result = {"tools": tools[at : at + 2]} | ({"nextCursor": str(at + 2)} if at + 2 < len(tools) else {})
    elif method == "tools/call" and params["name"] == "grow":
        tools.append({"name": "later", "inputSchema": {"type": "object"}})
        say(method="notifications/tools/list_changed")
        result = {"content": [{"type": "text", "text": "changed"}]}
    elif method == "tools/call" and params["name"] == "family":
        child = subprocess.Popen(["sleep", "60"], start_new_session=params["arguments"].get("detached", False))
        result = {"content": [{"type": "text", "text": f"{os.getpid()} {child.pid}"}]}
    elif method == "tools/call" and params["name"] == "die":
        sys.exit("these are my last words")
    elif method == "tools/call":
        blocks = [
            {"type": "text", "text": "one"},
            {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///two", "text": "two"}},
            {"type": "resource_link", "uri": "file:///three", "name": "three"},
        ]
        result = {"content": blocks}
    else:
        say(id=asked["id"], error={"code": -32601, "message": f"no method {method}"})
        continue
    say(id=asked["id"], result=result)
