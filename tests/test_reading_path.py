"""One streamed chat with a tool call runs code of few files, in the server's and the engine's process together."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.conftest import wait_for
from tests.serving.mixed_requests import TOOLS
from tests.serving.real_server import served
from tests.test_architecture import said

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12"),
]

MOST_FILES = 60


def test_a_chat_with_a_tool_call_runs_code_of_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    hook = Path(__file__).with_name("reading_path")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FILES_RUN", str(folder))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Look it up"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 100,
        "stream": True,
    }
    with served("smollm2-135m", data_dir=str(tmp_path / "data")) as url:

        def chat() -> str:
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status().text

        for _ in range(2):
            assert '"finish_reason":"tool_calls"' in chat()
        wait_for(lambda: httpx.get(f"{url}/metrics").text.count("compiles_pending") > 0, 10)
        (folder / "begin").touch()
        wait_for(lambda: len([*folder.glob("*.ready")]) >= 2, 30)
        chat()
        time.sleep(0.2)
        (folder / "end").touch()
        wait_for(lambda: len([*folder.glob("*.files")]) == len([*folder.glob("*.ready")]), 30)
    files = {file for written in folder.glob("*.files") for file in written.read_text().splitlines()}
    assert 20 < len(files) <= MOST_FILES, "\n".join(sorted(files))
    assert said("runs code of # files at most") == MOST_FILES
