"""Drafts of a smaller model: the answers are those without, and what the draft model knows of a text is all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, ConfigError, EngineConfig, LoRARequest, RequestOutput, SamplingParams, Steer
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.errors import ModelNotFoundError
from tests.engine.core.test_device import device_of
from tests.reference.adapters import write_adapter
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS
from tests.test_drafts import FEW, assert_equal, random_params, told

AGREEING = ("llama_gqa", "llama_gqa")
PAIRS = (AGREEING, ("deepseek_v3", "llama_gqa"), ("gemma3_linear_rope", "gpt2"))
"""A model and the one that drafts for it. The first drafts as well as it can be done; the others nearly never do."""
FREE: dict[str, Any] = {"temperature": 1, "ignore_eos": True}


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request, tmp_path_factory) -> tuple[str, str]:
    model, draft = (str(write_checkpoint(name, tmp_path_factory.mktemp(name))) for name in request.param)
    return model, draft


@pytest.fixture(scope="module")
def plain(pair) -> Iterator[LLM]:
    with LLM(pair[0], **FIELDS, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(pair) -> Iterator[LLM]:
    with LLM(pair[0], **FIELDS, speculative_config={"num_speculative_tokens": 3, "model": pair[1]}) as llm:
        yield llm


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(write_checkpoint("llama_gqa", tmp_path_factory.mktemp("llama")))


def test_answers_are_those_without_drafts_whatever_a_request_asks_for(request, plain, drafting):
    dice = np.random.default_rng(3)
    prompts = [dice.choice([*FEW, 8, 9], dice.integers(1, 50)).tolist() for _ in range(16)]
    params = [random_params(dice) for _ in prompts]
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    for _ in range(2):  # the second time many a prompt's pages are cached, the draft model's with them
        assert_equal(told(drafting.generate(prompts, params, use_tqdm=False)), expected)
    alone = [told(drafting.generate([p], q, use_tqdm=False))[0] for p, q in zip(prompts[:4], params, strict=False)]
    assert_equal(alone, expected[:4])
    stats = drafting.stats()
    assert stats.num_drafts > 0
    if request.node.callspec.params["pair"] == AGREEING:
        assert stats.num_draft_tokens > 100
        # A model agrees with itself, unless two tokens are so close that a chunk and a decode round otherwise.
        assert 0.99 * stats.num_draft_tokens <= sum(stats.accepted_by_position)
    else:
        assert sum(stats.accepted_by_position) < stats.num_draft_tokens
    assert (run_by_draft_model(drafting) <= slots_of(drafting).position).all(), "what was refused was never run"


def slots_of(llm: LLM) -> Slots:
    return device_of(llm)._parts["slots"]


def run_by_draft_model(llm: LLM) -> np.ndarray:
    """How many tokens of each slot's sequence."""
    return np.asarray(slots_of(llm).of["drafts"]["drafted"])


def test_a_draft_model_runs_prompts_beside_the_model(drafting):
    """Whole ones, and what the prefix cache leaves of them, so that the first step after them has drafts."""
    prompt = list(range(3, 93))
    for _ in range(2):
        drafting.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        slot = int(np.argmax(np.asarray(slots_of(drafting).position)[:-1] == len(prompt)))
        assert run_by_draft_model(drafting)[slot] == len(prompt)


def test_a_draft_model_catches_up_with_what_was_decoded_without_it(directory):
    """While two requests run nothing is tried ahead: the one that goes on is forty tokens further than its drafts."""
    config = {"num_speculative_tokens": 3, "model": directory, "num_speculative_tokens_per_batch_size": [[2, 8, 0]]}
    params = [SamplingParams(**FREE, seed=length, max_tokens=length) for length in (80, 40)]
    with (
        LLM(directory, **FIELDS, decode_steps=2) as plain,
        LLM(directory, **FIELDS, decode_steps=2, speculative_config=config) as drafting,
    ):
        prompts = [[5, 6], [7]]
        expected = told(plain.generate(prompts, params, use_tqdm=False))
        assert told(drafting.generate(prompts, params, use_tqdm=False)) == expected
        stats = drafting.stats()
    assert sum(stats.accepted_by_position) == stats.num_draft_tokens >= 24


