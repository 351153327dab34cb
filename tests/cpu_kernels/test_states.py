"""Layers with states: against float64 on every instruction set, and the same bits however a sequence is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.pallas_kernels import StateRows, StepMetadata, cpu
from tests.cpu_kernels.weights import ISAS, needs_kernels

pytestmark = needs_kernels

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 20, 70, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
TOKENS = 90
CUTS = {"whole": (), "by one": range(1, TOKENS), "in chunks": (1, 8, 64, 65), "late": (TOKENS - 1,)}

Layer = Callable[[slice, Any, StepMetadata], tuple[jax.Array, jax.Array]]
"""Some tokens of the sequence, the buffer, and which rows hold its state -> their outputs, and the buffer."""


def run(begin: int, end: int, kept: int = 0) -> StepMetadata:
    """Tokens `begin … end - 1`, whose state has row 1; the state after `kept` of them goes to row 2."""
    row, tokens = jnp.ones(1, jnp.int32), jnp.arange(begin, end)
    states = StateRows(row, jnp.array([begin == 0]), row, jnp.array([2 if kept else 0]), jnp.array([kept]))
    return StepMetadata(
        tokens, jnp.zeros_like(tokens), jnp.array([end]), jnp.array([0, end - begin]), jnp.zeros((1, 1), jnp.int32),
        jnp.int32(0), jnp.int32(1), jnp.full_like(tokens, end), decode_only=False, states=states,
    )  # fmt: skip


def in_chunks(layer: Layer, cuts: Sequence[int], buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of all tokens, and the sequence's last state."""
    found = []
    for begin, end in pairwise((0, *cuts, TOKENS)):
        out, buffer = layer(slice(begin, end), buffer, run(begin, end))
        found.append(np.asarray(out))
    return np.concatenate(found), np.asarray(buffer)[1]


def convolution(dtype: Any = np.float32) -> tuple[Layer, np.ndarray]:
    dice = np.random.default_rng(2)
    x = jnp.asarray(dice.normal(size=(TOKENS, CHANNELS)), dtype)
    taps, bias = (jnp.asarray(dice.normal(size=shape), jnp.float32) for shape in ((CHANNELS, TAPS), (CHANNELS,)))
    step = jax.jit(lambda x, buffer, meta: cpu.causal_conv(x, taps, bias, buffer, meta, jax.nn.silu))
    buffer = dice.normal(size=(3, TAPS - 1, CHANNELS)).astype(np.float32)
    return lambda tokens, buffer, meta: step(x[tokens], buffer, meta), buffer


def rule() -> tuple[Layer, np.ndarray]:
    dice = np.random.default_rng(3)
    qkv = dice.normal(size=(TOKENS, CHANNELS)).astype(np.float32)
    decay = -np.exp(dice.uniform(-7, 1, (TOKENS, HEADS))).astype(np.float32)
    beta = dice.uniform(0, 1, (TOKENS, HEADS)).astype(np.float32)
    step = jax.jit(lambda *a: cpu.delta_rule(*a, key_heads=KEY_HEADS))
    buffer = dice.normal(size=(3, HEADS, KEY_DIM, VALUE_DIM)).astype(np.float32)
    return lambda tokens, buffer, meta: step(qkv[tokens], decay[tokens], beta[tokens], buffer, meta), buffer


LAYERS = {"convolution": convolution, "convolution, bf16": lambda: convolution(jnp.bfloat16), "rule": rule}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_sequence_has_the_same_bits_however_it_is_cut(name, isa):
    layer, buffer = LAYERS[name]()
    with cpu_kernels.forced(isa, threads=1):
        expected = in_chunks(layer, (), buffer)
    for cuts in CUTS.values():
        with cpu_kernels.forced(isa, threads=3):
            for found, exact in zip(in_chunks(layer, cuts, buffer), expected, strict=True):
                np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_that_is_kept_on_the_way_is_the_one_at_that_place(name):
    layer, buffer = LAYERS[name]()
    _, after = layer(slice(0, TOKENS), buffer, run(0, TOKENS, kept=48))
    _, until_then = layer(slice(0, 48), buffer, run(0, 48))
    np.testing.assert_array_equal(np.asarray(after)[2], np.asarray(until_then)[1])
    np.testing.assert_array_equal(np.asarray(after)[0], buffer[0])


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_computes_the_rule(isa):
    """The others' results differ from the first one's by rounding; that one is compared with float64 elsewhere."""
    layer, buffer = rule()
    with cpu_kernels.forced(ISAS[0]):
        expected = in_chunks(layer, (7,), buffer)
    with cpu_kernels.forced(isa):
        found = in_chunks(layer, (7,), buffer)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
