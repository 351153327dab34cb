"""The built-in GGUF files' tokenizers against llama.cpp's own answers, kept in llama_cpp_tokens.json.

They came from `/tokenize` of llama.cpp's server (xllamacpp 2026.10.11549), with `add_special` false and `parse_special`
true: runs of spaces, newlines and tabs around the longest token of each, HTML tags, literal ▁, control characters,
several scripts, and mixtures on which the two once differed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.text.tokenizer import load_tokenizer
from tests.weights.models import real_model

CASES = json.loads(Path(__file__).with_name("llama_cpp_tokens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("model", ["gemma3-270m", "smollm2-135m"])
def test_tokens_are_those_of_llama_cpp(model: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(real_model(model), cache_dir=tmp_path)
    differing = [
        case["text"] for case in CASES if list(tokenizer.encode(case["text"], add_special_tokens=False)) != case[model]
    ]
    assert len(CASES) > 100 and differing == []
