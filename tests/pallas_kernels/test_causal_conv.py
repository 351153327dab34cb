"""Causal depthwise convolutions over packed sequences, against float64."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxllm.cpu_kernels import available
from jaxllm.pallas_kernels.kernels import CPU
from jaxllm.pallas_kernels.states import causal_conv
from tests.pallas_kernels.states import STEPS, run_by_token, state_step, used_rows


@pytest.mark.parametrize("kind", ["reference", "cpu"])
@pytest.mark.parametrize(("taps", "with_bias"), [(2, False), (4, True)])
@pytest.mark.parametrize("name", STEPS)
def test_each_token_sees_those_before_it(name, taps, with_bias, kind):
    if kind == "cpu" and not available():
        pytest.skip("no kernels")
    chunks, sizes = STEPS[name]
    step, dice, channels = state_step(chunks, **sizes), np.random.default_rng(1), 300
    u = dice.standard_normal((sizes["tokens"], channels)).astype(np.float32)
    weights = dice.standard_normal((channels, taps)).astype(np.float32)
    bias = dice.standard_normal(channels).astype(np.float32) if with_bias else None
    buffer = dice.standard_normal((step.rows, taps - 1, channels)).astype(np.float32)

    def run(state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        seen = np.concatenate([state, u[token][None]])
        total = (seen * weights.T).sum(0) + (0 if bias is None else bias)
        return seen[1:], total / (1 + np.exp(-total)) if with_bias else total

    activation = jax.nn.silu if with_bias else None
    expected, expected_rows = run_by_token(step, buffer, run)
    convolve = partial({"reference": causal_conv, "cpu": CPU.causal_conv}[kind], activation=activation)
    out, rows = jax.jit(convolve)(u, weights, bias, buffer, step.meta)
    np.testing.assert_allclose(np.asarray(out)[step.live], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(rows)[used_rows(step)], expected_rows[used_rows(step)], rtol=1e-6)
