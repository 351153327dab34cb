"""Drafts of the module that a checkpoint has for them: they are as defined, and the answers those without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, ConfigError, EngineConfig, cpu_kernels
from jaxllm.config.parts import MTP_NAMES
from jaxllm.engine.start.blueprint import plan_engine
from tests.models.mtp_module import module_hidden, mtp_config, mtp_weights, write_mtp_checkpoint
from tests.reference.tiny import write_checkpoint
from tests.support.module_drafts import SCHEDULES, Oracle, captured, check_answers, check_bits, check_definition
from tests.support.sizes import FIELDS
from tests.test_drafts_on_states import check_preempted

MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}
MODELS = ("qwen3_5", "qwen3_next", "deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(name, tmp_path_factory) -> str:
    return str(write_mtp_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def plain(directory) -> Iterator[LLM]:
    with LLM(directory, **FIELDS, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(directory) -> Iterator[LLM]:
    with LLM(directory, **FIELDS, speculative_config=MTP) as llm:
        yield llm


def test_answers_are_those_without_drafts_whatever_a_request_asks_for(plain, drafting):
    check_answers(plain, drafting, alone=3)


def test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts(directory, plain):
    check_preempted(directory, MTP, plain)


class Definition:
    """The module of a tiny checkpoint."""

    def __init__(self, name: str):
        self.weights, self.config = mtp_weights(name), mtp_config(name)

    def state(self, embeddings: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        return module_hidden(self.weights, self.config, embeddings, hidden)

    def scores(self, state: np.ndarray) -> np.ndarray:
        return state @ self.weights["lm_head.weight"].astype(np.float64).T


@pytest.mark.parametrize("differently", SCHEDULES)
def test_drafts_are_those_of_the_definition(name, directory, plain, differently, monkeypatch):
    def oracle_of(text: list[int]) -> Oracle:
        module = Definition(name)
        (hidden,) = captured(plain, text, {"final": True})
        return Oracle(module, text, hidden, module.weights["model.embed_tokens.weight"].astype(np.float64))

    check_definition(directory, MTP, differently, oracle_of, monkeypatch)


@pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")
def test_at_the_default_dtype_too_no_bit_of_an_answer_changes(tmp_path):
    check_bits(str(write_mtp_checkpoint("qwen3_5", tmp_path)), MTP)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("qwen3_5", "mtp.fc.weight"), ("deepseek_v3", "model.layers.3.eh_proj.weight")],
)
def test_a_checkpoint_without_the_module_is_refused_in_one_line(name, tensor, tmp_path):
    directory = str(write_checkpoint(name, tmp_path))
    with pytest.raises(ConfigError, match=rf"method is 'mtp': .* has no tensor '{re.escape(tensor)}'") as error:
        plan_engine(EngineConfig(model=directory, speculative_config=MTP))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", MTP_NAMES)
def test_vllms_names_mean_the_same(method):
    config = EngineConfig(model="x", speculative_config={"method": method, "num_speculative_tokens": 2})
    assert config.speculative_config is not None and config.speculative_config.source == "mtp"
