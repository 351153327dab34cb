"""The sampler against oracles that sort the whole vocabulary in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.device import sampler
from jaxllm.engine.device.sampler import SamplingRows
from jaxllm.engine.device.slots import MAX_BLOCKED, Slots, slot_shapes
from jaxllm.engine.masks import mask_words
from jaxllm.requests.sampling import MAX_LOGIT_BIAS
from jaxllm.text.bad_words import MAX_SPELLING_LENGTH, MAX_SPELLINGS

# Fewer than the tokens found exactly, few enough to look through, and many, in groups, the last of them not full.
VOCABS = (5, 1000, 5003)
ROWS = 16

truncate, top_tokens, draw = (
    jax.jit(sampler.truncate),
    jax.jit(sampler.top_tokens, static_argnums=1),
    jax.jit(sampler.draw),
)
uniform, token_logprobs, sample = jax.jit(sampler.uniform), jax.jit(sampler.token_logprobs), jax.jit(sampler.sample)


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


VOCAB, LENGTH = 300, 12


def make_rows(count: int, **values: Any) -> SamplingRows:
    """Rows that ask for nothing but what `values` says, each in a slot of its own."""
    neutral: dict[str, Any] = dict.fromkeys(SamplingRows._fields, 0)
    neutral |= {"top_p": 1.0, "repetition": 1.0, "slot": np.arange(count), "seed": np.zeros((count, 2)), "position": 5}
    neutral |= {"window": 2**30, "asked_ids": -1}
    floats = SamplingRows._fields[SamplingRows._fields.index("temperature") :]
    arrays = {}
    for name, value in (neutral | values).items():
        shape = (count, *{"seed": (2,), "asked_ids": (20,)}.get(name, ()))
        arrays[name] = jnp.asarray(np.broadcast_to(np.asarray(value, "f4" if name in floats else "i4"), shape))
    return SamplingRows(**arrays)


def bitmask(rows: np.ndarray) -> np.ndarray:
    """Booleans [R, V] -> int32 [R, V/32], lowest bit first."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def make_slots(
    count: int,
    history: Any = None,
    bias: list[dict[int, float]] | None = None,
    blocked: list[list[int]] | None = None,
    allowed: np.ndarray | None = None,
    bad_words: list[list[list[int]]] | None = None,
) -> Slots:
    tokens = np.zeros((count + 1, LENGTH), np.int32)
    ids, values = (
        np.full((count + 1, MAX_LOGIT_BIAS), VOCAB, np.int32),
        np.zeros((count + 1, MAX_LOGIT_BIAS), np.float32),
    )
    held = np.full((count + 1, MAX_BLOCKED), VOCAB, np.int32)
    for slot in range(count):
        if history is not None:
            tokens[slot] = history[slot]
        entries = bias[slot] if bias else {}
        ids[slot, : len(entries)], values[slot, : len(entries)] = list(entries), list(entries.values())
        stops = blocked[slot] if blocked else []
        held[slot, : len(stops)] = stops
    bits = np.full((count + 1, mask_words(VOCAB)), -1, np.int32)
    if allowed is not None:
        bits[:count] = bitmask(allowed)
    words = np.full((count + 1, MAX_SPELLINGS, MAX_SPELLING_LENGTH), -1, np.int32)
    words[:, :, -1] = VOCAB
    for slot, spellings in enumerate(bad_words or []):
        for row, spelling in enumerate(spellings):
            words[slot, row, -len(spelling) :] = spelling
    rows = {
        "history": tokens, "bias_ids": ids, "bias_values": values, "blocked_ids": held, "allowed": bits,
        "bad_words": words,
    }  # fmt: skip
    shapes = slot_shapes(count, LENGTH - 1, 1, VOCAB)
    empty = Slots(*(jnp.zeros(a.shape, a.dtype) for a in shapes))
    return empty._replace(**{name: jnp.asarray(a) for name, a in rows.items()})


adjust_logits = jax.jit(sampler.adjust_logits)


