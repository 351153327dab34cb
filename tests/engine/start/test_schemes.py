"""What `jaxllm plan` says of the ways to keep a model's weights."""

from __future__ import annotations

import math

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.start.schemes import compare_schemes, measure_bandwidth, table_rows
from jaxllm.quantization.schemes import SCHEMES
from tests.reference.tiny import tiny_weights, write_checkpoint

BANDWIDTH = 1e9


def compared(name: str, path, **fields):
    config = EngineConfig(model=str(write_checkpoint(name, path)), dtype="float32", **fields)
    return {scheme.name: scheme for scheme in compare_schemes(config, BANDWIDTH)}


def test_schemes_take_what_their_formats_promise(tmp_path):
    found = compared("llama_mqa_tied", tmp_path)
    assert list(found) == ["float", "stored", *SCHEMES]
    sizes = {name: scheme.weight_bytes for name, scheme in found.items()}
    assert sizes["float"] > sizes["q8_0"] > sizes["q4_0"] and sizes["float"] == sizes["stored"]
    floats = sum(weight.nbytes for weight in tiny_weights("llama_mqa_tied").values())
    assert sizes["float"] == pytest.approx(floats, rel=0.05)  # rows that pad the vocabulary
    for scheme in found.values():
        assert scheme.tokens_per_second == pytest.approx(BANDWIDTH / scheme.bytes_a_token)
        assert scheme.bytes_a_token == scheme.weight_bytes  # the embedding is the head: all is read


def test_an_embedding_and_experts_are_read_in_part(tmp_path):
    float_one = compared("mixtral", tmp_path)["float"]
    weights = tiny_weights("mixtral")
    config_experts = max(int(name.split(".experts.")[1].split(".")[0]) for name in weights if ".experts." in name) + 1
    experts = sum(weight.nbytes for name, weight in weights.items() if ".experts." in name)
    embedding = weights["model.embed_tokens.weight"]
    unread = experts * (config_experts - 2) / config_experts + embedding.nbytes
    assert float_one.weight_bytes - float_one.bytes_a_token == pytest.approx(unread, rel=0.05)


def test_what_does_not_fit_says_why(tmp_path):
    found = compared("llama_gqa", tmp_path, kv_cache_memory=16)
    assert all("holds no page" in scheme.why_not for scheme in found.values())
    rows = table_rows(list(found.values()))
    assert all("holds no page" in row[1] and row[-1] == "–" for row in rows)


def test_bandwidth_is_measured():
    assert 1e8 < measure_bandwidth() < 1e13 and math.isfinite(measure_bandwidth())
