"""DRY, top-n-sigma, typical sampling and XTC against what llama.cpp documents of them, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from jaxllm.engine.core import sampler
from jaxllm.engine.core.sampler import mask_of, mask_words
from jaxllm.engine.features import chain as chain_module
from jaxllm.engine.features.chain import LONGEST_REPEAT, XTC_STREAM, breaker_mask
from tests.engine.core.test_sampler import make_rows, random_logits

VOCAB, LENGTH, ROWS = 300, 40, 16
NEUTRAL: dict[str, Any] = {
    "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 2**30, "top_n_sigma": 0,
    "top_k": 0, "typical_p": 1, "top_p": 1, "min_p": 0, "xtc_probability": 0, "xtc_threshold": 0.1,
}  # fmt: skip
chain = jax.jit(chain_module.chain)


def run(logits: np.ndarray, history: Any = None, position: Any = 5, breakers: Any = (), used: Any = 1, **p: Any) -> Any:
    """What the samplers make of the logits, with settings for all rows or one each."""
    count = len(logits)
    told = {name: np.broadcast_to(np.asarray(value), count) for name, value in (NEUTRAL | p).items()}
    floats, ints = np.zeros((count, chain_module._FLOATS.size)), np.zeros((count, chain_module._INTS.size))
    for packing, rows in ((chain_module._FLOATS, floats), (chain_module._INTS, ints)):
        for name, field in packing.fields.items():
            rows[:, field.offset] = told[name]
    own = {
        "floats": jnp.asarray(floats, jnp.float32), "ints": jnp.asarray(ints, jnp.int32),
        "breakers": jnp.asarray(np.tile(mask_of(breakers, VOCAB), (count, 1))),
    }  # fmt: skip
    tokens = np.zeros((count, LENGTH), np.int32) if history is None else np.asarray(history, np.int32)
    seeds = np.random.default_rng(1).integers(0, 2**31, (count, 2))
    rows = make_rows(count, position=position, seed=seeds)
    used = jnp.asarray(np.broadcast_to(used, count).astype(bool))
    return np.asarray(chain(logits, used, rows, jnp.asarray(tokens), own))


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def cut(row: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.where(keep, row, -np.inf)


def by_sigma(row: np.ndarray, n: float) -> np.ndarray:
    there = row[np.isfinite(row)]
    return cut(row, row >= row.max() - n * there.std()) if n > 0 else row


def by_typical(row: np.ndarray, p: float) -> np.ndarray:
    probabilities = softmax(row)
    with np.errstate(divide="ignore", invalid="ignore"):
        information = -np.log(probabilities)
        entropy = np.nansum(probabilities * information)
        order = np.argsort(np.abs(information - entropy), kind="stable")
    last = np.argmax(np.cumsum(probabilities[order]) > p)
    keep = np.zeros(len(row), bool)
    keep[order[: last + 1]] = True
    return cut(row, keep) if p < 1 else row


def by_nucleus(row: np.ndarray, p: float) -> np.ndarray:
    order = np.argsort(-row, kind="stable")
    last = np.argmax(np.cumsum(softmax(row)[order]) >= p)
    return cut(row, row >= row[order[last]]) if p < 1 else row


def by_top_k(row: np.ndarray, k: int) -> np.ndarray:
    return cut(row, row >= np.sort(row)[-k]) if k > 0 else row


def by_min_p(row: np.ndarray, p: float) -> np.ndarray:
    return cut(row, row >= row.max() + np.log(p)) if p > 0 else row


def by_xtc(row: np.ndarray, threshold: float) -> np.ndarray:
    above = (softmax(row) >= threshold) & np.isfinite(row)
    return cut(row, ~above | (row <= row[above].min())) if above.any() else row


def dry_penalties(history: list[int], window: int, breakers: set[int], p: dict[str, Any]) -> dict[int, float]:
    """What is taken off which token, of a text as llama.cpp looks at it: from its end, token after token."""
    seen = history[-window:] if window else []
    limit = next((i for i, token in enumerate(reversed(seen)) if token in breakers), len(seen))
    longest: dict[int, int] = {}
    for at in range(len(seen) - 1):
        length = 0
        while length < min(limit, at + 1) and seen[at - length] == seen[len(seen) - 1 - length]:
            length += 1
        longest[seen[at + 1]] = max(longest.get(seen[at + 1], 0), length)
    allowed = p["dry_allowed_length"]
    return {
        token: p["dry_multiplier"] * p["dry_base"] ** (length - allowed)
        for token, length in longest.items()
        if length >= allowed
    }


@pytest.mark.parametrize("breakers", [set(), {3}, {0, 5}])
def test_dry_takes_off_what_a_longer_repeat_costs(breakers):
    """Ragged texts of few tokens, so that they repeat, over windows that cut repeats short."""
    rng, rows = np.random.default_rng(3), 64
    history = rng.integers(0, 3, (rows, LENGTH))
    history[::4] = rng.integers(0, 6, (rows // 4, LENGTH))
    history[1] = 1  # the same token again and again
    position, window = rng.integers(0, LENGTH - 1, rows), rng.choice([0, 1, 5, 12, 2**30], rows)
    p = {
        "dry_multiplier": rng.choice([0.5, 0.8, 2], rows), "dry_base": rng.choice([1, 1.2, 1.75], rows),
        "dry_allowed_length": rng.choice([0, 1, 2, 4], rows),
    }  # fmt: skip
    logits = random_logits(VOCAB, rows=rows)
    out = run(logits, history, position, breakers, dry_penalty_last_n=window, **p)
    expected, changed = logits.astype(np.float64), 0
    for i in range(rows):
        text, settings = history[i, : position[i] + 1].tolist(), {name: value[i] for name, value in p.items()}
        for token, penalty in dry_penalties(text, int(window[i]), breakers, settings).items():
            expected[i, token] -= penalty
            changed += 1
    assert changed > 20
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_dry_counts_repeats_up_to_a_bound_and_takes_off_no_more_than_a_number():
    count = LONGEST_REPEAT * 2
    history = jnp.ones((1, count + 5), jnp.int32)
    none = jnp.zeros((1, mask_words(VOCAB)), jnp.int32)
    last, window = jnp.array([count]), jnp.array([2**30])
    longest = np.asarray(chain_module.repeated(history, last, window, none, VOCAB))
    assert longest[0, 1] == LONGEST_REPEAT and (np.delete(longest[0], 1) == -1).all()
    one = jnp.ones(1)
    out = np.asarray(
        chain_module.dry(jnp.zeros((1, VOCAB)), jnp.asarray(longest), 100 * one, 100 * one, jnp.array([0]))
    )
    assert np.isfinite(out).all() and out[0, 1] < -1e29


@pytest.mark.parametrize("vocab", [5, 300, 5003])
@pytest.mark.parametrize(
    ("name", "values", "oracle"),
    [
        ("top_n_sigma", [0, 0.1, 0.5, 1, 1.5, 2, 3, 100], by_sigma),
        ("typical_p", [0, 0.1, 0.2, 0.5, 0.9, 0.95, 0.999, 1], by_typical),
    ],
)
def test_each_keeps_the_tokens_that_it_is_defined_to_keep(vocab, name, values, oracle):
    logits = random_logits(vocab, rows=16)
    logits[8:, ::3] = -np.inf  # what a mask leaves
    logits[15, 1:] = -np.inf
    logits[15, 0] = 2.0
    values = np.tile(values, 2)
    out = run(logits, **{name: values})
    for i, value in enumerate(values):
        np.testing.assert_array_equal(out[i], oracle(logits[i].astype(np.float64), value).astype(np.float32))


@pytest.mark.parametrize("threshold", [0, 0.001, 0.02, 0.1, 0.3, 0.5, 0.9])
def test_xtc_excludes_all_likely_tokens_but_the_last(threshold):
    logits = random_logits(VOCAB, spread=3.0)
    logits[4:8, ::2] = -np.inf
    logits[8, :] = 1.0  # as likely as each other: none is more likely than the last
    logits[9, 1:] = -np.inf
    out = run(logits, xtc_probability=1, xtc_threshold=threshold)
    for i, row in enumerate(logits):
        np.testing.assert_array_equal(out[i], by_xtc(row.astype(np.float64), threshold).astype(np.float32))
        assert np.isfinite(out[i]).any()


def test_xtc_befalls_as_many_tokens_as_it_should_whatever_is_drawn():
    count = 4000
    seeds = np.tile(np.random.default_rng(5).integers(0, 2**31, (1, 2)), (count, 1)).astype(np.int32)
    at = jnp.arange(count)
    excluded = np.asarray(sampler.uniform(jnp.asarray(seeds ^ XTC_STREAM), at))
    drawn = np.asarray(sampler.uniform(jnp.asarray(seeds), at))
    assert abs((excluded < 0.3).mean() - 0.3) < 0.03
    assert abs(np.corrcoef(excluded, drawn)[0, 1]) < 0.05
    logits = np.tile(random_logits(VOCAB, spread=3.0, rows=1), (200, 1))
    off, on = (run(logits, position=np.arange(200), xtc_probability=p, xtc_threshold=0.05) for p in (0, 0.5))
    np.testing.assert_array_equal(off, logits)
    assert 60 < (on != logits).any(1).sum() < 140


def test_they_come_in_the_order_of_llama_cpp():
    rng = np.random.default_rng(8)
    logits = random_logits(VOCAB, spread=3.0)
    p = {
        "top_n_sigma": rng.choice([0, 1.5, 3], ROWS), "top_k": rng.choice([0, 5, 40, 200], ROWS),
        "typical_p": rng.choice([0.3, 0.8, 1], ROWS), "top_p": rng.choice([0.5, 0.9, 1], ROWS),
        "min_p": rng.choice([0, 0.01, 0.2], ROWS), "xtc_threshold": rng.choice([0.05, 0.2], ROWS),
        "xtc_probability": rng.choice([0, 1], ROWS),
    }  # fmt: skip
    out = run(logits, **p)
    for i, row in enumerate(logits.astype(np.float64)):
        left = by_top_k(by_sigma(row, p["top_n_sigma"][i]), p["top_k"][i])
        left = by_min_p(by_nucleus(by_typical(left, p["typical_p"][i]), p["top_p"][i]), p["min_p"][i])
        left = by_xtc(left, p["xtc_threshold"][i]) if p["xtc_probability"][i] else left
        np.testing.assert_array_equal(out[i], left.astype(np.float32))


def test_rows_that_ask_for_nothing_stay_as_they_are():
    logits, used = random_logits(VOCAB), np.arange(ROWS) % 2
    p = {"dry_multiplier": 5, "top_n_sigma": 0.5, "top_k": 3, "typical_p": 0.2, "top_p": 0.2, "min_p": 0.5}
    history = np.ones((ROWS, LENGTH), np.int32)
    out = run(logits, history, 9, used=used, **p, xtc_probability=1, dry_penalty_last_n=2**30)
    for i in range(ROWS):
        assert (out[i] == logits[i]).all() == (not used[i])


def test_a_breaker_is_every_token_that_it_stands_in_or_the_last_that_spells_it():
    words = ["a", "\n", "b\n", ":", "##", " End", ":\n\n", "*"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()

    def broken(*breakers: str) -> set[int]:
        bits = np.unpackbits(breaker_mask(tokenizer, breakers, len(words)).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    assert broken("\n") == {1, 2, 6}
    assert broken(":", "*") == {3, 6, 7}
    assert broken() == set()
    assert broken("?!") == {0}, "none has it; it is spelled with the token for what is unknown"
