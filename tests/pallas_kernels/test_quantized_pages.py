"""Pages of eight bits: attention over them is attention over keys and values that were rounded so."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.pallas_kernels import choose_kernels
from jaxllm.pallas_kernels.kernels import CPU
from jaxllm.pallas_kernels.pages import QUANTIZED, SCALE_BYTES, from_storage, to_storage
from tests.pallas_kernels.oracle import RaggedBatch, attention_oracle, ragged_batch
from tests.pallas_kernels.test_reference import DECODE, LATENT, MIXED, padded, run


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """Each row in its own units of 1/127 or 1/448 of its largest number, in NumPy."""
    x = np.asarray(x, np.float32)
    peak = np.abs(x).max(-1, keepdims=True)
    scale = np.where(peak > 0, peak / np.float32(127 if kind == "int8" else 448), 1).astype(np.float32)
    codes = np.rint(x / scale) if kind == "int8" else (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return codes * scale


def quantized(batch: RaggedBatch, kind: str) -> tuple[RaggedBatch, RaggedBatch]:
    """The batch over quantized pages, and over float ones that hold the same rounded numbers."""
    pages = tuple(jnp.asarray(rounded(np.asarray(buffer), kind)) for buffer in batch.pages)
    stored = tuple(to_storage(jnp.asarray(buffer), QUANTIZED[kind]) for buffer in batch.pages)
    k, v = (None if x is None else jnp.asarray(rounded(np.asarray(x), kind)) for x in (batch.k, batch.v))
    return replace(batch, pages=stored), replace(batch, pages=pages, k=k, v=v)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("case", [DECODE, MIXED, {**MIXED, **LATENT}], ids=["decode", "mixed", "latent"])
def test_attention_over_rounded_keys_and_values(case, kind):
    batch = padded(ragged_batch(**case))
    batch, plain = quantized(batch, kind)
    options = {"scale": batch.q.shape[-1] ** -0.5}
    expected, _ = attention_oracle(
        plain.q, plain.k, plain.v, plain.pages, plain.meta, value_dim=plain.value_dim, **options
    )
    out, pages = run(batch, **options)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2e-4, atol=2e-4)
    assert [page.dtype for page in pages] == [QUANTIZED[kind]] * len(pages)
    assert [page.shape[-1] for page in pages] == [p.shape[-1] + SCALE_BYTES for p in plain.pages]


@pytest.mark.parametrize(("kind", "relative"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_rows_come_back_as_they_were(kind, relative):
    x = np.random.default_rng(0).normal(size=(6, 2, 64)).astype(np.float32)
    x[0], x[1] = 0, x[1] * 1e4
    x[2, 0, 1:] = 0
    back = np.asarray(from_storage(to_storage(jnp.asarray(x), QUANTIZED[kind]), jnp.float32))
    np.testing.assert_allclose(back, rounded(x, kind), rtol=1e-6)
    assert (np.abs(back - x) <= relative * 1.01 * np.abs(x).max(-1, keepdims=True)).all()
    np.testing.assert_array_equal(back[0], 0)


def test_the_attention_that_reads_them_is_chosen():
    assert choose_kernels("auto", "gpu", kv_cache_dtype="int8").name == "gpu"
    assert choose_kernels("auto", "cpu", kv_cache_dtype="fp8").page_dtype(jnp.bfloat16) == np.uint8
    native = choose_kernels("auto", "cpu", kv_cache_dtype="fp8", native=True)
    assert native == replace(CPU, page_dtype=native.page_dtype) and native.page_dtype(jnp.bfloat16) == np.uint8
