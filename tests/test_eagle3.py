"""Drafts of EAGLE-3 heads: they are as defined, and the answers those without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from jaxllm import LLM, ConfigError, EngineConfig, cpu_kernels
from jaxllm.engine.start.blueprint import plan_engine
from tests.models.eagle3_head import LAYERS, Definition, agreeing, head_config, head_weights, write_head, write_model
from tests.reference.tiny import write_checkpoint
from tests.support.module_drafts import SCHEDULES, Oracle, captured, check_answers, check_bits, check_definition
from tests.support.sizes import FIELDS
from tests.test_drafts_on_states import check_preempted

MODELS = ("llama_gqa", "deepseek_v3")


def eagle3(head: Path | str, tokens: int = 3) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": tokens}


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(name, tmp_path_factory) -> str:
    return str(write_model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def head(name, tmp_path_factory) -> str:
    return str(write_head(name, tmp_path_factory.mktemp(f"{name}-head")))


@pytest.fixture(scope="module")
def plain(directory) -> Iterator[LLM]:
    with LLM(directory, **FIELDS, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(directory, head) -> Iterator[LLM]:
    with LLM(directory, **FIELDS, speculative_config=eagle3(head)) as llm:
        yield llm


def test_answers_are_those_without_drafts_whatever_a_request_asks_for(plain, drafting):
    check_answers(plain, drafting, alone=0)
    assert drafting.stats().prefix_cache_hits > 0


def test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts(directory, head, plain):
    check_preempted(directory, eagle3(head), plain)


@pytest.mark.parametrize("differently", SCHEDULES)
def test_drafts_are_those_of_the_definition(name, directory, head, plain, differently, monkeypatch):
    def oracle_of(text: list[int]) -> Oracle:
        module = Definition(head_weights(name), head_config(name))
        states = captured(plain, text, {"residual_before": list(LAYERS)})
        table = agreeing(name)["model.embed_tokens.weight"].astype(np.float64)
        return Oracle(module, text, module.read(np.concatenate(states, axis=-1)), table)

    check_definition(directory, eagle3(head), differently, oracle_of, monkeypatch)


@pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")
def test_at_the_default_dtype_too_no_bit_of_an_answer_changes(tmp_path):
    head = write_head("llama_gqa", tmp_path / "head")
    check_bits(str(write_model("llama_gqa", tmp_path / "model")), eagle3(head))


def test_the_plan_counts_the_head(tmp_path):
    directory, head = write_model("llama_gqa", tmp_path / "model"), write_head("llama_gqa", tmp_path / "head")
    plans = [
        plan_engine(EngineConfig(model=str(directory), dtype="float32", speculative_config=asked))
        for asked in (None, eagle3(head))
    ]
    weights = {name: weight for name, weight in head_weights("llama_gqa").items() if name != "t2d"}
    rows, size = weights["lm_head.weight"].shape
    padding = (-rows % 128) * size
    assert plans[1].draft_bytes == 4 * (padding + sum(weight.size for weight in weights.values()))
    kept = 2 * 3 * 16 * 4  # keys and values of three heads of 16 channels, in float32
    assert plans[1].kv_bytes_per_token - plans[0].kv_bytes_per_token == kept
    assert plans[1].workspace_bytes > plans[0].workspace_bytes


def test_what_is_no_head_of_the_model_is_refused_in_one_line(tmp_path):
    directory = str(write_checkpoint("llama_gqa", tmp_path / "model"))
    refused = {
        r"architectures is \['LlamaForCausalLM'\]; accepted are LlamaForCausalLMEagle3": directory,
        "a head for a model with states of 56 channels; accepted is 64": write_head("deepseek_v3", tmp_path / "other"),
    }
    for reason, head in refused.items():
        with pytest.raises(ConfigError, match=f"speculative_config.method is 'eagle3': .*{reason}") as error:
            plan_engine(EngineConfig(model=directory, speculative_config=eagle3(head)))
        assert "\n" not in str(error.value)
    head = write_head("llama_gqa", tmp_path / "head")
    with pytest.raises(ConfigError, match=r"an EAGLE-3 head; set speculative_config\.method to 'eagle3'$"):
        plan_engine(EngineConfig(model=directory, speculative_config=eagle3(head) | {"method": None}))
    with pytest.raises(ValidationError, match='method "eagle3" takes the name of a model or a folder'):
        EngineConfig(model="x", speculative_config={"method": "eagle3", "num_speculative_tokens": 2})
