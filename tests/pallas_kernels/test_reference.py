"""The plain-XLA attention against float64 NumPy, on ragged batches at every edge of pages, blocks, tiles and groups."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.pages import from_storage, to_storage
from jaxllm.pallas_kernels.reference import DECODE_BLOCK, DECODE_GROUP, PREFILL_BLOCK, PREFILL_TILE, paged_attention
from tests.pallas_kernels.oracle import RaggedBatch, attention_oracle, ragged_batch, with_numbers_of_heads


@partial(jax.jit, static_argnames=("scale", "window", "chunked", "softcap", "value_dim"))
def attend(q, k, v, pages, meta, of_heads, **options):
    return paged_attention(q, k, v, pages, meta, **of_heads, **options)


def run(batch: RaggedBatch, **options: Any) -> tuple[np.ndarray, tuple[jax.Array, ...]]:
    of_heads = {name: options.pop(name) for name in ("sinks", "slopes", "visible_until") if name in options}
    options["value_dim"] = batch.value_dim
    out, pages = attend(batch.q, batch.k, batch.v, batch.pages, batch.meta, of_heads, **options)
    return np.asarray(out), pages


def padded(batch: RaggedBatch, num_pages: int = 256, columns: int = 32) -> RaggedBatch:
    """More pages and a wider page table, so that batches share one compiled step."""
    spare = ((0, num_pages - batch.pages[0].shape[0]), (0, 0), (0, 0), (0, 0))
    batch.pages = tuple(jnp.pad(buffer, spare) for buffer in batch.pages)
    table = jnp.pad(batch.meta.page_table, ((0, 0), (0, columns - batch.meta.page_table.shape[1])))
    batch.meta = dataclasses.replace(batch.meta, page_table=table)
    return batch


def check(batch: RaggedBatch, *, tolerance: float = 2e-5, **options: Any) -> None:
    options = {"scale": batch.q.shape[-1] ** -0.5, **options}
    expected, expected_pages = attention_oracle(
        batch.q, batch.k, batch.v, batch.pages, batch.meta, value_dim=batch.value_dim, **options
    )
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
ROOM = {"tokens": 512, "seqs": 24}
MIXED: dict[str, Any] = {"decodes": (33, 1, 17, 129), "prefills": ((0, 7), (16, 5), (31, 1), (40, 70)), **ROOM}
MANY = {"decodes": tuple(range(1, DECODE_GROUP + 6)), "prefills": ((5, 3),), **ROOM}
DECODE = {"decodes": (*PAGE_EDGES, *BLOCK_EDGES), "seqs": 16}
CHUNKS = {"window": 20, "chunked": True}
SINKS = {"softcap": 5.0, "sinks": True}
LATENT = {"heads": 5, "kv_heads": 1, "head_dim": 48, "value_dim": 36}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode at page and block edges": (DECODE, {}),
    "decode, one token": ({"decodes": (1,), "seqs": 16}, {}),
    "decode, no padding": ({"decodes": (20, 5, 140)}, {}),
    "decode, multi-head": ({**DECODE, "heads": 2, "kv_heads": 2}, {}),
    "decode, multi-query": ({**DECODE, "heads": 5, "kv_heads": 1}, {}),
    "decode, group of 3, D=80": ({**DECODE, "heads": 9, "kv_heads": 3, "head_dim": 80}, {}),
    "decode, pages of 8": ({"decodes": around(8, 128), "page_size": 8}, {}),
    "decode, pages of 128": ({"decodes": around(128, 256), "page_size": 128}, {}),
    "decode, a window inside a block": ({**DECODE, "window": 20}, {"window": 20}),
    "decode, a window over blocks": ({**DECODE, "window": 130}, {"window": 130}),
    "decode, a window from the last token of a block": (
        {"decodes": (DECODE_BLOCK + 129,), "seqs": 16, "window": 130},
        {"window": 130},
    ),
    "decode, chunks": ({**DECODE, **CHUNKS}, CHUNKS),
    "decode, keys and values of another layer": ({**DECODE, "stored": True}, {}),
    "decode, softcap and sinks": (DECODE, SINKS),
    "decode, slopes": (DECODE, {"slopes": True}),
    "decode, multi-head, slopes, softcap and sinks": (
        {**DECODE, "heads": 5, "kv_heads": 5},
        {**SINKS, "slopes": True},
    ),
    "mixed": (MIXED, {}),
    "mixed, multi-query": ({**MIXED, "heads": 3, "kv_heads": 1}, {}),
    "mixed, window": ({**MIXED, "window": 24}, {"window": 24}),
    "mixed, chunks": ({**MIXED, **CHUNKS}, CHUNKS),
    "mixed, keys and values of another layer": ({**MIXED, "stored": True}, {}),
    "mixed, softcap and sinks": (MIXED, SINKS),
    "mixed, spans": (MIXED, {"visible_until": 5}),
    "mixed, spans in a window, softcap and sinks": (
        {**MIXED, "window": 24},
        {**SINKS, "window": 24, "visible_until": 30},
    ),
    "prefill, spans over tiles and blocks": ({"prefills": ((150, 300), (0, 40)), **ROOM}, {"visible_until": 130}),
    "mixed, slopes": ({**MIXED, "heads": 6}, {"slopes": True}),
    "mixed, slopes in a window": ({**MIXED, "window": 24}, {"window": 24, "slopes": True}),
    "prefill, slopes over tiles": ({"prefills": ((0, 2), (90, 300)), **ROOM}, {"slopes": True}),
    "mixed, more decodes than a group": (MANY, {}),
    "mixed, fewer tokens than sequences": ({"decodes": (9, 30), "prefills": ((3, 4),), "tokens": 8, "seqs": 12}, {}),
    "prefill at page edges": ({"prefills": tuple((0, n) for n in PAGE_EDGES), **ROOM}, {}),
    "prefill at tile edges": ({"prefills": tuple((3, n) for n in around(PREFILL_TILE)), **ROOM}, {}),
    "prefill at block edges": ({"prefills": tuple((n - 2, 2) for n in BLOCK_EDGES), **ROOM}, {}),
    "prefill, many tiles": ({"prefills": ((0, 2), (90, 3 * PREFILL_TILE + 5)), **ROOM}, {}),
    "prefill, one token of a chunk": ({"prefills": ((0, 1),), **ROOM}, {}),
    "prefill, no padding": ({"prefills": ((3, 50), (0, 4))}, {}),
    "prefill, pages of 64, group of 7": ({"prefills": ((3, 50), (0, 4)), "heads": 14, "page_size": 64, **ROOM}, {}),
    "prefill, window over tiles and blocks": ({"prefills": ((280, 150),), "window": 140, **ROOM}, {"window": 140}),
    "prefill, chunks over tiles and blocks": (
        {"prefills": ((280, 150), (0, 45)), **CHUNKS, "window": 140, **ROOM},
        {"window": 140, "chunked": True},
    ),
    "prefill, window of 1": ({"prefills": ((20, 40),), "window": 1, **ROOM}, {"window": 1}),
    "prefill, a window from the last token of a block": (
        {"prefills": ((PREFILL_BLOCK + 22, 9),), "window": 24, **ROOM},
        {"window": 24},
    ),
    "prefill, window of 24": ({"prefills": ((250, 20), (0, 40)), "window": 24, **ROOM}, {"window": 24}),
    "latent, decode at page and block edges": ({**DECODE, **LATENT}, {}),
    "latent, decode, no padding": ({"decodes": (20, 5, 140), **LATENT}, {}),
    "latent, decode, 512 and 64": ({"decodes": (33, 1), **LATENT, "head_dim": 576, "value_dim": 512}, {}),
    "latent, decode, every channel a value": ({**DECODE, **LATENT, "value_dim": 48}, {}),
    "latent, mixed": ({**MIXED, **LATENT}, {}),
    "latent, mixed, one head": ({**MIXED, **LATENT, "heads": 1}, {}),
    "latent, mixed, more decodes than a group": ({**MANY, **LATENT}, {}),
    "latent, prefill at page edges": ({"prefills": tuple((0, n) for n in PAGE_EDGES), **ROOM, **LATENT}, {}),
    "latent, prefill at block edges": ({"prefills": tuple((n - 2, 2) for n in BLOCK_EDGES), **ROOM, **LATENT}, {}),
    "latent, prefill, many tiles": ({"prefills": ((0, 2), (90, 3 * PREFILL_TILE + 5)), **ROOM, **LATENT}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case):
    """Rows that no query may see hold 1000, so that one stale or foreign row read shows."""
    batch_options, options = CASES[case]
    batch = padded(ragged_batch(**batch_options))
    check(batch, **with_numbers_of_heads(batch, options))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_match_oracle(seed):
    rng = np.random.default_rng(seed)
    window = (None, 24, 140)[seed % 3]
    batch = ragged_batch(
        decodes=rng.integers(1, 300, rng.integers(0, 17)).tolist(),
        prefills=list(zip(rng.integers(0, 300, 4).tolist(), rng.integers(1, 60, 4).tolist(), strict=True)),
        window=window,
        seed=seed,
        **ROOM,
    )
    check(padded(batch, num_pages=512), window=window)


@pytest.mark.parametrize(
    "batch_options", [{"decodes": (16, 32)}, {"prefills": ((0, 32), (20, 12))}], ids=["decode", "prefill"]
)
def test_a_full_page_table(batch_options):
    """No column to spare behind the context."""
    batch = ragged_batch(**batch_options)
    table = batch.meta.page_table[:, :2]
    batch.meta = dataclasses.replace(batch.meta, page_table=table)
    assert (np.asarray(table[-1]) > 0).all()
    check(batch)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)], ids=["bf16", "f16"])
def test_half_precision_accumulates_in_float32(dtype, tolerance):
    check(padded(ragged_batch(**MIXED, dtype=dtype)), tolerance=tolerance, scale=0.125)


@pytest.mark.parametrize(
    ("dtype", "batch_options"),
    [
        (jnp.bfloat16, MIXED),
        (jnp.bfloat16, DECODE),
        (jnp.float16, MIXED),
        (jnp.bfloat16, {**MIXED, **LATENT}),
        (jnp.bfloat16, {**DECODE, **LATENT}),
    ],
    ids=["bf16, mixed", "bf16, decode", "f16, mixed", "bf16, latent, mixed", "bf16, latent, decode"],
)
def test_pages_kept_as_bits_give_the_same_to_the_last_bit(dtype, batch_options):
    batch = padded(ragged_batch(**batch_options, dtype=dtype))
    out, pages = run(batch, scale=0.125)
    floats = batch.pages
    batch.pages = tuple(to_storage(buffer, jnp.uint16) for buffer in floats)
    bits_out, bits = run(batch, scale=0.125)
    np.testing.assert_array_equal(out.view(np.uint16), bits_out.view(np.uint16))
    for buffer, expected in zip(bits, pages, strict=True):
        assert buffer.dtype == jnp.uint16
        np.testing.assert_array_equal(from_storage(buffer, dtype)[1:], expected[1:])


def test_storage_round_trips_every_bfloat16():
    every = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(to_storage(from_storage(jnp.asarray(every), jnp.bfloat16), jnp.uint16), every)


def test_huge_logits_stay_finite():
    check(padded(ragged_batch(decodes=(40,), prefills=((3, 9),), **ROOM)), scale=1e4, tolerance=1e-3)


@pytest.mark.parametrize("batch_options", [DECODE, {"prefills": ((0, 8),), **ROOM}], ids=["decode", "prefill"])
def test_a_step_with_nothing_in_it_is_zero_and_touches_only_page_0(batch_options):
    batch = padded(ragged_batch(**batch_options))
    seqs = len(batch.meta.context_len)
    batch.meta = dataclasses.replace(
        batch.meta,
        seq_ids=jnp.full_like(batch.meta.seq_ids, seqs),
        num_decodes=jnp.int32(0),
        num_seqs=jnp.int32(0),
        query_start=jnp.zeros_like(batch.meta.query_start),
    )
    out, pages = run(batch, scale=0.125)
    np.testing.assert_array_equal(out, 0)
    for buffer, before in zip(pages, batch.pages, strict=True):
        np.testing.assert_array_equal(np.asarray(buffer)[1:], np.asarray(before)[1:])


@pytest.mark.parametrize("kind", [{}, LATENT], ids=["keys and values", "latent"])
def test_a_page_that_was_given_nan_serves_its_next_owner(kind):
    first = padded(ragged_batch(prefills=((0, 25),), **ROOM, **kind))
    first.k = first.k.at[3:20].set(jnp.nan)
    if first.v is not None:
        first.v = first.v.at[10:25].set(-jnp.inf)
    check(first)
    _, pages = run(first, scale=0.125)

    second = padded(ragged_batch(prefills=((0, 5),), **ROOM, **kind, seed=1))
    second.pages = pages
    second.meta = dataclasses.replace(second.meta, page_table=first.meta.page_table)
    check(second)


@pytest.mark.parametrize(("batch_options", "halves"), [(DECODE, 1), (MIXED, 2)], ids=["decode", "mixed"])
def test_latent_pages_are_gathered_once(batch_options, halves):
    """Keys and values take a gather each, in each half of the step that reads pages."""

    def gathers(batch: RaggedBatch) -> int:
        step = partial(paged_attention, scale=1.0, value_dim=batch.value_dim)
        traced = str(jax.make_jaxpr(step)(batch.q, batch.k, batch.v, batch.pages, batch.meta))
        page = batch.pages[0].shape[2] * batch.pages[0].shape[3]
        return len(re.findall(rf":f32\[[\d,]*,{page}\] = gather\[", traced))

    assert gathers(ragged_batch(**{**batch_options, **LATENT, "value_dim": None})) == 2 * halves
    assert gathers(ragged_batch(**{**batch_options, **LATENT})) == halves


@pytest.mark.parametrize("batch_options", [{"decodes": (30, 40)}, {"prefills": ((30, 20),)}], ids=["decode", "prefill"])
def test_pages_update_in_place_when_donated(batch_options):
    batch = ragged_batch(**batch_options, kv_heads=4, head_dim=128)
    # Lots of pages, so that a copy of them would dwarf everything else.
    pages = tuple(jnp.zeros((4096, *buffer.shape[1:])) for buffer in batch.pages)

    meta, tree = jax.tree.flatten(batch.meta)  # lower() would fill it with placeholders, which are no arrays

    def attend(pages, q, k, v, meta):
        return paged_attention(q, k, v, pages, jax.tree.unflatten(tree, meta), scale=0.1)

    compiled = jax.jit(attend, donate_argnums=0).lower(pages, batch.q, batch.k, batch.v, meta).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages[0].nbytes // 10
