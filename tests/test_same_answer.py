"""The same request, the same answer, to the bit, at the default dtype on a CPU with the C++ kernels.

Log-probabilities of the two real models, alone and through other schedules. The kernels by themselves are looked at in
`tests/cpu_kernels/test_same_bits.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm import LLM, ConfigError, SamplingParams, cpu_kernels
from jaxllm.engine.core.request import Batch
from jaxllm.engine.core.scheduler import Scheduler
from tests.reference import load_golden
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config, tiny_weights, write_checkpoint
from tests.support.real_models import first_layers

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")

FIELDS: dict[str, Any] = {
    "max_model_len": 1024, "max_num_seqs": 17, "max_num_batched_tokens": 256, "kv_cache_memory": "128MiB",
    "decode_buckets": (1,), "prefill_buckets": (64,), "enforce_eager": True,
}  # fmt: skip

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0, "frequency_penalty": 0.5, "prompt_logprobs": 0},
    {"temperature": 1.5, "min_p": 0.05, "logit_bias": {7: 3.0}},
)
EDGES = (1, 17, 65, 90, 258, 33, 7, 64)
"""Tokens of prompts: about pages, blocks and segments of keys, and chunks."""
CACHED = 8
"""Requests that are asked again before the pages of the first are used by others."""


class Request(NamedTuple):
    prompt: list[int]
    params: SamplingParams


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[dict[int, float] | None] | None


def requests_of(count: int, vocab: int, longest: int = 600, output: int = 12) -> list[Request]:
    dice = np.random.default_rng(17)
    lengths = [*EDGES, *dice.integers(1, longest, max(0, count - len(EDGES))).tolist()][:count]
    return [
        Request(
            dice.integers(3, vocab, min(length, longest)).tolist(),
            SamplingParams(seed=i, max_tokens=output, ignore_eos=True, logprobs=4, **KINDS[i % len(KINDS)]),
        )
        for i, length in enumerate(lengths)
    ]


def answers(llm: LLM, requests: list[Request], together: int) -> list[Answer]:
    """Those of batches of so many."""
    found = []
    for begin in range(0, len(requests), together):
        prompts, params = zip(*requests[begin : begin + together], strict=True)
        found += [answer_of(output) for output in llm.generate(list(prompts), list(params), use_tqdm=False)]
    return found


def answer_of(output: Any) -> Answer:
    def values(entries: Any) -> Any:
        return None if entries is None else [e and {token: x.logprob for token, x in e.items()} for e in entries]

    (choice,) = output.outputs
    return Answer(choice.token_ids, values(choice.logprobs), values(output.prompt_logprobs))


def check(found: list[Answer], alone: list[Answer]) -> None:
    differ = [i for i, (one, other) in enumerate(zip(found, alone, strict=True)) if one != other]
    assert not differ, f"{len(differ)} of {len(alone)} requests differ, the first of them number {differ[0]}"


Schedule = Callable[[Scheduler], Batch]


def in_chunks(size: int) -> Schedule:
    """Steps of at most so many tokens, which no setting allows to be as few."""
    plain = Scheduler.schedule

    def schedule(scheduler: Scheduler, *, admitting: bool) -> Batch:
        before, scheduler.max_num_batched_tokens = scheduler.max_num_batched_tokens, size
        try:
            return plain(scheduler, admitting=admitting)
        finally:
            scheduler.max_num_batched_tokens = before

    return schedule


def preempting() -> Schedule:
    """Every fifth step the newest request loses its pages."""
    plain, steps = Scheduler.schedule, iter(range(10**9))

    def schedule(scheduler: Scheduler, *, admitting: bool) -> Batch:
        if next(steps) % 5 == 4 and scheduler.running:
            scheduler._preempt(scheduler.running[-1])
        return plain(scheduler, admitting=admitting)

    return schedule


class Case(NamedTuple):
    llm: LLM
    """Without a prefix cache, one token a dispatch."""
    other: LLM
    """With one, and four tokens a dispatch."""
    requests: list[Request]
    alone: list[Answer]


def start(model: str, **fields: Any) -> LLM:
    return LLM(model, **FIELDS | fields)


def start_case(model: str, requests: list[Request], **fields: Any) -> Iterator[Case]:
    with (
        start(model, enable_prefix_caching=False, decode_steps=1, **fields) as llm,
        start(model, decode_steps=4, **fields) as other,
    ):
        yield Case(llm, other, requests, answers(llm, requests, 1))


def check_schedules(case: Case, patch: pytest.MonkeyPatch) -> None:
    llm, other, requests, alone = case
    for together in (3, 17):
        check(answers(llm, requests, together), alone)
    with cpu_kernels.forced(threads=3):
        check(answers(llm, requests, 1), alone)
    for size, count, together in ((1, 4, 3), (7, len(requests), 1), (64, len(requests), 1)):
        with patch.context() as changed:
            changed.setattr(Scheduler, "schedule", in_chunks(size))
            check(answers(llm, requests[:count], together), alone[:count])
    with patch.context() as changed:
        changed.setattr(Scheduler, "schedule", preempting())
        before = llm.stats().num_preemptions
        check(answers(llm, requests, 4), alone)
        assert llm.stats().num_preemptions > before
    steps = other.stats().num_steps
    check(answers(other, requests, 1), alone)
    assert other.stats().num_steps - steps < sum(request.params.max_tokens for request in requests)
    hits = other.stats().prefix_cache_hits
    for begin in range(0, len(requests), CACHED):
        few = slice(begin, begin + CACHED)
        for together in (1, 5):
            check(answers(other, requests[few], together), alone[few])
    assert other.stats().prefix_cache_hits > hits


REAL = ("smollm2-135m", "gemma3-270m")
"""Grouped heads; and one head of keys for four of queries, sliding windows, and a vocabulary of 262,144."""


@pytest.mark.parametrize("products", ["int8", "bf16"])
def test_a_few_requests_of_the_first_layers_of_a_real_model(products, tmp_path, monkeypatch):
    if products == "bf16" and not cpu_kernels.rounds_to_bf16(cpu_kernels.isa()):
        pytest.skip(f"{cpu_kernels.isa()} does not multiply bfloat16")
    model = first_layers(REAL[0], 4, tmp_path)
    fields = {"skip_tokenizer_init": True, "cpu_products": products}
    for case in start_case(model, requests_of(len(EDGES), vocab=20_000), **fields):
        check_schedules(case, monkeypatch)
    with start(model, skip_tokenizer_init=True) as default:
        assert (answers(default, case.requests[:1], 1) == case.alone[:1]) == (products == "int8")


def test_products_of_bfloat16_are_refused_where_there_are_none(tmp_path):
    model, fields = qwen3_5(tmp_path), {"skip_tokenizer_init": True, "cpu_products": "bf16"}
    with cpu_kernels.forced("portable"), pytest.raises(ConfigError, match="portable has no instructions for it"):
        start(model, **fields)
    with pytest.raises(ConfigError, match=r"no C\+\+ kernels run here; accepted is 'int8'"):
        start(model, cpu_kernels="off", **fields)


@pytest.mark.slow
@pytest.mark.parametrize("model", REAL)
def test_a_few_requests_of_a_real_model(model, monkeypatch):
    for case in start_case(model, requests_of(len(EDGES), vocab=20_000)):
        check_schedules(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("model", REAL)
def test_two_hundred_requests_of_a_real_model(model, monkeypatch):
    for case in start_case(model, requests_of(200, vocab=20_000, output=20), prefill_buckets=(16, 64)):
        check_schedules(case, monkeypatch)


def lfm2(directory: Path) -> str:
    """The tiny one, widened with zeros so that all of its weights fit into tiles."""
    config = tiny_config("lfm2") | {"vocab_size": 144, "block_multiple_of": 32}
    weights = tiny_weights("lfm2")
    for name, weight in weights.items():
        weights[name] = np.pad(weight, [(0, {141: 3, 88: 8}.get(n, 0)) for n in weight.shape])
    return str(save_checkpoint(config, weights, directory))


def with_sizes(name: str, sizes: dict[int, int], directory: Path, **changes: Any) -> str:
    """A tiny model with other sizes, so that all of its weights fit into tiles."""
    config = {k: sizes.get(v, v) if type(v) is int else v for k, v in tiny_config(name).items()} | changes
    shapes = {
        tensor: tuple(sizes.get(n, n) for n in shape) for tensor, shape in load_golden(name).tensor_shapes.items()
    }
    return str(save_checkpoint(config, draw_weights(name, shapes), directory))


def granite4(directory: Path) -> str:
    """Three layers with states of 16 heads, one that attends, and MLPs."""
    sizes = {72: 96, 36: 48, 151: 160, 12: 16, 144: 192, 10: 16, 164: 224, 320: 432}
    return with_sizes("granite4", sizes, directory, mamba_d_head="auto")


def qwen3_5(directory: Path) -> str:
    return str(write_checkpoint("qwen3_5", directory))


@pytest.mark.parametrize("make", [lfm2, qwen3_5, granite4])
def test_layers_with_a_state(make, tmp_path, monkeypatch):
    fields = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 128}
    for case in start_case(make(tmp_path), requests_of(len(EDGES), vocab=140, longest=110), **fields):
        check_schedules(case, monkeypatch)


@pytest.mark.parametrize("make", [lfm2, qwen3_5, granite4])
def test_drafts_change_no_bit_of_layers_with_a_state(make, tmp_path):
    """With three tokens to choose from texts repeat themselves, so that many drafts are right, and many are not."""
    model, dice = make(tmp_path), np.random.default_rng(3)
    requests = [
        Request(dice.integers(3, 140, length).tolist() * 3, replace(request.params, allowed_token_ids=[5, 6, 7]))
        for length, request in zip((2, 5, 9, 17, 30, 11), requests_of(6, 140, output=24), strict=True)
    ]
    fields = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 128}
    drafts = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with (
        start(model, enable_prefix_caching=False, decode_steps=1, **fields) as llm,
        start(model, speculative_config=drafts, **fields) as other,
    ):
        alone = answers(llm, requests, 1)
        for together in (1, 1, 5):
            check(answers(other, requests, together), alone)
        assert 0 < sum(other.stats().accepted_by_position) < other.stats().num_draft_tokens


OF_TILES = {
    "olmo2": {72: 64, 92: 96, 36: 32, 143: 144},
    "hunyuan": {72: 64, 120: 192, 60: 96, 20: 32, 163: 160},
    "granite": {72: 96, 36: 48, 153: 160},
    "cohere": {72: 96, 36: 48, 102: 96, 149: 160},
}
"""Tiny models, and what sizes of theirs become, so that all of their weights fit into tiles."""


@pytest.mark.parametrize("name", ["olmo2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*OF_TILES][1:])])
def test_norms_and_factors_in_other_places(name, tmp_path, monkeypatch):
    model = with_sizes(name, OF_TILES[name], tmp_path)
    fields = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 128}
    for case in start_case(model, requests_of(len(EDGES), vocab=140, longest=110), **fields):
        check_schedules(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("source", [{"prompt_lookup_min": 1, "prompt_lookup_max": 3}, {"model": REAL[0]}])
def test_drafts_change_no_bit(source):
    """Texts that repeat themselves, so that many drafts are right, and many are not."""
    dice = np.random.default_rng(3)
    repeated = [dice.integers(3, 20_000, length).tolist() * 3 for length in (2, 5, 9, 30, 64, 17, 11, 80)]
    requests = [
        Request(prompt, request.params)
        for prompt, request in zip(repeated, requests_of(len(repeated), 20_000, output=24), strict=True)
    ]
    drafts = {"num_speculative_tokens": 3} | source
    with (
        start(REAL[0], enable_prefix_caching=False, decode_steps=1) as llm,
        start(REAL[0], speculative_config=drafts) as other,
    ):
        alone = answers(llm, requests, 1)
        for together in (1, 1, 5):
            check(answers(other, requests, together), alone)
        accepted = sum(other.stats().accepted_by_position)
        drafted = other.stats().num_draft_tokens
        assert accepted == drafted > 0 if "model" in source else 0 < accepted < drafted
