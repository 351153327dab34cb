"""The sampler against oracles that sort the whole vocabulary in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.core import sampler
from jaxllm.engine.core.sampler import SamplingRows, apply_mask

# Fewer than the tokens found exactly, few enough to look through, and many, in groups, the last of them not full.
VOCABS = (5, 1000, 5003)
ROWS = 16

truncate, top_tokens, draw = (
    jax.jit(sampler.truncate),
    jax.jit(sampler.top_tokens, static_argnums=1),
    jax.jit(sampler.draw),
)
uniform, token_logprobs = jax.jit(sampler.uniform), jax.jit(sampler.token_logprobs)
sample = jax.jit(lambda logits, rows: sampler.sample(logits, logits, rows))


def random_logits(vocab: int, *, spread: float = 2.0, seed: int = 0, rows: int = ROWS) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * spread).astype(np.float32)


def kept_by(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens stay: min_p, then top_k, then top_p of what is left; ties with the last one kept stay."""
    row = row.astype(np.float64)
    weights = np.exp(row - row.max())
    keep = weights >= min_p * weights.max()
    if 0 < top_k < len(row):
        keep &= row >= np.sort(np.where(keep, row, -np.inf))[-top_k]
    if top_p < 1:
        order = np.argsort(-np.where(keep, row, -np.inf), kind="stable")
        mass = np.cumsum(np.where(keep, weights, 0)[order])
        last = min(np.searchsorted(mass, top_p * mass[-1]), len(row) - 1)
        keep &= row >= row[order[last]]
    return keep & np.isfinite(row)


def check_truncate(logits: np.ndarray, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0) -> np.ndarray:
    """Settings are one for all rows or one each; what float32 cannot tell apart may fall on either side."""
    count = len(logits)
    ks, ps, ms = (np.broadcast_to(np.asarray(x, t), count) for x, t in ((top_k, "i4"), (top_p, "f4"), (min_p, "f4")))
    out = np.asarray(truncate(logits, jnp.asarray(ks), jnp.asarray(ps), jnp.asarray(ms)))
    kept = np.isfinite(out)
    np.testing.assert_array_equal(out[kept], logits[kept])
    for i in range(count):
        k, p, m = int(ks[i]), float(ps[i]), float(ms[i])
        slack = 1e-5
        least = kept_by(logits[i], k, p * (1 - slack) if p < 1 else p, m * (1 + slack))
        most = kept_by(logits[i], k, min(p * (1 + slack), 1.0) if p < 1 else p, m * (1 - slack))
        assert not (least & ~kept[i]).any(), f"row {i}: top_k={k} top_p={p} min_p={m} dropped too much"
        assert not (kept[i] & ~most).any(), f"row {i}: top_k={k} top_p={p} min_p={m} kept too much"
    return kept


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.3, 4.0], ids=["flat", "peaked"])
class TestTruncate:
    """A flat distribution's nucleus is wider than the tokens found exactly, so the threshold is searched bit by bit."""

    def test_top_k(self, vocab, spread):
        k = [0, 1, 2, 3, 20, 63, 64, 65, 100, 500, 999, 1000, 1001, 5002, 5003, 6000]
        kept = check_truncate(random_logits(vocab, spread=spread), top_k=k)
        assert kept.sum(1).tolist() == [min(n, vocab) if n else vocab for n in k]

    def test_top_p(self, vocab, spread):
        check_truncate(random_logits(vocab, spread=spread), top_p=np.linspace(0.01, 1.0, ROWS))

    def test_min_p(self, vocab, spread):
        check_truncate(random_logits(vocab, spread=spread), min_p=np.linspace(0.0, 1.0, ROWS))

    def test_all_together(self, vocab, spread):
        rng = np.random.default_rng(1)
        check_truncate(
            random_logits(vocab, spread=spread),
            top_k=rng.choice([0, 1, 5, 40, 64, 70, 300, vocab], ROWS),
            top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 0.1], ROWS),
            min_p=rng.choice([0.0, 1e-4, 0.02, 0.5], ROWS),
        )

    def test_tokens_at_minus_infinity_never_come_back(self, vocab, spread):
        logits = random_logits(vocab, spread=spread)
        logits[:, 1::2] = -np.inf
        kept = check_truncate(logits, top_k=[0, 3, 64, 2 * vocab] * 4, top_p=[1.0, 1.0, 0.5, 0.99] * 4)
        assert not kept[:, 1::2].any()
        assert kept.any(1).all()


