"""A small MCP server that needs no network: `mcp.json` beside it tells jaxllm to start it.

    jaxllm serve smollm2-135m --mcp-config examples/mcp/mcp.json
    curl http://127.0.0.1:8000/v1/mcp/tools/toolbox_multiply -H 'Content-Type: application/json' \\
         -d '{"arguments": {"a": 6, "b": 7}}'
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

toolbox = MCPServer("toolbox", log_level="WARNING")
READ_ONLY = ToolAnnotations(readOnlyHint=True)


@toolbox.tool(annotations=READ_ONLY)
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


@toolbox.tool(annotations=READ_ONLY)
def current_time() -> str:
    """The date and the time now, in UTC."""
    return datetime.now(UTC).strftime("%A, %d %B %Y, %H:%M UTC")


@toolbox.tool(annotations=READ_ONLY)
def read_example(name: str) -> str:
    """The source of one of jaxllm's examples, such as chat.py."""
    examples = Path(__file__).resolve().parents[1]
    known = sorted(path.name for path in examples.glob("*.py"))
    if name not in known:
        raise ToolError(f"there is no {name}; there are {', '.join(known)}")
    return (examples / name).read_text()


if __name__ == "__main__":
    toolbox.run("stdio")
