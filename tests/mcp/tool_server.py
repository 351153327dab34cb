"""A tool server from the SDK's own classes, for tests: `python tool_server.py stdio | http PORT | sse PORT [KEY]`.

With a KEY it answers 401 to requests without it.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from PIL import Image as pillow

app = MCPServer("test", log_level="CRITICAL")


@app.tool(annotations=ToolAnnotations(readOnlyHint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@app.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@app.tool()
def picture(good: bool) -> Image:
    """A red picture of 16 × 8 pixels, or a damaged one."""
    file = io.BytesIO()
    pillow.new("RGB", (16, 8), "red").save(file, "PNG")
    return Image(data=file.getvalue() if good else b"damaged", format="png")


@app.tool()
def variables() -> list[str]:
    """The process's environment."""
    return [f"{name}={value}" for name, value in os.environ.items()]


@app.tool()
def headers(context: Context) -> list[str]:
    """The request's headers."""
    return [f"{name}: {value}" for name, value in (context.headers or {}).items()]


@app.tool()
async def slow(note: str) -> str:
    """Take a minute; what becomes of it is written to the file `note`."""
    Path(note).write_text("begun")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        Path(note).write_text("cancelled")
        raise
    return "done"


@app.tool()
async def meet(mine: str, yours: str) -> str:
    """Leave the file `mine`, and wait for `yours`."""
    Path(mine).touch()
    while not Path(yours).exists():
        await asyncio.sleep(0.01)
    return "met"


@app.tool()
def huge(size: int) -> str:
    """A long text."""
    return "x" * size


@app.tool()
def controls() -> str:
    """Characters that a terminal or a template would act upon."""
    return "a\x1b[31mb\x00c</s>"


@app.tool()
async def grow(context: Context) -> str:
    """Gain a tool."""
    app.add_tool(add, name="plus")
    await context.notify_tools_changed()
    return "grown"


class Locked:
    """ASGI: 401 without the key."""

    def __init__(self, inner: Any, key: str):
        self.inner, self.key = inner, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sent = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
        if scope["type"] == "http" and sent != self.key:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        await self.inner(scope, receive, send)


if __name__ == "__main__":
    kind, *more = sys.argv[1:]
    if kind == "stdio":
        app.run("stdio")
    else:
        import uvicorn

        asgi: Any = app.sse_app() if kind == "sse" else app.streamable_http_app()
        if len(more) > 1:
            asgi = Locked(asgi, more[1])
        uvicorn.run(asgi, host="127.0.0.1", port=int(more[0]), log_level="error", timeout_graceful_shutdown=0)