@pytest.mark.parametrize("vocab", [50, 1000, 5003])
def test_tokens_as_likely_as_the_last_one_kept_are_kept(vocab):
    logits = np.round(random_logits(vocab))
    kept = check_truncate(logits, top_k=[1, 5, 30, 64, 65, 200, 0, 0] * 2, top_p=[1.0] * 8 + [0.5] * 8)
    for row, keep in zip(logits, kept, strict=True):
        assert keep.sum() == (row >= row[keep].min()).sum()


def test_all_tokens_equally_likely_are_all_kept():
    kept = check_truncate(np.zeros((ROWS, 1000), np.float32), top_k=5, top_p=0.5, min_p=0.9)
    assert kept.all()


@pytest.mark.parametrize("scale", [1e-30, 1e30], ids=["tiny", "huge"])
def test_thresholds_are_found_among_floats_of_any_size(scale):
    rng = np.random.default_rng(3)
    logits = (rng.choice([-1, 1], (ROWS, 1000)) * np.exp(rng.normal(size=(ROWS, 1000))) * scale).astype(np.float32)
    assert check_truncate(logits, top_k=200).sum(1).tolist() == [200] * ROWS


@pytest.mark.parametrize("vocab", [5, 1000, 4096, 4097, 5003])
@pytest.mark.parametrize("count", [1, 20, 64])
@pytest.mark.parametrize("ties", [False, True])
def test_top_tokens_are_those_of_a_full_sort(vocab, count, ties):
    logits = random_logits(vocab, seed=vocab)
    logits = np.round(logits) + 0.0 if ties else logits  # a sort may tell -0.0 from 0.0
    logits[0, : vocab // 2] = -np.inf
    values, ids = top_tokens(logits, count)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, 1))
    np.testing.assert_array_equal(np.take_along_axis(logits, np.asarray(ids), 1), values)
    possible = np.isfinite(values)
    np.testing.assert_array_equal(np.asarray(ids)[possible], order[possible])


@pytest.mark.parametrize("vocab", VOCABS)
def test_draw_inverts_the_cumulative_distribution(vocab):
    rows = 512
    logits = random_logits(vocab, rows=rows)
    logits[:, ::3] = -np.inf
    u = np.linspace(0, 1 - 2**-24, rows, dtype=np.float32)
    tokens = np.asarray(draw(logits, u))
    weights = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    ends = np.cumsum(weights / weights.sum(1, keepdims=True), axis=1)
    row = np.arange(rows)
    assert (weights[row, tokens] > 0).all()
    assert (ends[row, tokens] > u - 1e-5).all()
    assert (np.where(tokens > 0, ends[row, tokens - 1], 0) <= u + 1e-5).all()


def test_draw_never_takes_an_impossible_token():
    """Running sums are rounded; where `u` falls on the edge between two blocks, those of no probability stay out."""
    rng = np.random.default_rng(5)
    rows, blocks = 64, 700
    sparse = np.where(rng.random((rows, blocks, 1)) < 0.5, rng.normal(size=(rows, blocks, sampler.DRAW_BLOCK)), -np.inf)
    logits = sparse.reshape(rows, -1).astype(np.float32)
    ends = np.asarray(jax.jit(lambda x: jnp.cumsum(jnp.exp(x).reshape(rows, blocks, -1).sum(-1), axis=1))(logits))
    for step in range(8):
        edges = ends[np.arange(rows), rng.integers(0, blocks, rows)] / ends[:, -1]
        u = np.clip(edges + (step % 3 - 1) * np.spacing(edges), 0, 1 - 2**-24).astype(np.float32)
        tokens = np.asarray(draw(logits, u))
        assert np.isfinite(logits[np.arange(rows), tokens]).all()


