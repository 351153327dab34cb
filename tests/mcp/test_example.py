"""The example starts as docs/mcp.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.mcp.servers import ToolServers
from jaxllm.mcp.settings import read_settings
from tests.mcp.conftest import Loop, settle

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[2]


def test_the_toolbox_works(loop: Loop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From any folder, and whatever `python` may be there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    servers = ToolServers(read_settings(ROOT / "examples" / "mcp" / "mcp.json"))
    settle(loop, servers)
    try:
        toolbox = servers.servers["toolbox"]
        assert toolbox.error is None and all(tool.read_only for tool in toolbox.tools)
        assert loop.run(toolbox.call("multiply", {"a": 6, "b": 7})).text == "42.0"
        assert "UTC" in loop.run(toolbox.call("current_time", {})).text
        assert "import" in loop.run(toolbox.call("read_example", {"name": "chat.py"})).text
        assert "there are" in loop.run(toolbox.call("read_example", {"name": "/etc/passwd"})).text
    finally:
        loop.run(servers.close())
