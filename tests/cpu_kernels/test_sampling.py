"""A sampler's sums by the C++ kernels: against float64, and to the bit whatever the number of rows and threads."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.engine.core import sampler
from jaxllm.pallas_kernels.products import CPU_SUMS
from tests.cpu_kernels.weights import ISAS, needs_kernels

pytestmark = needs_kernels
every_isa = pytest.mark.parametrize("isa", ISAS)

log_sum_exp = jax.jit(cpu_kernels.log_sum_exp)
running_weights = jax.jit(cpu_kernels.running_weights, static_argnums=3)


def random_logits(rows: int, vocab: int) -> np.ndarray:
    logits = (np.random.default_rng(vocab).normal(size=(rows, vocab)) * 4).astype(np.float32)
    logits[:, ::7] = -np.inf
    logits[:, 0] -= 200  # too unlikely for a float32
    return logits


@every_isa
@pytest.mark.parametrize("vocab", [1, 3, 256, 257, 5003])
def test_sums_match_float64(isa, vocab):
    logits = random_logits(4, vocab)
    logits[:, -1] = 1.5
    exact = logits.astype(np.float64)
    most, threshold = logits.max(1), np.array([-np.inf, 0, 1, 1.5], np.float32)
    weights = np.exp(exact - most[:, None]) * (logits >= threshold[:, None])
    with cpu_kernels.forced(isa):
        np.testing.assert_allclose(log_sum_exp(logits), np.log(np.exp(exact).sum(1)), rtol=1e-6, atol=1e-6)
        for block in (1, 256, 300):
            ends = np.minimum(np.arange(block, vocab + block, block), vocab) - 1
            found = running_weights(logits, most, threshold, block)
            np.testing.assert_allclose(found, weights.cumsum(1)[:, ends], rtol=2e-5)


@every_isa
def test_rows_that_are_not_finite(isa):
    logits = np.zeros((5, 300), np.float32)
    logits[0] = -np.inf
    logits[1, 7] = np.nan
    logits[2, 7] = -np.inf
    with cpu_kernels.forced(isa):
        found = np.asarray(log_sum_exp(logits))
        assert found[0] == -np.inf and np.isnan(found[1])
        np.testing.assert_allclose(found[2:], np.log([299, 300, 300]), rtol=1e-6)
        np.testing.assert_array_equal(
            running_weights(logits[2:3], jnp.zeros(1), jnp.full(1, -jnp.inf), 1)[0, 5:9], [6, 7, 7, 8]
        )


@every_isa
def test_a_row_has_the_same_bits_among_any_others(isa):
    logits = random_logits(17, 5003)
    most, threshold = logits.max(1), np.full(17, -1, np.float32)
    functions = [
        lambda rows: log_sum_exp(logits[rows]),
        lambda rows: running_weights(logits[rows], most[rows], threshold[rows], 1),
        lambda rows: running_weights(logits[rows], most[rows], threshold[rows], 256),
    ]
    for function in functions:
        with cpu_kernels.forced(isa, threads=2):
            together = np.asarray(function(slice(None)))
        for threads, rows in ((1, slice(3, 4)), (4, slice(3, 4)), (3, slice(2, 7))):
            with cpu_kernels.forced(isa, threads=threads):
                np.testing.assert_array_equal(function(rows), together[rows])


def test_the_sampler_keeps_and_draws_what_it_does_in_plain_xla():
    logits = random_logits(64, 5003)
    k, p = jnp.tile(jnp.array([0, 5, 64, 300]), 16), jnp.repeat(jnp.array([1.0, 0.99, 0.9, 0.3]), 16)
    min_p = jnp.tile(jnp.array([0.0, 0.01]), 32)
    u = jnp.linspace(0, 1 - 2**-24, 64)
    kept, drawn = (
        [np.asarray(jax.jit(partial(function, **sums))(logits, *rest)) for sums in ({}, {"sums": CPU_SUMS})]
        for function, rest in ((sampler.truncate, (k, p, min_p)), (sampler.draw, (u,)))
    )
    assert (np.isfinite(kept[0]) != np.isfinite(kept[1])).sum() <= 1, "a threshold may fall on the next float"
    assert (drawn[0] != drawn[1]).sum() <= 1
    scored = [jax.jit(partial(sampler.token_logprobs, **sums))(logits, drawn[0]) for sums in ({}, {"sums": CPU_SUMS})]
    np.testing.assert_allclose(scored[0].chosen, scored[1].chosen, rtol=1e-6, atol=1e-5)
