"""Penalties, biases, tokens held back and bad words, in the logits of the requests that ask for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.feature import TracedStep
from jaxllm.engine.core.keys import SAMPLED
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sampler import SamplingRows, mask_words, sample
from jaxllm.engine.core.slots import Slots, slot_shapes
from jaxllm.engine.features.adjustments import MAX_BLOCKED, AdjustmentsFeature
from jaxllm.requests.sampling import MAX_LOGIT_BIAS
from jaxllm.text.spellings import MAX_SPELLING_LENGTH, MAX_SPELLINGS
from tests.engine.core.test_sampler import VOCAB, bitmask, make_rows, random_logits
from tests.engine.step_sizes import NoModel, step_sizes

LENGTH = 12
FEATURES = Features([AdjustmentsFeature()])
USED = FEATURES[AdjustmentsFeature.name].bit


def make_slots(
    count: int,
    history: Any = None,
    *,
    bias: list[dict[int, float]] | None = None,
    blocked: list[list[int]] | None = None,
    blocked_until: Any = 0,
    allowed: np.ndarray | None = None,
    bad_words: list[list[list[int]]] | None = None,
    window: Any = 2**30,
    penalties: Any = (0, 0, 1),
) -> Slots:
    """Slots of `count` requests, which ask for nothing else; penalties are presence, frequency and repetition."""
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
    until, windows = np.zeros(count + 1, np.int32), np.zeros(count + 1, np.int32)
    rules = np.zeros((count + 1, 3), np.float32)
    until[:count], windows[:count], rules[:count] = blocked_until, window, penalties
    own = {
        "bias_ids": ids, "bias_values": values, "blocked_ids": held, "blocked_until": until[:, None], "allowed": bits,
        "bad_words": words, "window": windows[:, None], "penalties": rules,
    }  # fmt: skip
    sizes = step_sizes(max_num_seqs=count, max_model_len=LENGTH - 1, vocab_size=VOCAB)
    empty: Slots = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), slot_shapes(sizes, FEATURES))
    assert {name: a.shape for name, a in empty.of[AdjustmentsFeature.name].items()} == {
        n: a.shape for n, a in own.items()
    }
    return empty._replace(history=jnp.asarray(tokens), of={AdjustmentsFeature.name: jax.tree.map(jnp.asarray, own)})


@jax.jit
def adjust_logits(logits: jax.Array, rows: SamplingRows, slots: Slots) -> jax.Array:
    """What a step makes of the logits."""
    sizes = step_sizes()
    step = TracedStep("head", SAMPLED, sizes, {}, {"slots": slots}, NoModel(sizes, FEATURES))
    (feature,) = FEATURES.inside("head", SAMPLED)
    return feature.traced(step).logits(logits, rows, slots, {})


def test_penalties_count_prompt_and_output_as_documented():
    rng = np.random.default_rng(2)
    history = rng.integers(0, 8, (4, LENGTH))  # few tokens, so that they repeat
    presence, frequency, repetition = [0.5, -0.3, 0.0, 1.0], [0.0, 0.7, -0.4, 0.2], [1.3, 0.8, 1.0, 2.0]
    position, prompt = [9, 5, 3, 11], [4, 2, 4, 12]
    logits = random_logits(VOCAB, rows=4)
    rows = make_rows(4, uses=USED, position=position, prompt_len=prompt)
    slots = make_slots(4, history, penalties=np.transpose([presence, frequency, repetition]))
    expected = logits.astype(np.float64)
    for i in range(4):
        for token in range(VOCAB):
            seen = history[i, : position[i] + 1]
            generated = history[i, prompt[i] : position[i] + 1]
            if token in seen:
                expected[i, token] *= repetition[i] if expected[i, token] < 0 else 1 / repetition[i]
            expected[i, token] -= frequency[i] * np.sum(generated == token) + presence[i] * (token in generated)
    np.testing.assert_allclose(adjust_logits(logits, rows, slots), expected, rtol=1e-5, atol=1e-5)


def test_penalties_look_no_further_back_than_the_window():
    """As if what lies before the last `window` tokens had never been there, prompt or output."""
    rng = np.random.default_rng(12)
    history = rng.integers(0, 8, (5, LENGTH))
    window, prompt = [0, 1, 3, 6, 2**30], [4, 4, 4, 4, 4]
    logits = random_logits(VOCAB, rows=5)
    rows = make_rows(5, uses=USED, position=8, prompt_len=prompt)
    out = np.asarray(adjust_logits(logits, rows, make_slots(5, history, window=window, penalties=(0.5, 0.25, 1.5))))
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
    out = np.asarray(adjust_logits(logits, make_rows(4, uses=[USED, USED, USED, 0]), make_slots(4, allowed=allowed)))
    allowed[3] = True  # it asked for nothing
    np.testing.assert_array_equal(out, np.where(allowed, logits, -np.inf))


def test_the_token_that_would_complete_a_bad_word_is_never_chosen():
    """Words of one token, of several, begun in the prompt (not counted), longer than the output, and begun wrongly."""
    history = np.zeros((6, LENGTH), np.int32)
    history[:, :9] = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    words = [[[5]], [[17, 18, 6], [18, 7]], [[14, 15, 16, 17, 18, 9]], [[13, 14, 15, 16, 17, 18, 9]], [[16, 18, 9]], []]
    banned: list[set[int]] = [{5}, {6, 7}, {9}, set(), set(), set()]
    logits = random_logits(VOCAB, rows=6)
    rows = make_rows(6, uses=USED, position=8, prompt_len=4)
    out = np.asarray(adjust_logits(logits, rows, make_slots(6, history, bad_words=words)))
    for i, tokens in enumerate(banned):
        assert set(np.flatnonzero(np.isneginf(out[i]))) == tokens


def test_logit_bias_is_added_where_asked():
    bias: list[dict[int, float]] = [{0: 5.0, VOCAB - 1: -100.0}, {}, {7: 1.5}]
    logits = random_logits(VOCAB, rows=3)
    out = np.asarray(adjust_logits(logits, make_rows(3, uses=USED), make_slots(3, bias=bias)))
    expected = logits.copy()
    for i, entries in enumerate(bias):
        for token, value in entries.items():
            expected[i, token] += value
    np.testing.assert_array_equal(out, expected)


def test_a_row_that_asks_for_nothing_is_not_adjusted_by_what_its_slot_held_before():
    slots = make_slots(2, bias=[{3: 50.0}, {4: 50.0}], blocked=[[5], [5]])
    logits = random_logits(VOCAB, rows=2)
    out = np.asarray(adjust_logits(logits, make_rows(2, uses=[0, USED]), slots))
    np.testing.assert_array_equal(out[0], logits[0])
    assert out[1, 4] == logits[1, 4] + 50


def test_min_tokens_blocks_stop_tokens_until_enough_are_there():
    """The token to be sampled lies at position + 1; it is free to stop from `blocked_until` on."""
    slots = make_slots(3, blocked=[[2, 9]] * 3, blocked_until=[0, 6, 7])
    logits = random_logits(VOCAB, rows=3)
    out = np.asarray(adjust_logits(logits, make_rows(3, uses=USED, position=5), slots))
    np.testing.assert_array_equal(out[:2], logits[:2])
    assert np.isneginf(out[2, [2, 9]]).all() and np.isneginf(out[2]).sum() == 2


def test_a_greedy_row_with_a_bias_takes_the_most_likely_token_after_it():
    logits = random_logits(VOCAB, rows=2)
    rows = make_rows(2, uses=[USED, 0], logprobs=1)
    changed = adjust_logits(logits, rows, make_slots(2, bias=[{17: 100.0}, {}]))
    tokens, logprobs = jax.jit(sample)(logits, changed, rows)
    assert tokens.tolist() == [17, logits[1].argmax()]
    assert logprobs.rank[0] > 1, "log-probabilities are those before the bias"
    assert logprobs.rank[1] == 1
