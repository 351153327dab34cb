"""Models whose layers keep a state of each sequence: the same tokens however they are batched, cut or resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, EngineConfig, SamplingParams
from jaxllm.engine.start.blueprint import plan_engine
from tests.reference import load_golden
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights, write_checkpoint
from tests.support.sizes import FIELDS

MODELS = ("lfm2", "lfm2_bias", "lfm2_moe", "qwen3_next", "qwen3_5", "mamba2", "falcon_h1")
SLOW = ("lfm2_bias", "lfm2_moe", "qwen3_next")
"""Those whose states are another one's in other layers."""
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MODELS]
)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(name, tmp_path_factory) -> str:
    return str(write_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def llm(checkpoint) -> Iterator[LLM]:
    with LLM(checkpoint, **FIELDS) as llm:
        yield llm


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [choice.token_ids for output in outputs for choice in output.outputs]


def test_a_prefix_hit_continues_as_transformers_does(name, llm):
    """The first time little is cached, if another test came before; then all but the last tokens of the prompt are."""
    golden = load_golden(name)
    prompt = list(golden.prompt_token_ids)
    for cached in (range(57), [56]):
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens in cached
        assert output.outputs[0].token_ids == list(golden.greedy_token_ids)
    (follow_up,) = llm.generate([prompt + list(golden.greedy_token_ids)], GREEDY, use_tqdm=False)
    assert follow_up.num_cached_tokens == 72, "79 of 80 tokens had been run"


def test_every_beginning_of_a_prompt_gives_the_token_that_transformers_gives(name, llm):
    golden = load_golden(name)
    prompt, best = list(golden.prompt_token_ids), golden.logits.argmax(-1).tolist()
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    before = llm.stats().prefix_cache_hits
    for lengths in (range(1, 65), range(64, 0, -1)):
        for length in lengths:
            assert tokens_of(llm, [prompt[:length]], one) == [[best[length - 1]]], f"{length} tokens"
    assert llm.stats().prefix_cache_hits > before


def shared_prompts(count: int, vocab: int = 141) -> list[list[int]]:
    """Prompts that begin like one another, at page boundaries and around them."""
    dice = np.random.default_rng(5)
    stem = dice.integers(3, vocab, 60).tolist()
    cuts = [7, 8, 9, 15, 16, 17, 31, 32, 33, 48]
    return [stem[: cuts[i % len(cuts)]] + dice.integers(3, vocab, dice.integers(1, 30)).tolist() for i in range(count)]


@pytest.mark.parametrize(
    ("model", "differently"),
    [
        ("lfm2", {"max_num_batched_tokens": 16}),
        ("lfm2", {"pages": 20, "max_model_len": 90}),
        ("lfm2", {"state_cache_memory": 0}),
        ("lfm2", {"decode_steps": 4}),
        pytest.param("lfm2", {"block_size": 16}, marks=pytest.mark.slow),
        ("qwen3_5", {"max_num_batched_tokens": 16}),
        ("qwen3_5", {"pages": 20, "max_model_len": 90}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_many_together_give_what_each_gives_alone(tmp_path, model, differently):
    differently = dict(differently)
    checkpoint = str(write_checkpoint(model, tmp_path))
    if pages := differently.pop("pages", 0):
        plan = plan_engine(EngineConfig(model=checkpoint, dtype="float32"))
        states = 6 * plan.state_bytes
        running = (FIELDS["max_num_seqs"] + 1) * plan.state_bytes
        differently["kv_cache_memory"] = running + states + pages * 8 * plan.kv_bytes_per_token
        differently["state_cache_memory"] = states
    prompts = shared_prompts(24)
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=3 + i, ignore_eos=True) for i in range(24)]
    with LLM(checkpoint, **FIELDS, enable_prefix_caching=False) as llm:
        alone = [tokens_of(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    with LLM(checkpoint, **FIELDS | differently) as llm:
        for _ in range(2):
            assert tokens_of(llm, prompts, params) == alone
        stats = llm.stats()
    assert (stats.prefix_cache_hits > 0) == bool(differently.get("state_cache_memory", True))
    assert (stats.num_preemptions > 0) == ("kv_cache_memory" in differently)


def test_choices_share_the_state_of_their_prompt(checkpoint, llm):
    prompt = shared_prompts(1)[0]
    params = SamplingParams(n=5, seed=3, max_tokens=8, ignore_eos=True)
    with LLM(checkpoint, **FIELDS, enable_prefix_caching=False) as uncached:
        expected = tokens_of(uncached, [prompt], params)
    assert len(set(map(tuple, expected))) > 1
    for _ in range(2):
        assert tokens_of(llm, [prompt], params) == expected


@pytest.mark.parametrize("model", ["lfm2", "qwen3_5"])
def test_of_a_chats_first_turn_hardly_anything_is_computed_again(model, tmp_path):
    """Two turns of 2,000 tokens, by the engine's own counters."""
    config = tiny_config(model) | {"max_position_embeddings": 4096}
    checkpoint = str(save_checkpoint(config, tiny_weights(model), tmp_path))
    dice = np.random.default_rng(3)
    question, more = dice.integers(3, 140, 1500).tolist(), dice.integers(3, 140, 320).tolist()
    fields = FIELDS | {"block_size": 16, "max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 2}
    params = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
    with LLM(checkpoint, **fields) as llm:
        (answer,) = tokens_of(llm, [question], params)
        first_turn = len(question) + len(answer)
        before = llm.stats()
        (second,) = llm.generate([question + answer + more], replace(params, max_tokens=1), use_tqdm=False)
        after = llm.stats()
    assert after.prefix_cache_queries - before.prefix_cache_queries == first_turn + len(more) == 2000
    assert after.prefix_cache_hits - before.prefix_cache_hits == second.num_cached_tokens >= 0.95 * first_turn


def convolutions_alone() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A model of three layers, none of which attends: nothing is kept in pages."""
    config = tiny_config("lfm2") | {"num_hidden_layers": 3, "full_attn_idxs": []}
    weights = tiny_weights("lfm2")
    renamed = {name.replace("layers.3.", "layers.2."): w for name, w in weights.items() if ".layers.2." not in name}
    return config, renamed


def next_token(weights: dict[str, np.ndarray], tokens: list[int], layers: int) -> int:
    """What the model says next, in float64."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"model.{name}.weight"]

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(layers):
        layer = f"model.layers.{i}"
        b, c, v = np.split(norm(x, f"layers.{i}.operator_norm") @ w[f"{layer}.conv.in_proj.weight"].T, 3, axis=-1)
        inputs, taps = np.pad(b * v, ((2, 0), (0, 0))), w[f"{layer}.conv.conv.weight"][:, 0]
        convolved = sum(inputs[k : k + len(tokens)] * taps[:, k] for k in range(3))
        x = x + (c * convolved) @ w[f"{layer}.conv.out_proj.weight"].T
        h = norm(x, f"layers.{i}.ffn_norm")
        gate, up = (h @ w[f"{layer}.feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.feed_forward.w2.weight"].T
    return int((norm(x[-1], "embedding_norm") @ w["model.embed_tokens.weight"].T).argmax())


def test_a_model_without_pages_runs_and_shares_prefixes(tmp_path):
    config, weights = convolutions_alone()
    checkpoint = str(save_checkpoint(config, weights, tmp_path))
    prompts = shared_prompts(6)
    with LLM(checkpoint, **FIELDS | {"max_num_batched_tokens": 16}) as llm:
        assert llm.info.num_pages == 8 * 16, "as many as all sequences can use: they take no memory"
        for _ in range(2):
            outputs = tokens_of(llm, prompts, GREEDY)
        assert llm.stats().prefix_cache_hits > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = list(prompt)
        for _ in range(16):
            expected.append(next_token(weights, expected, 3))
        assert output == expected[len(prompt) :]