def test_draws_follow_the_distribution():
    vocab, rows, draws = 40, 4096, 5
    logits = random_logits(vocab, rows=1, spread=1.0)
    seeds = np.stack([np.arange(rows), np.full(rows, 7)], 1).astype(np.int32)
    counts = np.zeros(vocab)
    for position in range(draws):
        u = uniform(seeds, np.full(rows, position, np.int32))
        tokens = np.asarray(draw(np.broadcast_to(logits, (rows, vocab)), u))
        counts += np.bincount(tokens, minlength=vocab)
    expected = np.exp(logits[0].astype(np.float64))
    expected *= rows * draws / expected.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 75  # 39 degrees of freedom: exceeded by one in two thousand, and the seeds are fixed


def test_uniform_depends_on_seed_and_position_alone():
    seeds = np.array([[1, 0], [2, 0], [1, 0], [1, 5], [-1, -1]], np.int32)
    positions = np.array([3, 3, 4, 3, 3], np.int32)
    u = np.asarray(uniform(seeds, positions))
    assert ((u >= 0) & (u < 1)).all()
    assert len(set(u.tolist())) == 5
    order = np.array([4, 2, 0])
    np.testing.assert_array_equal(uniform(seeds[order], positions[order]), u[order])


VOCAB = 300


def make_rows(count: int, **values: Any) -> SamplingRows:
    """Rows that ask for nothing but what `values` says, each in a slot of its own."""
    neutral: dict[str, Any] = dict.fromkeys(SamplingRows._fields, 0)
    neutral |= {"top_p": 1.0, "slot": np.arange(count), "seed": np.zeros((count, 2)), "position": 5, "asked_ids": -1}
    floats = ("temperature", "top_p", "min_p")
    arrays = {}
    for name, value in (neutral | values).items():
        shape = (count, *{"seed": (2,), "asked_ids": (20,)}.get(name, ()))
        arrays[name] = jnp.asarray(np.broadcast_to(np.asarray(value, "f4" if name in floats else "i4"), shape))
    return SamplingRows(**arrays)


