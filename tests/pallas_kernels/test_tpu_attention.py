"""The TPU's attention against the float64 oracle, with what JAX checks its kernel by in the kernel's place.

The kernel itself runs on nothing but a TPU. What is ours is what it is given: pages, their layout, and the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_kernel

from jaxllm.pallas_kernels import tpu
from jaxllm.pallas_kernels.pages import INTERLEAVED
from tests.pallas_kernels.oracle import RaggedBatch, attention_oracle, ragged_batch


@pytest.fixture(autouse=True)
def checked_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, pages: Any, *batch: Any, **options: Any) -> Any:
        jax_kernel.dynamic_validate_inputs(q, pages, *batch, **options)
        assert options.pop("num_kv_pages_per_block") and options.pop("num_queries_per_block")  # else a device is asked
        # It loops over the batch by its values, so that only these cannot be traced.
        known = [np.asarray(array) for array in batch]
        reference = jax.jit(lambda q, pages: jax_kernel.ref_ragged_paged_attention(q, pages, *known, **options))
        out = reference(q, pages)
        # The kernel leaves in rows without a token what its memory held.
        return jnp.pad(out, ((0, q.shape[0] - out.shape[0]), (0, 0), (0, 0)), constant_values=jnp.nan)

    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", attend)


def interleaved(pages: tuple[Any, ...]) -> Any:
    """Pages `[N, K, page_size, D]` of keys and of values as one buffer, with zeros in the channels behind."""
    num_pages, heads, page_size, dim = pages[0].shape
    ((*shape, lanes),) = INTERLEAVED.shapes(num_pages, page_size, heads, (dim, dim))
    buffer = np.zeros((*shape, lanes), pages[0].dtype)
    for head in range(heads):
        for place, kind in enumerate(pages):
            buffer[:, :, 2 * head + place, :dim] = np.asarray(kind)[:, head]
    return jnp.asarray(buffer)


def check(batch: RaggedBatch, *, tolerance: float = 2e-5, **options: Any) -> None:
    options = {"scale": batch.q.shape[-1] ** -0.5, **options}
    expected, expected_pages = attention_oracle(batch.q, batch.k, batch.v, batch.pages, batch.meta, **options)
    out, (buffer,) = tpu.paged_attention(batch.q, batch.k, batch.v, (interleaved(batch.pages),), batch.meta, **options)
    assert out.dtype == batch.q.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(np.asarray(out)[~batch.real], 0)
    np.testing.assert_array_equal(np.asarray(buffer)[1:], np.asarray(interleaved(expected_pages))[1:])


CONTEXTS = (1, 15, 16, 17, 33, 70)
DECODE: dict[str, Any] = {"decodes": CONTEXTS, "seqs": 8}
MIXED: dict[str, Any] = {
    "decodes": (33, 1, 17),
    "prefills": ((0, 7), (16, 5), (31, 1), (40, 30)),
    "tokens": 64,
    "seqs": 9,
}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode, one token": ({"decodes": (1,)}, {}),
    "decode": ({"decodes": CONTEXTS}, {}),
    "decode, padded": (DECODE, {}),
    "decode, multi-head, D=128": ({**DECODE, "heads": 2, "kv_heads": 2, "head_dim": 128}, {}),
    "decode, multi-query": ({**DECODE, "heads": 5, "kv_heads": 1}, {}),
    "decode, pages of 128": ({"decodes": (127, 128, 129), "page_size": 128}, {}),
    "decode, window and softcap": ({**DECODE, "window": 20}, {"window": 20, "softcap": 5.0}),
    "mixed": (MIXED, {}),
    "mixed, D=80": ({**MIXED, "head_dim": 80}, {}),
    "mixed, fewer tokens than sequences": ({"decodes": (9, 30), "prefills": ((3, 4),), "tokens": 8, "seqs": 12}, {}),
    "mixed, window": ({**MIXED, "window": 24}, {"window": 24}),
    "mixed, softcap": (MIXED, {"softcap": 2.0, "scale": 1.0}),
    "prefill at page edges": ({"prefills": tuple((0, n) for n in (1, 15, 16, 17, 33)), "tokens": 96, "seqs": 8}, {}),
    "prefill, no padding": ({"prefills": ((3, 50), (0, 4))}, {}),
    "prefill, pages of 8, group of 7": ({"prefills": ((3, 20), (0, 4)), "heads": 14, "page_size": 8}, {}),
    "prefill, window of 1": ({"prefills": ((20, 14),), "window": 1}, {"window": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case):
    """Rows that no query may see hold 1000, so that one stale or foreign row read shows."""
    batch_options, options = CASES[case]
    check(ragged_batch(**batch_options), **options)


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_match_oracle(seed):
    rng = np.random.default_rng(seed)
    window = (None, 24, None)[seed]
    batch = ragged_batch(
        decodes=rng.integers(1, 90, rng.integers(0, 6)).tolist(),
        prefills=list(zip(rng.integers(0, 60, 3).tolist(), rng.integers(1, 30, 3).tolist(), strict=True)),
        tokens=96,
        seqs=10,
        window=window,
        seed=seed,
    )
    check(batch, window=window)


def test_bfloat16():
    check(ragged_batch(**MIXED, dtype=jnp.bfloat16), tolerance=2e-2)


@pytest.mark.parametrize("batch_options", [DECODE, {"prefills": ((0, 8),), "tokens": 16}], ids=["decode", "prefill"])
def test_a_step_with_nothing_in_it_is_zero_and_touches_only_page_0(batch_options):
    batch = ragged_batch(**batch_options)
    seqs = len(batch.meta.context_len)
    meta = dataclasses.replace(
        batch.meta,
        seq_ids=jnp.full_like(batch.meta.seq_ids, seqs),
        positions=jnp.zeros_like(batch.meta.positions),
        context_len=jnp.zeros_like(batch.meta.context_len),
        page_table=jnp.zeros_like(batch.meta.page_table),
        query_start=jnp.zeros_like(batch.meta.query_start),
        num_decodes=jnp.int32(0),
        num_seqs=jnp.int32(0),
    )
    before = interleaved(batch.pages)
    out, (buffer,) = tpu.paged_attention(batch.q, batch.k, batch.v, (before,), meta, scale=0.125)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(np.asarray(buffer)[1:], np.asarray(before)[1:])
    *_, num_seqs = tpu.arguments(meta)
    assert int(num_seqs[0]) == 1  # the kernel would not wait for what it fetched for nobody


def test_what_is_not_finite_is_stored_as_zero():
    batch = ragged_batch(prefills=((0, 25),), tokens=32)
    batch.k, batch.v = batch.k.at[3:20].set(jnp.nan), batch.v.at[10:25].set(-jnp.inf)
    check(batch)
