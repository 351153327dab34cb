"""Drafts of the module that a checkpoint has for them: they are as defined, and the answers those without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, ConfigError, EngineConfig, SamplingParams, cpu_kernels
from jaxllm.engine.core import EngineCore
from jaxllm.engine.draft_depth import DraftRecord
from jaxllm.engine.start.plan import plan_engine
from jaxllm.speculative_config import MTP_NAMES
from tests.models.mtp_module import module_hidden, mtp_config, mtp_weights, write_mtp_checkpoint
from tests.reference.tiny import write_checkpoint
from tests.sizes import FIELDS, few_pages
from tests.test_drafts import FEW, assert_equal, told
from tests.test_drafts_on_states import requests_of

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
    prompts, params = requests_of(8, 7)
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    for _ in range(2):  # the second time a prompt goes on from a state that was kept
        assert_equal(told(drafting.generate(prompts, params, use_tqdm=False)), expected)
    alone = [told(drafting.generate([p], q, use_tqdm=False))[0] for p, q in zip(prompts[:3], params, strict=False)]
    assert_equal(alone, expected[:3])
    stats = drafting.stats()
    assert 0 < sum(stats.accepted_by_position) < stats.num_draft_tokens


def test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts(directory, plain):
    prompts = [np.random.default_rng(i).choice(FEW, 3 + i).tolist() for i in range(12)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, allowed_token_ids=FEW) for i in range(12)]
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    with few_pages(20), LLM(directory, **FIELDS, speculative_config=MTP) as llm:
        for _ in range(2):
            assert_equal(told(llm.generate(prompts, params, use_tqdm=False)), expected)
        assert llm.stats().num_preemptions > 0 < sum(llm.stats().accepted_by_position)


class Oracle:
    """What the module would draft of a text, by its definition, from hidden states that the engine captures."""

    def __init__(self, name: str, llm: LLM, text: list[int]):
        self.weights, self.config, self.text = mtp_weights(name), mtp_config(name), text
        one = SamplingParams(temperature=0, max_tokens=1)
        (output,) = llm.generate([text], one, use_tqdm=False, capture={"final": True}, positions="prompt")
        (final,) = output.outputs[0].captures["final"].values()
        self.hidden = np.asarray(final, np.float64)
        self.table = self.weights["model.embed_tokens.weight"].astype(np.float64)

    def drafts(self, last: int, count: int) -> list[int]:
        """`count` tokens after the one at place `last` of the text, greedy and among FEW."""
        hidden, tokens = self.hidden[:last], self.text[1 : last + 1]
        found: list[int] = []
        for _ in range(count):
            state = module_hidden(self.weights, self.config, self.table[tokens], hidden)[-1:]
            scores = state[0] @ self.weights["lm_head.weight"][FEW].astype(np.float64).T
            found.append(FEW[int(scores.argmax())])
            hidden, tokens = np.concatenate([hidden, state]), [*tokens, found[-1]]
        return found


@pytest.mark.parametrize(
    "differently", [{}, {"max_num_batched_tokens": 16, "prefill_buckets": (16,)}, {"decode_steps": 3}]
)
def test_drafts_are_those_of_the_definition(name, directory, plain, differently, monkeypatch):
    """By what each step took of them: tries follow each other but for pauses, in prompts whole and in chunks."""
    steps: list[tuple[int, int, list[int]]] = []
    settle = EngineCore._settle

    def noted(core: EngineCore, result: Any) -> None:
        steps.append((len(result.request.token_ids), result.num_drafted, list(result.tokens)))
        settle(core, result)

    monkeypatch.setattr(EngineCore, "_settle", noted)
    if not differently:
        monkeypatch.setattr(DraftRecord, "depth", lambda record, most: most)
    prompt = np.random.default_rng(4).choice([*FEW, 8, 9], 37).tolist()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=FEW)
    with LLM(directory, **FIELDS | differently, speculative_config=MTP) as llm:
        for _ in range(2):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
    text = prompt + output.outputs[0].token_ids
    oracle, tried, taken = Oracle(name, plain, text), 0, 0
    for known, num_drafted, tokens in steps:
        if num_drafted:
            drafts, right = oracle.drafts(known - 1, num_drafted), text[known : known + num_drafted]
            agreed = next((i for i, (a, b) in enumerate(zip(drafts, right, strict=False)) if a != b), len(right))
            assert len(tokens) - 1 == min(agreed, num_drafted), f"at token {known}"
            tried, taken = tried + num_drafted, taken + len(tokens) - 1
    assert tried > 30 and 0 < taken < tried


@pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")
def test_at_the_default_dtype_too_no_bit_of_an_answer_changes(tmp_path):
    directory = str(write_mtp_checkpoint("qwen3_5", tmp_path))
    prompts = [[8, 9, 5, 7] * length for length in (1, 4, 9)]
    params = SamplingParams(temperature=1, seed=4, max_tokens=30, ignore_eos=True, allowed_token_ids=FEW, logprobs=2)
    fields = FIELDS | {"dtype": "bfloat16", "decode_buckets": (4,)}
    with LLM(directory, **fields, decode_steps=1) as plain, LLM(directory, **fields, speculative_config=MTP) as llm:
        assert told(llm.generate(prompts, params, use_tqdm=False)) == told(
            plain.generate(prompts, params, use_tqdm=False)
        )
        assert 0 < sum(llm.stats().accepted_by_position) < llm.stats().num_draft_tokens


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
