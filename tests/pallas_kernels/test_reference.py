"""The plain-XLA attention against float64 NumPy, on ragged batches at every edge of pages, blocks, tiles and groups."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.metadata import AttentionMetadata
from jaxllm.pallas_kernels.pages import from_storage, to_storage
from jaxllm.pallas_kernels.reference import DECODE_BLOCK, DECODE_GROUP, PREFILL_BLOCK, PREFILL_TILE, paged_attention
from tests.pallas_kernels.oracle import RaggedBatch, attention_oracle, ragged_batch


def run(batch: RaggedBatch, **options: Any) -> tuple[np.ndarray, tuple[jax.Array, jax.Array]]:
    @jax.jit
    def attend(q, k, v, pages, meta, sinks):
        return paged_attention(q, k, v, pages, meta, sinks=sinks, **options)

    sinks = options.pop("sinks", None)
    out, pages = attend(batch.q, batch.k, batch.v, batch.pages, batch.meta, sinks)
    return np.asarray(out), pages


def check(batch: RaggedBatch, *, tolerance: float = 2e-5, **options: Any) -> None:
    options = {"scale": batch.q.shape[-1] ** -0.5, **options}
    expected, expected_pages = attention_oracle(batch.q, batch.k, batch.v, batch.pages, batch.meta, **options)
    out, pages = run(batch, **options)
    assert out.dtype == batch.q.dtype
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(out[~batch.real], 0)
    for buffer, expected_buffer in zip(pages, expected_pages, strict=True):
        np.testing.assert_array_equal(np.asarray(buffer)[1:], expected_buffer[1:])


def around(*edges: int) -> tuple[int, ...]:
    return tuple(edge + d for edge in edges for d in (-1, 0, 1))


PAGE_EDGES = (1, *around(16, 32))
BLOCK_EDGES = around(DECODE_BLOCK, PREFILL_BLOCK)
MIXED: dict[str, Any] = {
    "decodes": (33, 1, 17, 129),
    "prefills": ((0, 7), (16, 5), (31, 1), (40, 70)),
    "tokens": 96,
    "seqs": 9,
}
MANY = {"decodes": tuple(range(1, DECODE_GROUP + 6)), "prefills": ((5, 3),), "tokens": 40, "seqs": 30}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode at page edges": ({"decodes": PAGE_EDGES}, {}),
    "decode at block edges": ({"decodes": BLOCK_EDGES}, {}),
    "decode, padded": ({"decodes": (20, 5, 140), "seqs": 8}, {}),
    "decode, one token": ({"decodes": (1,), "seqs": 2}, {}),
    "decode, multi-head": ({"decodes": PAGE_EDGES, "heads": 2, "kv_heads": 2}, {}),
    "decode, multi-query": ({"decodes": PAGE_EDGES, "heads": 5, "kv_heads": 1}, {}),
    "decode, group of 3, D=80": ({"decodes": PAGE_EDGES, "heads": 9, "kv_heads": 3, "head_dim": 80}, {}),
    "decode, pages of 8": ({"decodes": around(8, 128), "page_size": 8}, {}),
    "decode, pages of 128": ({"decodes": around(128, 256), "page_size": 128}, {}),
    "decode, a window inside a block": ({"decodes": BLOCK_EDGES, "window": 20}, {"window": 20}),
    "decode, a window over blocks": ({"decodes": (300, 5, 129), "window": 130}, {"window": 130}),
    "decode, window of 1": ({"decodes": BLOCK_EDGES, "window": 1}, {"window": 1}),
    "decode, softcap and sinks": ({"decodes": PAGE_EDGES}, {"softcap": 5.0, "sinks": True}),
    "mixed": (MIXED, {}),
    "mixed, multi-query": ({**MIXED, "heads": 3, "kv_heads": 1}, {}),
    "mixed, window": ({**MIXED, "window": 24}, {"window": 24}),
    "mixed, softcap": (MIXED, {"softcap": 2.0, "scale": 1.0}),
    "mixed, sinks": (MIXED, {"sinks": True}),
    "mixed, more decodes than a group": (MANY, {}),
    "mixed, fewer tokens than sequences": ({"decodes": (9, 30), "prefills": ((3, 4),), "tokens": 8, "seqs": 12}, {}),
    "prefill at page edges": ({"prefills": tuple((0, n) for n in PAGE_EDGES)}, {}),
    "prefill at tile edges": ({"prefills": tuple((3, n) for n in around(PREFILL_TILE))}, {}),
    "prefill at block edges": ({"prefills": tuple((n - 2, 2) for n in BLOCK_EDGES)}, {}),
    "prefill, many tiles": ({"prefills": ((0, 2), (200, 3 * PREFILL_TILE + 5)), "tokens": 400}, {}),
    "prefill, one token of a chunk": ({"prefills": ((0, 1),), "tokens": 16, "seqs": 4}, {}),
    "prefill, pages of 64, group of 7": ({"prefills": ((3, 50), (0, 4)), "heads": 14, "page_size": 64}, {}),
    "prefill, window over tiles and blocks": ({"prefills": ((280, 150),), "window": 140}, {"window": 140}),
    "prefill, window of 1": ({"prefills": ((20, 40),), "window": 1}, {"window": 1}),
    "prefill, window, softcap, sinks": (
        {"prefills": ((250, 20), (0, 9)), "window": 17},
        {"window": 17, "softcap": 3.0, "sinks": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case):
    """Rows that no query may see hold 1000, so that one stale or foreign row read shows."""
    batch_options, options = CASES[case]
    batch = ragged_batch(**batch_options)
    if options.get("sinks"):
        options = {**options, "sinks": jnp.linspace(-3.0, 3.0, batch.q.shape[1])}
    check(batch, **options)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_match_oracle(seed):
    rng = np.random.default_rng(seed)
    window = [None, int(rng.integers(1, 200))][seed % 2]
    batch = ragged_batch(
        decodes=rng.integers(1, 300, rng.integers(0, 20)).tolist(),
        prefills=list(zip(rng.integers(0, 300, 4).tolist(), rng.integers(1, 90, 4).tolist(), strict=True)),
        tokens=512,
        seqs=24,
        page_size=int(rng.choice([8, 16, 32])),
        head_dim=16,
        window=window,
        seed=seed,
    )
    check(batch, window=window)


@pytest.mark.parametrize(
    "batch_options", [{"decodes": (16, 32)}, {"prefills": ((0, 32), (20, 12))}], ids=["decode", "prefill"]
)
def test_a_full_page_table(batch_options):
    """No column to spare behind the context."""
    batch = ragged_batch(**batch_options)
    table = batch.meta.page_table[:, :2]
    batch.meta = AttentionMetadata(**{**vars(batch.meta), "page_table": table})
    assert (np.asarray(table[-1]) > 0).all()
    check(batch)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)], ids=["bf16", "f16"])
def test_half_precision_accumulates_in_float32(dtype, tolerance):
    check(ragged_batch(**MIXED, dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("batch_options", [MIXED, {"decodes": BLOCK_EDGES}], ids=["mixed", "decode"])
def test_pages_kept_as_bits_give_the_same_to_the_last_bit(dtype, batch_options):
    batch = ragged_batch(**batch_options, dtype=dtype)
    out, pages = run(batch, scale=0.125)
    floats = batch.pages
    batch.pages = tuple(to_storage(buffer, jnp.uint16) for buffer in floats)  # type: ignore[assignment]
    bits_out, bits = run(batch, scale=0.125)
    np.testing.assert_array_equal(out.view(np.uint16), bits_out.view(np.uint16))
    for buffer, expected in zip(bits, pages, strict=True):
        assert buffer.dtype == jnp.uint16
        np.testing.assert_array_equal(from_storage(buffer, dtype)[1:], expected[1:])


def test_storage_round_trips_every_bfloat16():
    every = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(to_storage(from_storage(jnp.asarray(every), jnp.bfloat16), jnp.uint16), every)


def test_huge_logits_stay_finite():
    check(ragged_batch(decodes=(40,), prefills=((3, 9),)), scale=1e4, tolerance=1e-3)


@pytest.mark.parametrize("decode_only", [True, False])
def test_a_step_with_nothing_in_it_is_zero_and_touches_only_page_0(decode_only):
    batch = ragged_batch(decodes=(20, 20) if decode_only else (), prefills=() if decode_only else ((0, 8),), tokens=8)
    seqs = len(batch.meta.context_len)
    batch.meta = AttentionMetadata(
        **{
            **vars(batch.meta),
            "seq_ids": jnp.full_like(batch.meta.seq_ids, seqs),
            "num_decodes": jnp.int32(0),
            "num_seqs": jnp.int32(0),
            "query_start": jnp.zeros_like(batch.meta.query_start),
        }
    )
    out, pages = run(batch, scale=0.1)
    np.testing.assert_array_equal(out, 0)
    for buffer, before in zip(pages, batch.pages, strict=True):
        np.testing.assert_array_equal(np.asarray(buffer)[1:], np.asarray(before)[1:])


@pytest.mark.parametrize("batch_options", [{"decodes": (30, 40)}, {"prefills": ((30, 20),)}], ids=["decode", "prefill"])
def test_pages_update_in_place_when_donated(batch_options):
    batch = ragged_batch(**batch_options, kv_heads=4, head_dim=128)
    # Lots of pages, so that a copy of them would dwarf everything else.
    pages = tuple(jnp.zeros((4096, *buffer.shape[1:])) for buffer in batch.pages)

    def attend(pages, q, k, v, meta):
        return paged_attention(q, k, v, pages, meta, scale=0.1)

    compiled = jax.jit(attend, donate_argnums=0).lower(pages, batch.q, batch.k, batch.v, batch.meta).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages[0].nbytes // 10