def bitmask(rows: np.ndarray) -> np.ndarray:
    """Booleans [R, V] -> int32 [R, V/32], lowest bit first."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def test_a_mask_settles_what_may_be_chosen():
    rng = np.random.default_rng(4)
    mask = rng.random((3, VOCAB)) < 0.02
    mask[:, 7] = True
    logits = random_logits(VOCAB, rows=3)
    rows = make_rows(3, temperature=[0.0, 1.0, 5.0], seed=rng.integers(0, 2**31, (3, 2)))
    tokens, _ = sample(jax.jit(apply_mask)(logits, bitmask(mask)), rows)
    assert mask[np.arange(3), np.asarray(tokens)].all()
    assert tokens[0] == np.argmax(np.where(mask[0], logits[0], -np.inf))


@pytest.mark.parametrize("vocab", [5, 300, 5003])
def test_logprobs_and_ranks_are_of_the_raw_distribution(vocab):
    logits = random_logits(vocab)
    tokens = np.random.default_rng(4).integers(0, vocab, ROWS).astype(np.int32)
    out = token_logprobs(logits, tokens)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    row = np.arange(ROWS)
    np.testing.assert_allclose(out.chosen, exact[row, tokens], atol=2e-5)
    order = np.argsort(-logits, axis=1, kind="stable")
    np.testing.assert_array_equal(out.rank, 1 + np.argmax(order == tokens[:, None], axis=1))
    count = min(vocab, 20)
    np.testing.assert_array_equal(out.top_ids[:, :count], order[:, :count])
    np.testing.assert_allclose(out.top[:, :count], np.take_along_axis(exact, order[:, :count], 1), atol=2e-5)
    assert np.isneginf(out.top[:, count:]).all()


def test_greedy_rows_in_a_mixed_batch_take_the_most_likely_token():
    logits = random_logits(VOCAB, rows=64)
    temperature, top_k = [0, 1, 0, 2, 0, 1, 0, 1] * 8, [5, 3, 0, 0, 0, 9, 0, 0] * 8
    rows = make_rows(64, temperature=temperature, top_k=top_k, logprobs=[0] * 63 + [1])
    tokens, logprobs = sample(logits, rows)
    np.testing.assert_array_equal(np.asarray(tokens)[::2], logits.argmax(1)[::2])
    assert logprobs.chosen[63] < 0


def test_rows_that_ask_for_tokens_get_their_logprobs_and_the_others_the_likeliest():
    logits = random_logits(VOCAB, rows=3)
    asked = np.full((3, 20), -1)
    asked[1, -3:] = [7, 0, VOCAB - 1]
    _, logprobs = sample(logits, make_rows(3, logprobs=1, asked_ids=asked))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    assert logprobs.top_ids[1, -3:].tolist() == [7, 0, VOCAB - 1]
    np.testing.assert_allclose(logprobs.top[1, -3:], exact[1, [7, 0, VOCAB - 1]], atol=2e-5)
    for row, likeliest in ((0, 20), (1, 17), (2, 20)):
        best = np.argsort(-logits[row], kind="stable")[:likeliest]
        np.testing.assert_array_equal(logprobs.top_ids[row, :likeliest], best)


def test_sampled_rows_stay_inside_their_truncation():
    logits = random_logits(VOCAB, rows=64, spread=0.3)
    seeds = np.stack([np.arange(64), np.zeros(64)], 1)
    rows = make_rows(64, temperature=1.5, top_k=np.arange(64) % 4 + 1, seed=seeds)
    tokens, _ = sample(logits, rows)
    order = np.argsort(-logits, axis=1)
    ranks = np.argmax(order == np.asarray(tokens)[:, None], axis=1)
    assert (ranks < np.arange(64) % 4 + 1).all()
    assert len(set(ranks.tolist())) == 4


def test_temperature_divides_the_logits():
    """Against the inverse of the cumulative distribution at the same uniform numbers."""
    logits = random_logits(VOCAB, rows=64)
    seeds = np.stack([np.arange(64), np.zeros(64)], 1).astype(np.int32)
    tokens, _ = sample(logits, make_rows(64, temperature=0.7, seed=seeds))
    weights = np.exp(logits.astype(np.float64) / 0.7)
    ends = np.cumsum(weights / weights.sum(1, keepdims=True), axis=1)
    u = np.asarray(uniform(seeds, np.full(64, 5, np.int32)))
    np.testing.assert_array_equal(tokens, (ends > u[:, None]).argmax(1))


def test_batch_mates_do_not_change_what_is_drawn():
    """The same seed and position draw the same token in batches of other sizes, rows and slots."""
    logits = random_logits(VOCAB, rows=64)
    options = {"temperature": 1.0, "top_k": [0, 7, 0, 90] * 16, "top_p": [1.0, 1.0, 0.8, 0.9] * 16}
    seeds = np.arange(128).reshape(64, 2)
    position = np.arange(64) + 2
    together, _ = sample(logits, make_rows(64, seed=seeds, position=position, **options))
    for i in range(8):
        filler = random_logits(VOCAB, rows=1, seed=i)
        pair = np.concatenate([filler, logits[i : i + 1]])
        mine = {name: value[i] if isinstance(value, list) else value for name, value in options.items()}
        rows = make_rows(2, slot=[1, 0], seed=[[99, 99], seeds[i]], position=[0, position[i]],
                         temperature=1.0, top_k=[0, mine["top_k"]], top_p=[1.0, mine["top_p"]])  # fmt: skip
        alone, _ = sample(pair, rows)
        assert alone[1] == together[i]
