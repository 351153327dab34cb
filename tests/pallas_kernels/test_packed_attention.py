"""Attention of whole texts against float64 NumPy."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.engine.core.batch import whole_texts
from jaxllm.pallas_kernels.kernels import CPU, REFERENCE, Kernels

TOKENS, TEXTS, HEADS, KV_HEADS, DIM, SCALE = 300, 8, 6, 2, 12, 0.3


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None, softcap: float | None) -> np.ndarray:
    """One text's, `[n, H, D]`."""
    q, k, v = (x.astype(np.float64) for x in (q, k.repeat(HEADS // KV_HEADS, 1), v.repeat(HEADS // KV_HEADS, 1)))
    logits = np.einsum("qhd,khd->hqk", q, k) * SCALE
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    apart = np.abs(np.subtract.outer(np.arange(len(q)), np.arange(len(q))))
    weights = np.exp(np.where(apart < (window or len(q)), logits, -np.inf))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (7, 2.0), (140, None)])
@pytest.mark.parametrize("lengths", [(300,), (1,), (128, 128), (5, 1, 129, 64, 2, 90), ()], ids=str)
def test_each_text_attends_to_itself(
    lengths: tuple[int, ...], window: int | None, softcap: float | None, kernels: Kernels
) -> None:
    if kernels.native and not cpu_kernels.available():
        pytest.skip("needs the C++ kernels")
    rng = np.random.default_rng(len(lengths))
    q = rng.standard_normal((TOKENS, HEADS, DIM), np.float32)
    k, v = (rng.standard_normal((TOKENS, KV_HEADS, DIM), np.float32) for _ in range(2))
    starts = np.cumsum([0, *lengths])
    query_start = np.full(TEXTS + 1, starts[-1], np.int32)
    query_start[: len(starts)] = starts
    fields = {
        "tokens": jnp.zeros(TOKENS, jnp.int32), "query_start": jnp.asarray(query_start),
        "second_text": jnp.zeros(TEXTS, jnp.int32), "num_seqs": jnp.int32(len(lengths)),
    }  # fmt: skip
    _, meta = whole_texts(fields)
    run = jax.jit(kernels.packed_attention, static_argnames=("scale", "window", "softcap"))
    out = np.asarray(run(q, k, v, meta, scale=SCALE, window=window, softcap=softcap))
    for a, b in pairwise(starts):
        np.testing.assert_allclose(out[a:b], oracle(q[a:b], k[a:b], v[a:b], window, softcap), atol=1e-5)
    assert not out[starts[-1] :].any()