def test_penalties_count_prompt_and_output_as_documented():
    rng = np.random.default_rng(2)
    history = rng.integers(0, 8, (4, LENGTH))  # few tokens, so that they repeat
    presence, frequency, repetition = [0.5, -0.3, 0.0, 1.0], [0.0, 0.7, -0.4, 0.2], [1.3, 0.8, 1.0, 2.0]
    position, prompt = [9, 5, 3, 11], [4, 2, 4, 12]
    logits = random_logits(VOCAB, rows=4)
    rows = make_rows(
        4, adjust=1, position=position, prompt_len=prompt, presence=presence, frequency=frequency, repetition=repetition
    )
    expected = logits.astype(np.float64)
    for i in range(4):
        for token in range(VOCAB):
            seen = history[i, : position[i] + 1]
            generated = history[i, prompt[i] : position[i] + 1]
            if token in seen:
                expected[i, token] *= repetition[i] if expected[i, token] < 0 else 1 / repetition[i]
            expected[i, token] -= frequency[i] * np.sum(generated == token) + presence[i] * (token in generated)
    np.testing.assert_allclose(adjust_logits(logits, rows, make_slots(4, history)), expected, rtol=1e-5, atol=1e-5)


def test_penalties_look_no_further_back_than_the_window():
    """As if what lies before the last `window` tokens had never been there, prompt or output."""
    rng = np.random.default_rng(12)
    history = rng.integers(0, 8, (5, LENGTH))
    window, prompt = [0, 1, 3, 6, 2**30], [4, 4, 4, 4, 4]
    logits = random_logits(VOCAB, rows=5)
    asked = {"adjust": 1, "position": 8, "presence": 0.5, "frequency": 0.25, "repetition": 1.5}
    out = np.asarray(
        adjust_logits(logits, make_rows(5, **asked, prompt_len=prompt, window=window), make_slots(5, history))
    )
    for i in range(5):
        first = max(9 - window[i], 0)
        seen, generated = history[i, first:9], history[i, max(first, prompt[i]) : 9]
        for token in range(8):
            x = float(logits[i, token])
            x = (x / 1.5 if x > 0 else x * 1.5) if token in seen else x
            x -= 0.25 * np.sum(generated == token) + 0.5 * (token in generated)
            np.testing.assert_allclose(out[i, token], x, rtol=1e-5, atol=1e-5)


def test_only_allowed_tokens_are_left():
    rng = np.random.default_rng(3)
    allowed = rng.random((4, VOCAB)) < [[0.5], [0.01], [1.0], [0.0]]
    allowed[:, -1] = True
    logits = random_logits(VOCAB, rows=4)
    out = np.asarray(adjust_logits(logits, make_rows(4, adjust=[1, 1, 1, 0]), make_slots(4, allowed=allowed)))
    allowed[3] = True  # it asked for nothing
    np.testing.assert_array_equal(out, np.where(allowed, logits, -np.inf))


def test_a_mask_settles_what_may_be_chosen():
    rng = np.random.default_rng(4)
    mask = rng.random((3, VOCAB)) < 0.02
    mask[:, 7] = True
    logits = random_logits(VOCAB, rows=3)
    rows = make_rows(3, temperature=[0.0, 1.0, 5.0], seed=rng.integers(0, 2**31, (3, 2)))
    tokens, _ = sample(logits, rows, make_slots(3), jnp.asarray(bitmask(mask)))
    assert mask[np.arange(3), np.asarray(tokens)].all()
    assert tokens[0] == np.argmax(np.where(mask[0], logits[0], -np.inf))


def test_the_token_that_would_complete_a_bad_word_is_never_chosen():
    """Words of one token, of several, begun in the prompt (not counted), longer than the output, and begun wrongly."""
    history = np.zeros((6, LENGTH), np.int32)
    history[:, :9] = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    words = [[[5]], [[17, 18, 6], [18, 7]], [[14, 15, 16, 17, 18, 9]], [[13, 14, 15, 16, 17, 18, 9]], [[16, 18, 9]], []]
    banned: list[set[int]] = [{5}, {6, 7}, {9}, set(), set(), set()]
    logits = random_logits(VOCAB, rows=6)
    rows = make_rows(6, adjust=1, position=8, prompt_len=4)
    out = np.asarray(adjust_logits(logits, rows, make_slots(6, history, bad_words=words)))
    for i, tokens in enumerate(banned):
        assert set(np.flatnonzero(np.isneginf(out[i]))) == tokens


