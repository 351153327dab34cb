"""Recorded, rendered and bug-report outputs of real models, from canitoolcall's fixtures."""

from __future__ import annotations

import json
import random

import pytest

from jaxllm.chat.conversation import Tool
from jaxllm.chat.formats import detect_formats
from jaxllm.chat.parser import OutputParser
from jaxllm.text.reasoning import opens_reasoning
from tests.serving.parsing.splitting import parse_pieces, parse_whole, seen

fixtures = pytest.importorskip("canitoolcall.fixtures")

# The first that the model's name has; None: a format that we don't read.
FORMATS = {
    "Llama-4": ("llama4_pythonic", "none"),
    "Llama-3": ("llama3_json", "none"),
    "DeepSeek-V3.2": ("deepseek_v32", "think"),
    "DeepSeek-V4.1": ("deepseek_v41", "think"),
    "DeepSeek-V4": ("deepseek_v4", "think"),
    "DeepSeek-V3.1": ("deepseek_v31", "think"),
    "DeepSeek-V3": ("deepseek_v3", "think"),
    "Kimi-K2": ("kimi_k2", "think"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "Kimi": None,
    "gpt-oss": ("harmony", "harmony"),
    "GLM-": ("glm45", "think"),
    "gemma-4": ("gemma4", "gemma4"),
    "Mistral-7B": ("mistral_v3", "none"),
    "Magistral-Small-2506": ("mistral", "think"),
    "Devstral": ("mistral", "none"),
    "istral": ("mistral", "mistral"),
    "Qwen3-Coder": ("qwen3_coder", "none"),
    "Qwen3.": ("qwen3_coder", "think"),
    "Qwen3": ("hermes", "think"),
}
DIFFERENT = {
    "gpt-oss/llamacpp-builtin-python-recipient": "a call of an unknown tool is content, markers and all",
    "kimi/k2i-vllm-noise-between-markers": "markers with anything but calls between them are content",
    "kimi/k2i-vllm-empty-tool-section": "markers with anything but calls between them are content",
    "gemma4/truncated-second-parallel-call": "the call under way when the answer was cut has been streamed",
    "qwen3-hermes/truncated-second-parallel-call": "the call under way when the answer was cut has been streamed",
    "glm/glm47-missing-last-close-arg-value": "a value may hold </tool_call>, so only </arg_value> ends it",
    "mistral/v13think-stop-at-open-marker": "a marker that opens nothing is content",
    "qwen3-xml/q38-truncated-at-tool-call-open": "a marker that opens nothing is content",
}


def _records() -> list[dict]:
    paths = sorted(fixtures.default_fixtures_dir().glob("*/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def _formats(record: dict) -> tuple[str, str] | None:
    return next(names for part, names in FORMATS.items() if part in record["models"][0])


RECORDS = [record for record in _records() if _formats(record)]


def _parser(record: dict) -> OutputParser:
    formats = detect_formats(None, *_formats(record))
    functions = [tool["function"] for tool in record["tools"]]
    tools = [Tool(function["name"], parameters=function.get("parameters")) for function in functions]
    prompt = record.get("generation_prompt")
    if not prompt:  # these templates' default
        prompt = "<|open|>think<|sep|>" if record["models"][0].endswith("Kimi-K3") else ""
        prompt = "<think>" if record["models"][0].endswith(("GLM-4.7", "GLM-5.3", "Kimi-K2.6")) else prompt
    return OutputParser(formats, tools=tools, in_reasoning=opens_reasoning(formats.reasoning, prompt))


def _stripped(text: str | None) -> str | None:
    return (text or "").strip() or None


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["id"])
def test_real_output(record: dict) -> None:
    raw = record["raw_output"]
    whole = seen(parse_whole(_parser(record), raw))
    randomly = random.Random(record["id"])
    cuts = sorted(randomly.randrange(len(raw) + 1) for _ in range(20))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert seen(parse_pieces(_parser(record), raw)) == whole
    assert seen(parse_pieces(_parser(record), pieces)) == whole
    content, reasoning, calls = whole
    if "expected" in record and record["id"] not in DIFFERENT:
        expected = record["expected"]
        assert (_stripped(content), _stripped(reasoning)) == tuple(
            _stripped(expected[part]) for part in ("content", "reasoning_content")
        )
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            (call["name"], call["arguments"]) for call in expected["tool_calls"]
        ]


def test_enough_is_read() -> None:
    assert len(RECORDS) >= 250
    assert set(DIFFERENT) <= {record["id"] for record in RECORDS}
