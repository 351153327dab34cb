"""The gated delta rule against its definition, token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cpu_kernels import available
from jaxllm.pallas_kernels.delta_rule import delta_rule
from jaxllm.pallas_kernels.gpu.states import delta_rule as gpu_delta_rule
from jaxllm.pallas_kernels.kernels import CPU
from tests.pallas_kernels.states import STEPS, Step, run_by_token, state_step, used_rows
from tests.support.gpu_here import INTERPRET

HEADS = {"equal": (3, 3, 8, 32), "shared": (2, 6, 12, 10), "one": (1, 2, 16, 70)}
"""Heads of keys and of values, and the sizes of both."""


def inputs(step: Step, key_heads: int, value_heads: int, key_dim: int, value_dim: int, slowest: float) -> list[Any]:
    dice, tokens = np.random.default_rng(3), len(step.meta.positions)

    def draw(*shape: int) -> np.ndarray:
        return dice.standard_normal(shape).astype(np.float32)

    qkv = draw(tokens, 2 * key_heads * key_dim + value_heads * value_dim)
    decay = -np.exp(dice.uniform(np.log(slowest), np.log(3), (tokens, value_heads))).astype(np.float32)
    beta = dice.uniform(0, 1, (tokens, value_heads)).astype(np.float32)
    return [qkv, decay, beta, draw(step.rows, value_heads, key_dim, value_dim)]


def by_definition(step: Step, arrays: list[Any], key_heads: int) -> tuple[np.ndarray, np.ndarray]:
    qkv, decay, beta = (np.asarray(a, np.float64) for a in arrays[:3])
    heads, key_dim = arrays[3].shape[1:3]
    q, k, v = np.split(qkv, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = (x.reshape(len(x), key_heads, key_dim) for x in (q, k))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    of_key = np.arange(heads) // (heads // key_heads)
    q, k, v = q[:, of_key] / np.sqrt(key_dim), k[:, of_key], v.reshape(len(v), heads, -1)

    def run(state: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        state = state * np.exp(decay[t])[:, None, None]
        change = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * change[:, None]
        return state, np.einsum("hk,hkv->hv", q[t], state)

    return run_by_token(step, np.asarray(arrays[3]), run)


def check(step: Step, arrays: list[Any], key_heads: int, rule: Callable[..., Any], tolerance: float = 1e-5) -> None:
    expected, expected_rows = by_definition(step, arrays, key_heads)
    out, rows = jax.jit(rule, static_argnames="key_heads")(*arrays, step.meta, key_heads=key_heads)
    used = used_rows(step)
    np.testing.assert_allclose(np.asarray(out)[step.live], expected, rtol=1e-4, atol=tolerance)
    np.testing.assert_allclose(np.asarray(rows)[used], expected_rows[used], rtol=1e-4, atol=tolerance)


RULES = {
    "reference": delta_rule,
    "cpu": CPU.delta_rule,
    "gpu": partial(gpu_delta_rule, interpret=INTERPRET),
}
"""Of a GPU the steps of one token alone are its kernel's."""
RULE = pytest.mark.parametrize(
    "rule", ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not available(), reason="no kernels")), "gpu"]
)


@RULE
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", STEPS)
def test_tokens_read_what_those_before_them_wrote(name, heads, rule):
    chunks, sizes = STEPS[name]
    step = state_step(chunks, **sizes)
    check(step, inputs(step, *HEADS[heads], slowest=1e-3), HEADS[heads][0], RULES[rule])


@RULE
@pytest.mark.parametrize("decay", [-1e-7, -90.0], ids=["nothing fades", "all fades at once"])
def test_decays_at_both_ends(decay, rule):
    chunks, sizes = STEPS["mixed"]
    step = state_step(chunks, **sizes)
    arrays = inputs(step, *HEADS["shared"], slowest=1e-3)
    arrays[1] = np.full_like(arrays[1], decay)
    check(step, arrays, HEADS["shared"][0], RULES[rule], tolerance=2e-5)


def test_plain_xla_calls_no_library():
    """Of LAPACK, which JAX brings in while it traces: a process that loads a saved executable does not trace."""
    chunks, sizes = STEPS["mixed"]
    step = state_step(chunks, **sizes)
    arrays = inputs(step, *HEADS["shared"], slowest=1e-3)
    rule = jax.jit(lambda *arrays: delta_rule(*arrays, step.meta, key_heads=HEADS["shared"][0]))
    lowered = rule.lower(*arrays)
    assert "custom_call" not in lowered.as_text()