def test_logit_bias_is_added_where_asked():
    bias: list[dict[int, float]] = [{0: 5.0, VOCAB - 1: -100.0}, {}, {7: 1.5}]
    logits = random_logits(VOCAB, rows=3)
    out = np.asarray(adjust_logits(logits, make_rows(3, adjust=1), make_slots(3, bias=bias)))
    expected = logits.copy()
    for i, entries in enumerate(bias):
        for token, value in entries.items():
            expected[i, token] += value
    np.testing.assert_array_equal(out, expected)


def test_a_row_that_asks_for_nothing_is_not_adjusted_by_what_its_slot_held_before():
    slots = make_slots(2, bias=[{3: 50.0}, {4: 50.0}], blocked=[[5], [5]])
    logits = random_logits(VOCAB, rows=2)
    out = np.asarray(adjust_logits(logits, make_rows(2, adjust=[0, 1]), slots))
    np.testing.assert_array_equal(out[0], logits[0])
    assert out[1, 4] == logits[1, 4] + 50


def test_min_tokens_blocks_stop_tokens_until_enough_are_there():
    """The token to be sampled lies at position + 1; it is free to stop from `blocked_until` on."""
    slots = make_slots(3, blocked=[[2, 9]] * 3)
    logits = random_logits(VOCAB, rows=3)
    out = np.asarray(adjust_logits(logits, make_rows(3, adjust=1, position=5, blocked_until=[0, 6, 7]), slots))
    np.testing.assert_array_equal(out[:2], logits[:2])
    assert np.isneginf(out[2, [2, 9]]).all() and np.isneginf(out[2]).sum() == 2


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
    tokens, logprobs = sample(
        logits, make_rows(64, temperature=temperature, top_k=top_k, logprobs=[0] * 63 + [1]), make_slots(64)
    )
    np.testing.assert_array_equal(np.asarray(tokens)[::2], logits.argmax(1)[::2])
    assert logprobs.chosen[63] < 0


def test_a_greedy_row_with_a_bias_takes_the_most_likely_token_after_it():
    logits = random_logits(VOCAB, rows=2)
    tokens, logprobs = sample(logits, make_rows(2, adjust=[1, 0], logprobs=1), make_slots(2, bias=[{17: 100.0}, {}]))
    assert tokens.tolist() == [17, logits[1].argmax()]
    assert logprobs.rank[0] > 1, "log-probabilities are those before the bias"
    assert logprobs.rank[1] == 1


def test_rows_that_ask_for_tokens_get_their_logprobs_and_the_others_the_likeliest():
    logits = random_logits(VOCAB, rows=3)
    asked = np.full((3, 20), -1)
    asked[1, -3:] = [7, 0, VOCAB - 1]
    _, logprobs = sample(logits, make_rows(3, logprobs=1, asked_ids=asked), make_slots(3))
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
    tokens, _ = sample(logits, rows, make_slots(64))
    order = np.argsort(-logits, axis=1)
    ranks = np.argmax(order == np.asarray(tokens)[:, None], axis=1)
    assert (ranks < np.arange(64) % 4 + 1).all()
    assert len(set(ranks.tolist())) == 4


def test_temperature_divides_the_logits():
    """Against the inverse of the cumulative distribution at the same uniform numbers."""
    logits = random_logits(VOCAB, rows=64)
    seeds = np.stack([np.arange(64), np.zeros(64)], 1).astype(np.int32)
    tokens, _ = sample(logits, make_rows(64, temperature=0.7, seed=seeds), make_slots(64))
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
    together, _ = sample(logits, make_rows(64, seed=seeds, position=position, **options), make_slots(64))
    for i in range(8):
        filler = random_logits(VOCAB, rows=1, seed=i)
        pair = np.concatenate([filler, logits[i : i + 1]])
        mine = {name: value[i] if isinstance(value, list) else value for name, value in options.items()}
        rows = make_rows(2, slot=[1, 0], seed=[[99, 99], seeds[i]], position=[0, position[i]],
                         temperature=1.0, top_k=[0, mine["top_k"]], top_p=[1.0, mine["top_p"]])  # fmt: skip
        alone, _ = sample(pair, rows, make_slots(2))
        assert alone[1] == together[i]
