"""Drafts of EAGLE-3 heads: they are as defined, and the answers those without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from jaxllm import LLM, ConfigError, EngineConfig, SamplingParams, cpu_kernels
from jaxllm.engine.core import EngineCore
from jaxllm.engine.draft_depth import DraftRecord
from jaxllm.engine.start.plan import plan_engine
from tests.models.eagle3_head import LAYERS, Definition, agreeing, head_config, head_weights, write_head, write_model
from tests.reference.tiny import write_checkpoint
from tests.sizes import FIELDS, few_pages
from tests.test_drafts import FEW, assert_equal, told
from tests.test_drafts_on_states import requests_of

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
    prompts, params = requests_of(8, 7)
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    for _ in range(2):  # the second time many a prompt's pages are cached
        assert_equal(told(drafting.generate(prompts, params, use_tqdm=False)), expected)
    stats = drafting.stats()
    assert stats.prefix_cache_hits > 0
    assert 0 < sum(stats.accepted_by_position) < stats.num_draft_tokens


def test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts(directory, head, plain):
    prompts = [np.random.default_rng(i).choice(FEW, 3 + i).tolist() for i in range(12)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, allowed_token_ids=FEW) for i in range(12)]
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    with few_pages(20), LLM(directory, **FIELDS, speculative_config=eagle3(head)) as llm:
        for _ in range(2):
            assert_equal(told(llm.generate(prompts, params, use_tqdm=False)), expected)
        assert llm.stats().num_preemptions > 0 < sum(llm.stats().accepted_by_position)


class Oracle:
    """What the head would draft of a text, by its definition, from states that the engine captures."""

    def __init__(self, name: str, llm: LLM, text: list[int]):
        self.head, self.text = Definition(head_weights(name), head_config(name)), text
        one, taps = SamplingParams(temperature=0, max_tokens=1), {"residual_before": list(LAYERS)}
        (output,) = llm.generate([text], one, use_tqdm=False, capture=taps, positions="prompt")
        states = output.outputs[0].captures["residual_before"]
        found = [np.asarray(states[layer], np.float64) for layer in LAYERS]
        self.hidden = self.head.read(np.concatenate(found, axis=-1))
        self.table = agreeing(name)["model.embed_tokens.weight"].astype(np.float64)

    def drafts(self, last: int, count: int) -> list[int]:
        """`count` tokens after the one at place `last` of the text, greedy and among FEW."""
        hidden, tokens = self.hidden[:last], self.text[1 : last + 1]
        found: list[int] = []
        for _ in range(count):
            state = self.head.state(self.table[tokens], hidden)[-1:]
            found.append(FEW[int(self.head.scores(state)[0, FEW].argmax())])
            hidden, tokens = np.concatenate([hidden, state]), [*tokens, found[-1]]
        return found


@pytest.mark.parametrize(
    "differently", [{}, {"max_num_batched_tokens": 16, "prefill_buckets": (16,)}, {"decode_steps": 3}]
)
def test_drafts_are_those_of_the_definition(name, directory, head, plain, differently, monkeypatch):
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
    with LLM(directory, **FIELDS | differently, speculative_config=eagle3(head)) as llm:
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
    directory = str(write_model("llama_gqa", tmp_path / "model"))
    config = eagle3(write_head("llama_gqa", tmp_path / "head"))
    prompts = [[8, 9, 5, 7] * length for length in (1, 4, 9)]
    params = SamplingParams(temperature=1, seed=4, max_tokens=30, ignore_eos=True, allowed_token_ids=FEW, logprobs=2)
    fields = FIELDS | {"dtype": "bfloat16", "decode_buckets": (4,)}
    with LLM(directory, **fields, decode_steps=1) as plain, LLM(directory, **fields, speculative_config=config) as llm:
        assert told(llm.generate(prompts, params, use_tqdm=False)) == told(
            plain.generate(prompts, params, use_tqdm=False)
        )
        assert 0 < sum(llm.stats().accepted_by_position) < llm.stats().num_draft_tokens


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
