"""The promise of batch invariance: a request's tokens depend on nothing but the request.

Tiny random models at float32: alone, among others, chunked anywhere, after a prefix hit, after preemption.
"""

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.reference.tiny import tiny_config, write_checkpoint
from tests.support.sizes import FIELDS, PAGE, few_pages

MODELS = ("llama_gqa", "gemma3_linear_rope", "deepseek_v3")
"""Grouped heads, sliding windows, and a latent."""
OUTPUT = 24
ALONE = {"decode_buckets": (2,), "prefill_buckets": (16,)}
"""Fields for an engine that pads what a request runs alone to less than what several run together."""

SAMPLED = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11,
    "presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {3: 2.0},
}  # fmt: skip


def params(kind: str, **more) -> SamplingParams:
    kinds = {"greedy": {"temperature": 0}, "sampled": SAMPLED, "logprobs": {"temperature": 0, "logprobs": 3}}
    return SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **kinds[kind], **more)


def start(directory, **fields) -> LLM:
    return LLM(str(directory), **FIELDS | fields)


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def directory(name, tmp_path_factory):
    return write_checkpoint(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def plain(directory):
    """An engine with buckets of two sizes, which computes each prompt anew."""
    with start(directory, enable_prefix_caching=False, **ALONE) as llm:
        yield llm


@pytest.fixture(scope="module")
def largest(directory):
    with start(directory) as llm:
        yield llm


@pytest.fixture(scope="module")
def case(name, directory, plain):
    """A checkpoint, prompts of ragged lengths (page boundaries and one token among them), and what each says alone."""
    rng = np.random.default_rng(5)
    vocab = tiny_config(name)["vocab_size"]
    prompts = [rng.integers(0, vocab, n).tolist() for n in (1, 7, 8, 9, 40, 63, 64, 65, 100)]
    alone = {
        kind: [plain.generate([p], params(kind), use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
        for kind in ("greedy", "sampled", "logprobs")
    }
    assert all(len(tokens) == OUTPUT for kind in alone.values() for tokens in kind)
    assert alone["greedy"] != alone["sampled"] and alone["greedy"] == alone["logprobs"]
    return directory, prompts, alone


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_in_a_batch_of_unlike_requests(case, plain):
    _, prompts, alone = case
    kinds = ["greedy", "sampled", "logprobs"]
    mixed = [kinds[i % 3] for i in range(len(prompts))]
    outputs = plain.generate(prompts, [params(kind) for kind in mixed], use_tqdm=False)
    assert tokens(outputs) == [alone[kind][i] for i, kind in enumerate(mixed)]


def test_several_tokens_a_dispatch(case):
    """Requests that end in the middle of one among them: by length, and by a token that stops them."""
    directory, prompts, alone = case
    kinds = ["greedy", "sampled", "logprobs"]
    stop = alone["greedy"][0][9]
    with start(directory, decode_steps=4) as llm:
        outputs = llm.generate(prompts[:8], [params(kinds[i % 3]) for i in range(8)], use_tqdm=False)
        assert llm.stats().num_steps < OUTPUT
        short = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3, 4, 5, 6, 11)]
        cut = llm.generate([prompts[3]] * len(short), short, use_tqdm=False)
        stopped = llm.generate([prompts[0]], params("greedy", stop_token_ids=[stop]), use_tqdm=False)
    assert tokens(outputs) == [alone[kinds[i % 3]][i] for i in range(8)]
    assert tokens(cut) == [alone["greedy"][3][: p.max_tokens] for p in short]
    assert tokens(stopped) == [alone["greedy"][0][: alone["greedy"][0].index(stop) + 1]]
    logprobs = [output.outputs[0].logprobs for output in outputs[2::3]]
    assert all(len(entries) == OUTPUT and all(t in e for t, e in zip(out.outputs[0].token_ids, entries, strict=True))
               for entries, out in zip(logprobs, outputs[2::3], strict=True))  # fmt: skip


@pytest.mark.parametrize("budget", [16, 17, 33])
def test_chunked_at_every_boundary(case, budget):
    directory, prompts, alone = case
    with start(directory, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate(prompts, params("greedy"), use_tqdm=False)
    assert tokens(outputs) == alone["greedy"]


def test_after_a_prefix_hit(case, largest):
    _, prompts, alone = case
    largest.generate(prompts, params("greedy"), use_tqdm=False)
    for kind in ("greedy", "sampled"):
        outputs = largest.generate(prompts, params(kind), use_tqdm=False)
        assert tokens(outputs) == alone[kind]
        cached = [output.num_cached_tokens for output in outputs]
        assert cached == [(len(p) - 1) // 8 * 8 for p in prompts]


def test_choices_of_one_prompt_differ_and_repeat(case, largest):
    _, prompts, alone = case
    many = SamplingParams(n=3, max_tokens=OUTPUT, ignore_eos=True, **SAMPLED)
    first, second = (largest.generate([prompts[4]], many, use_tqdm=False)[0] for _ in range(2))
    texts = [choice.token_ids for choice in first.outputs]
    assert texts == [choice.token_ids for choice in second.outputs]
    assert texts[0] == alone["sampled"][4]
    assert len({tuple(t) for t in texts}) == 3


def test_after_preemption(case):
    directory, prompts, alone = case
    one_context_and_little_more = 128 // PAGE + 5
    with few_pages(one_context_and_little_more), start(directory, enable_prefix_caching=False) as llm:
        for kind in ("greedy", "sampled"):
            outputs = llm.generate(prompts, params(kind), use_tqdm=False)
            assert tokens(outputs) == alone[kind]
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_pages == stats.num_pages
