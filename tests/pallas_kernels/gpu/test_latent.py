"""What stands before and behind latent attention on NVIDIA GPUs, interpreted or on one, against float64 NumPy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.layers.rope import RopeConfig, rope_angles
from jaxllm.pallas_kernels import RootMeanSquare
from jaxllm.pallas_kernels.gpu.attention import absorb_and_store, expand_heads
from jaxllm.pallas_kernels.gpu.tile import AttentionSpec
from jaxllm.pallas_kernels.pages import QUANTIZED, SCALE_BYTES, from_storage
from tests.pallas_kernels.oracle import ragged_batch
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware

STILL, VALUES = 18, 20
"""Channels of a head's query that are not rotated, and of its value."""


def exactly_rotated(x: np.ndarray, angles: Any) -> np.ndarray:
    """`x [T, H, r]`, pairs of whose channels are complex numbers."""
    rotation = (np.asarray(angles.cos, np.float64) + 1j * np.asarray(angles.sin, np.float64))[:, None]
    if angles.interleaved:
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * rotation
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * rotation
    return np.concatenate([z.real, z.imag], -1)


def check(
    *, heads: int = 5, latents: int = 40, rotary: int = 12, interleaved: bool = True, dtype: Any = jnp.float32,
    pages: str = "", rotates: bool = True, one_product: bool = True, tolerance: float = 2e-5, **batch_options: Any,
) -> None:  # fmt: skip
    size = latents + rotary
    batch = ragged_batch(heads=heads, kv_heads=1, head_dim=size, value_dim=latents, **batch_options)
    meta, random = batch.meta, np.random.default_rng(4)
    tokens = len(meta.positions)
    q = jnp.asarray(random.standard_normal((tokens, heads, STILL + rotary)), dtype)
    latent = jnp.asarray(random.standard_normal((tokens, size)), dtype)
    expand = jnp.asarray(random.standard_normal((heads * (STILL + VALUES), latents)), dtype)
    norm = RootMeanSquare(jnp.asarray(random.uniform(0.5, 2, latents), jnp.float32), 1e-3)
    angles = rope_angles(RopeConfig(dim=rotary, interleaved=interleaved), meta.positions, meta.rotary_lengths)
    shape = (*batch.pages[0].shape[:-1], size + SCALE_BYTES * bool(pages))
    before = jnp.zeros(shape, QUANTIZED[pages] if pages else dtype)
    spec = AttentionSpec(
        heads, 1, size, shape[2], jnp.dtype(dtype), 1.0, None, None, latents, bool(pages), interpret=INTERPRET
    )
    found, (after,) = absorb_and_store(
        q,
        latent,
        expand,
        norm,
        angles if rotates else None,
        (before,),
        meta,
        spec,
        one_product=one_product,
    )

    def rotated(x: np.ndarray) -> np.ndarray:
        return exactly_rotated(x, angles) if rotates else x

    exact_q, exact = np.asarray(q, np.float64), np.asarray(latent, np.float64)
    rows = np.asarray(expand, np.float64).reshape(heads, STILL + VALUES, latents)
    absorbed = np.einsum("thn,hnl->thl", exact_q[..., :STILL], rows[:, :STILL])
    expected = np.concatenate([absorbed, rotated(exact_q[..., STILL:])], -1)
    live = np.asarray(meta.live)
    assert found.dtype == dtype
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        np.asarray(found, np.float64)[live], expected[live], rtol=tolerance, atol=tolerance * scale
    )
    stored = from_storage(after, jnp.float32) if pages else after
    kept, rotary_part = exact[:, :latents], exact[:, None, latents:]
    kept = kept / np.sqrt((kept**2).mean(-1, keepdims=True) + 1e-3) * np.asarray(norm.weight, np.float64)
    keys = np.concatenate([kept, rotated(rotary_part)[:, 0]], -1)
    untouched = np.ones(shape[:1] + shape[2:3], bool)
    for token in np.flatnonzero(live):
        position = int(meta.positions[token])
        page = int(meta.page_table[meta.seq_ids[token], position // shape[2]])
        untouched[page, position % shape[2]] = False
        np.testing.assert_allclose(
            np.asarray(stored[page, 0, position % shape[2]], np.float64), keys[token], rtol=tolerance,
            atol=max(tolerance, {"": 0, "int8": 1 / 250, "fp8": 1 / 28}[pages]) * np.abs(keys[token]).max(),
        )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(after)[:, 0][untouched], 0)


MIXED: dict[str, Any] = {"decodes": (33, 1, 17), "prefills": ((0, 7), (16, 5), (40, 70)), "tokens": 96, "seqs": 9}
CASES: dict[str, dict[str, Any]] = {
    "one row": {"decodes": (9,)},
    "decode, padded": {"decodes": (1, 16, 300), "seqs": 8},
    "all rows dead": {"decodes": (), "seqs": 4, "tokens": 4},
    "mixed": MIXED,
    "queries from a latent of their own": {**MIXED, "one_product": False},
    "halves": {**MIXED, "interleaved": False},
    "nothing is rotated": {**MIXED, "rotates": False},
    "one head": {**MIXED, "heads": 1},
    "more heads than are rotated together": {"decodes": (3, 40), "heads": 33},
    "512 and 64": {"decodes": (3, 40), "heads": 2, "latents": 512, "rotary": 64},
    "more channels than a block": {**MIXED, "latents": 144},
}


@pytest.mark.parametrize("case", CASES)
def test_queries_are_absorbed_and_latents_stored(case):
    check(**CASES[case])


@pytest.mark.parametrize("pages", ["int8", "fp8"])
def test_quantized_pages(pages):
    check(**MIXED, pages=pages)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)])
def test_half_precision(dtype, tolerance):
    check(**MIXED, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens", [1, 16, 77])
@pytest.mark.parametrize("sizes", [(3, 40, 20), (2, 512, 128)], ids=str)
def test_values_are_expanded(sizes, tokens, dtype, tolerance):
    heads, latents, values = sizes
    random = np.random.default_rng(tokens)
    x = jnp.asarray(random.standard_normal((tokens, heads, latents)), dtype)
    expand = jnp.asarray(random.standard_normal((heads * (STILL + values), latents)) * latents**-0.5, dtype)
    out = expand_heads(x, expand, STILL, interpret=INTERPRET)
    rows = np.asarray(expand, np.float64).reshape(heads, STILL + values, latents)[:, STILL:]
    expected = np.einsum("thl,hvl->thv", np.asarray(x, np.float64), rows)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)