def test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts(directory):
    page = plan_engine(EngineConfig(model=directory, dtype="float32")).kv_bytes_per_token * 8
    dice = np.random.default_rng(2)
    prompts = [dice.choice(FEW, dice.integers(1, 20)).tolist() for _ in range(16)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=48, allowed_token_ids=FEW) for i in range(16)]
    with LLM(directory, **FIELDS) as plain:
        expected = told(plain.generate(prompts, params, use_tqdm=False))
    fields = FIELDS | {"kv_cache_memory": 40 * page, "max_model_len": 80}  # half of each page is the draft model's
    config = {"num_speculative_tokens": 3, "model": directory}
    with LLM(directory, **fields, speculative_config=config) as llm:
        assert_equal(told(llm.generate(prompts, params, use_tqdm=False)), expected)
        stats = llm.stats()
    assert stats.num_preemptions > 0
    # A page that was registered before the draft model had run its tokens brings worse drafts when it is found again.
    assert 0 < 0.8 * stats.num_draft_tokens <= sum(stats.accepted_by_position)


def test_two_devices_share_the_draft_model_as_well(directory, monkeypatch):
    config = {"num_speculative_tokens": 3, "model": directory}
    params = SamplingParams(**FREE, seed=5, max_tokens=24)
    with LLM(directory, **FIELDS) as plain:
        expected = told(plain.generate([[5, 6, 9]], params, use_tqdm=False))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    fields = FIELDS | {"tensor_parallel_size": 2, "engine_process": True}
    with LLM(directory, **fields, speculative_config=config) as llm:
        assert told(llm.generate([[5, 6, 9]], params, use_tqdm=False)) == expected
        stats = llm.stats()
    assert sum(stats.accepted_by_position) == stats.num_draft_tokens > 12


def test_requests_with_adapters_and_steered_ones_have_drafts_of_a_model_without(directory, tmp_path):
    adapter = LoRARequest("one", 1, write_adapter(tmp_path, Path(directory), ["q_proj", "down_proj"]))
    width = json.loads((Path(directory) / "config.json").read_text())["hidden_size"]
    steer = Steer(0, np.random.default_rng(1).standard_normal(width).astype(np.float32), scale=0.5)
    params = [SamplingParams(**FREE, seed=seed, max_tokens=20, allowed_token_ids=FEW) for seed in range(4)]
    asked: dict[str, Any] = {"lora_request": [adapter, None, adapter, None], "steer": [None, steer, steer, None]}
    fields: dict[str, Any] = FIELDS | {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    prompts = [[5, 6], [7], [5, 6], [9, 5]]
    with LLM(directory, **fields) as plain:
        expected = told(plain.generate(prompts, params, use_tqdm=False, **asked))
    assert expected[0] != told(plain_answers(directory, prompts[:1], params[:1]))[0]
    with LLM(directory, **fields, speculative_config={"num_speculative_tokens": 3, "model": directory}) as llm:
        assert_equal(told(llm.generate(prompts, params, use_tqdm=False, **asked)), expected)
        assert sum(llm.stats().accepted_by_position) > 0


def plain_answers(directory: str, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    with LLM(directory, **FIELDS) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def test_the_plan_says_what_a_draft_model_takes(directory):
    alone = plan_engine(EngineConfig(model=directory))
    config = {"num_speculative_tokens": 3, "model": directory}
    plan = plan_engine(EngineConfig(model=directory, speculative_config=config))
    assert plan.draft_bytes == alone.weight_bytes == plan.weight_bytes
    assert plan.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    assert "draft model" in plan.summary()
    assert "draft model" not in alone.summary()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "draft_model"}, "model is missing"),
        ({"model": "x", "method": "ngram"}, 'model means nothing with method "ngram"'),
        ({"model": "x", "prompt_lookup_min": 2}, 'prompt_lookup_min means nothing with method "draft_model"'),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(directory, config, message):
    with pytest.raises(Exception, match=message) as error:
        LLM(directory, **FIELDS, speculative_config={"num_speculative_tokens": 3} | config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "message"), [("lfm2", "keeps a state of each sequence"), ("bert", "is an encoder")])
def test_what_cannot_draft_is_refused(directory, tmp_path, name, message):
    draft = str(write_checkpoint(name, tmp_path))
    config = {"num_speculative_tokens": 3, "model": draft}
    with pytest.raises(ConfigError, match=message):
        plan_engine(EngineConfig(model=directory, speculative_config=config))


def test_a_draft_model_of_another_vocabulary_is_refused():
    config = {"num_speculative_tokens": 3, "model": "gemma3-270m"}
    with pytest.raises(ConfigError, match=r"its token \d+ is .*; a draft model must have the same"):
        LLM("smollm2-135m", **FIELDS | {"skip_tokenizer_init": False}, speculative_config=config)


def test_a_draft_model_that_is_nowhere_is_named_as_one(directory):
    with pytest.raises(ModelNotFoundError, match=r"^speculative_config\.model: model 'nope' is no built-in name"):
        LLM(directory, **FIELDS, speculative_config={"num_speculative_tokens": 3, "model": "nope"})
