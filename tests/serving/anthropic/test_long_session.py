"""A long session of an agent finds nearly all of each prompt in the prefix cache of a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm import AsyncLLM
from jaxllm.config import ServeConfig
from tests.serving.anthropic.shared import FORMATS
from tests.serving.fake_engine import app_of
from tests.serving.mixed_requests import write_model

pytestmark = pytest.mark.programs

TURNS = 60
TOKENS = 20_000
CONTEXT = 32_768
ENGINE: dict[str, Any] = {
    "max_model_len": CONTEXT, "max_num_seqs": 2, "max_num_batched_tokens": 512, "kv_cache_memory": "64MiB",
    "decode_buckets": (), "prefill_buckets": (), "dtype": "float32", "enforce_eager": True, "engine_process": False,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As most have it: the system's text, the tools, then the turns."""

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": properties,
        "required": [next(iter(properties))], "additionalProperties": False,
    }  # fmt: skip
    return {"name": name, "description": f"{name}s, with absolute paths. " * 12, "input_schema": schema}


TOOLS = [
    tool(
        "Bash", command={"type": "string"}, timeout={"type": "number"}, description={"type": "string"},
        run_in_background={"type": "boolean"},
    ),
    tool("Read", file_path={"type": "string"}, offset={"type": "number"}, limit={"type": "number"}),
    tool(
        "Edit", file_path={"type": "string"}, old_string={"type": "string"}, new_string={"type": "string"},
        replace_all={"type": "boolean", "default": False},
    ),
    tool("Grep", pattern={"type": "string"}, path={"type": "string"}, output_mode={"enum": ["content", "count"]}),
    tool(
        "TodoWrite",
        todos={
            "type": "array",
            "items": {"type": "object", "properties": {"content": {"type": "string"}, "status": {"type": "string"}}},
        },
    ),
]  # fmt: skip
INPUTS: list[dict[str, Any]] = [
    {"command": "ls -la src", "description": "List the sources"},
    {"file_path": "/work/src/main.py", "offset": 1, "limit": 200},
    {"file_path": "/work/src/main.py", "old_string": "a = 1\n", "new_string": "a = 2\n"},
    {"pattern": "def .*page", "path": "/work", "output_mode": "content"},
    {"todos": [{"content": "Read main.py", "status": "completed"}, {"content": "Mend it", "status": "pending"}]},
]


def request(turns: int) -> dict[str, Any]:
    """What is sent after so many calls of tools."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Mend the page table."}]}]
    for number in range(turns):
        use = {
            "type": "tool_use", "id": f"toolu_{number:024d}", "name": TOOLS[number % 5]["name"],
            "input": INPUTS[number % 5],
        }  # fmt: skip
        content = "\n".join(f"{line:5d}→    pages[{line}] = table[{number + line}]" for line in range(12))
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": content, "is_error": False}
        thought = {"type": "thinking", "thinking": f"Step {number}.", "signature": "x"}
        messages += [
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Next."}, use]},
            {"role": "user", "content": [result]},
        ]
    messages[-1] = messages[-1] | {"content": [*messages[-1]["content"][:-1], messages[-1]["content"][-1] | CACHED]}
    billing = f"x-anthropic-billing-header: cc_version=2.1.332.{turns:03x}; cc_entrypoint=cli; cch={turns:05x};"
    system = ["You are an interactive agent that helps with software. " * 8, "Work with what is there. " * 200]
    return {
        "model": "claude-opus-4-8", "max_tokens": 1, "messages": messages, "tools": TOOLS,
        "system": [{"type": "text", "text": billing}, *({"type": "text", "text": text, **CACHED} for text in system)],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("model")
    model = write_model(folder / "model", max_position_embeddings=CONTEXT)
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    engine = AsyncLLM(model=str(model), **ENGINE)
    config = ServeConfig(model="tiny", data_dir=folder / "data", chat_template=template, **FORMATS)
    try:
        with TestClient(app_of(config, engine), base_url="http://localhost") as client:
            yield client
    finally:
        engine.shutdown()


def test_a_long_session_keeps_its_prompts_in_the_cache(client: TestClient) -> None:
    prompts = cached = longest = 0
    for turns in range(TURNS):
        response = client.post("/v1/messages", json=request(turns))
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        longest = usage["input_tokens"] + usage["cache_read_input_tokens"]
        prompts, cached = prompts + longest, cached + usage["cache_read_input_tokens"]
    assert longest > TOKENS
    assert cached / prompts >= 0.95
