"""Tiny random models of every family against what transformers computes on them, at float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.harness import Chunk, Harness
from tests.reference import TinyGolden, load_golden
from tests.reference.oracle import load_oracle, oracle_logits
from tests.reference.tiny import TINY_MODELS, tiny_weights, write_checkpoint

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=TINY_MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name, tmp_path_factory) -> Harness:
    return Harness(write_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def golden(name) -> TinyGolden:
    return load_golden(name)


def check(logits: np.ndarray, golden: TinyGolden, start: int = 0) -> None:
    expected = golden.logits[start : start + len(logits)]
    assert np.abs(logits - expected).max() <= TOLERANCE


def test_weights_are_those_the_golden_was_made_with(name, golden):
    norm = np.sqrt(sum(np.square(w, dtype=np.float64).sum() for w in tiny_weights(name).values()))
    assert norm == pytest.approx(golden.weights_norm, rel=1e-9)


def test_a_prompt_in_one_chunk(model, golden):
    ids = golden.prompt_token_ids
    (logits,) = model.run([ids], [Chunk(0, 0, len(ids))])
    check(logits, golden)


@pytest.mark.parametrize("ends", [(1,), (8,), (17, 18, 40), (7, 9, 16, 33, 48, 63)], ids=str)
def test_a_prompt_in_ragged_chunks(model, golden, ends):
    ids = golden.prompt_token_ids
    starts, ends = (0, *ends), (*ends, len(ids))
    parts = [model.run([ids], [Chunk(0, a, b)])[0] for a, b in zip(starts, ends, strict=True)]
    check(np.concatenate(parts), golden)


def test_prompts_beside_each_other_at_different_places(model, golden):
    """Three sequences of the same prompt: one decodes, one goes on and one begins, in the same steps."""
    ids = golden.prompt_token_ids
    prompts = [ids, ids, ids]
    check(model.run(prompts, [Chunk(0, 0, 40)])[0], golden)
    check(model.run(prompts, [Chunk(1, 0, 21)])[0], golden)
    for step in range(4):
        at, going_on, begun = 40 + step, 21 + 9 * step, 11 * step
        chunks = [Chunk(0, at, at + 1), Chunk(1, going_on, going_on + 9), Chunk(2, begun, begun + 11)]
        for chunk, logits in zip(chunks, model.run(prompts, chunks), strict=True):
            check(logits, golden, chunk.start)


def test_token_by_token(model, golden):
    ids = golden.prompt_token_ids
    logits = np.stack([model.decode(token, position, length=len(ids)) for position, token in enumerate(ids)])
    check(logits, golden)


def test_greedy_decoding_after_the_prompt(name, model, golden):
    if name == "llama_dynamic_rope_past":
        pytest.skip("its golden rotates all tokens anew at each step; keys in pages keep the rotation they were given")
    ids = golden.prompt_token_ids
    (logits,) = model.run([ids], [Chunk(0, 0, len(ids))])
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < len(golden.greedy_token_ids):
        tokens.append(int(model.decode(tokens[-1], len(ids) + len(tokens) - 1).argmax()))
    assert tokens == golden.greedy_token_ids


def test_llama3_rope_beyond_its_original_length_is_live():
    """The golden's prompt passes the original context, where scaled and unscaled angles differ."""
    assert len(load_golden("llama3_rope").prompt_token_ids) > 64


def test_transformers_agrees_today(name, tmp_path: Path):
    """The goldens are not stale: transformers computes the same logits on the same checkpoint."""
    pytest.importorskip("torch")
    golden = load_golden(name)
    oracle = load_oracle(name, write_checkpoint(name, tmp_path))
    check(oracle_logits(oracle, golden.prompt_token_ids).numpy(), golden)
