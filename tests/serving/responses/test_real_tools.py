"""The same loop on a real MCP server, over stdio, named in an mcp.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.mcp.conftest import TOOL_SERVER
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY
from tests.serving.responses.fake_tools import TEMPLATE, says
from tests.serving.responses.shared import PARSERS, prompt_text

pytestmark = pytest.mark.programs


@pytest.fixture
def real(listen: Callable[..., str], roomy: Callable[..., Any], tmp_path: Path) -> Any:
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"lab": {"command": sys.executable, "args": [TOOL_SERVER, "stdio"]}}}))
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    engine = roomy()
    engine.info.max_model_len = 60_000
    url = listen(engine, data_dir=tmp_path, mcp_config=config, chat_template=template, **PARSERS)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60), engine


LAB = {"type": "mcp", "server_label": "lab", "require_approval": "never"}


def test_a_real_tool_is_called_fails_and_is_cut(real: Any) -> None:
    client, engine = real
    for call, output, error in (
        (("lab_add", {"a": 2, "b": 3}), "5", None),
        (("lab_fail", {"reason": "no luck"}), None, "no luck"),
        (("lab_add", {"a": "two"}), None, "validation"),
    ):
        engine.script.append(says(call))
        response = client.responses.create(model="fake", input="x", tools=[LAB])
        made = next(item for item in response.output if item.type == "mcp_call")
        assert made.output == output and (error is None or error in made.error.content[0]["text"])
        assert response.output_text == REPLY and (output or error) in prompt_text(engine)
    assert "readOnlyHint" in response.output[0].model_dump_json()
    engine.script.append(says(("lab_huge", {"size": 1_000_000})))
    response = client.responses.create(model="fake", input="x", tools=[LAB])
    assert response.output_text == REPLY and len(response.output[1].output) < 21_000
    assert response.output[1].output.endswith("characters]")


def test_a_tool_that_nobody_waits_for_is_cancelled(real: Any, tmp_path: Path) -> None:
    client, engine = real
    note = tmp_path / "note"
    engine.script.append(says(("lab_slow", {"note": str(note)})))
    response = client.responses.create(model="fake", input="x", tools=[LAB], background=True)
    wait_for(lambda: note.exists() and note.read_text() == "begun", 20)
    assert client.responses.cancel(response.id).status == "cancelled"
    wait_for(lambda: note.read_text() == "cancelled")
