"""Paged attention against float64 NumPy: the reference's cases, with every instruction set that this machine has."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.pallas_kernels.pages import to_storage
from tests.cpu_kernels.weights import ISAS, needs_kernels
from tests.pallas_kernels.oracle import RaggedBatch, attention_oracle, ragged_batch, with_numbers_of_heads
from tests.pallas_kernels.test_reference import CASES, DECODE, LATENT, MIXED, ROOM, padded

pytestmark = needs_kernels

every_isa = pytest.mark.parametrize("isa", ISAS)
LONG: dict[str, Any] = {"decodes": (700, 1, 256, 257), "prefills": ((500, 90), (3, 1)), **ROOM}


@partial(jax.jit, static_argnames=("scale", "window", "chunked", "softcap", "value_dim"))
def attend(q, k, v, pages, meta, of_heads, **options):
    places = meta.positions, meta.seq_ids, meta.page_table
    return cpu_kernels.attention(q, k, v, pages, *places, **of_heads, **options)


def run(batch: RaggedBatch, **options: Any) -> tuple[np.ndarray, tuple[jax.Array, ...]]:
    of_heads = {name: options.pop(name) for name in ("sinks", "slopes", "visible_until") if name in options}
    options["value_dim"] = batch.value_dim
    out, pages = attend(batch.q, batch.k, batch.v, batch.pages, batch.meta, of_heads, **options)
    return np.asarray(out), pages


def check(
    batch: RaggedBatch, *, tolerance: float = 2e-5, threads: tuple[int | None, ...] = (None,), **options: Any
) -> None:
    """With every instruction set that this machine has. Pages of bfloat16 are handed over as their bits."""
    options = {"scale": batch.q.shape[-1] ** -0.5, **options}
    expected, expected_pages = attention_oracle(
        batch.q, batch.k, batch.v, batch.pages, batch.meta, value_dim=batch.value_dim, **options
    )
    half = batch.pages[0].dtype == jnp.bfloat16
    if half:
        batch = dataclasses.replace(batch, pages=tuple(to_storage(pages, jnp.uint16) for pages in batch.pages))
    for isa, count in itertools.product(ISAS, threads):
        with cpu_kernels.forced(isa, count):
            out, pages = run(batch, **options)
        assert out.dtype == batch.q.dtype
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=tolerance, atol=tolerance, err_msg=isa)
        np.testing.assert_array_equal(out[~batch.real], 0)
        for buffer, expected_buffer in zip(pages, expected_pages, strict=True):
            got = np.asarray(buffer)[1:]
            np.testing.assert_array_equal(got.view(expected_buffer.dtype) if half else got, expected_buffer[1:])


@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case):
    """Rows that no query may see hold 1000, so that one stale or foreign row read shows."""
    batch_options, options = CASES[case]
    batch = padded(ragged_batch(**batch_options))
    check(batch, **with_numbers_of_heads(batch, options))


@pytest.mark.parametrize(
    "case",
    [
        "mixed",
        "mixed, softcap and sinks",
        "mixed, window",
        "mixed, chunks",
        "mixed, keys and values of another layer",
        "decode at page and block edges",
        "decode, softcap and sinks",
        "decode, slopes",
        "mixed, slopes",
        "mixed, spans",
        "prefill, spans over tiles and blocks",
        "decode, group of 3, D=80",
        "decode, a window over blocks",
        "prefill, pages of 64, group of 7",
        "prefill, window of 1",
        "latent, decode, 512 and 64",
        "latent, mixed",
    ],
)
def test_pages_of_bfloat16_match_oracle(case):
    batch_options, options = CASES[case]
    batch = padded(ragged_batch(**batch_options, dtype=jnp.bfloat16))
    check(batch, tolerance=2e-2, **with_numbers_of_heads(batch, options))


@pytest.mark.parametrize("kind", [{}, LATENT, {"heads": 9, "kv_heads": 3}], ids=["plain", "latent", "groups of 3"])
def test_long_contexts_are_split_over_threads(kind):
    batch = padded(ragged_batch(**LONG, **kind), columns=64)
    check(batch, threads=(1, 2, 3, 4), sinks=jnp.linspace(-3.0, 3.0, batch.q.shape[1]))
    check(batch, window=300)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_match_oracle(seed):
    rng = np.random.default_rng(seed)
    window = (None, 24, 140)[seed % 3]
    heads = int(rng.integers(1, 5))
    batch = ragged_batch(
        decodes=rng.integers(1, 600, rng.integers(0, 12)).tolist(),
        prefills=list(zip(rng.integers(0, 600, 4).tolist(), rng.integers(1, 60, 4).tolist(), strict=True)),
        kv_heads=heads,
        heads=heads * int(rng.integers(1, 30)),
        head_dim=int(rng.integers(1, 40)) * 4,
        page_size=int(rng.choice([4, 8, 16, 32])),
        window=window,
        seed=seed,
        **ROOM,
    )
    check(batch, window=window, threads=(1 + seed,))


@every_isa
def test_float32_queries_over_pages_of_bfloat16(isa):
    """As where the model computes in float32 and the cache is kept short."""
    batch = padded(ragged_batch(**MIXED))
    short = tuple(pages.astype(jnp.bfloat16) for pages in batch.pages)
    k, v = batch.k, batch.v
    batch.k, batch.v = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))
    expected, _ = attention_oracle(batch.q, batch.k, batch.v, short, batch.meta, scale=0.125)
    batch.k, batch.v, batch.pages = k, v, tuple(to_storage(pages, jnp.uint16) for pages in short)
    with cpu_kernels.forced(isa):
        out, _ = run(batch, scale=0.125)
    np.testing.assert_allclose(out, expected, atol=2e-2)


@every_isa
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_token_does_not_depend_on_its_batch(isa, dtype):
    """To the last bit, whatever else is in the step."""
    whole = padded(ragged_batch(**LONG, dtype=dtype), columns=64)
    half = tuple(to_storage(pages, jnp.uint16) for pages in whole.pages) if dtype == jnp.bfloat16 else whole.pages
    whole.pages = half
    with cpu_kernels.forced(isa, threads=2):
        expected, pages = run(whole, scale=0.125)
        for kept in (0, 3, 4):
            alone = dataclasses.replace(
                whole, meta=dataclasses.replace(whole.meta, seq_ids=jnp.where(whole.meta.seq_ids == kept, kept, 24))
            )
            alone.pages = pages
            out, _ = run(alone, scale=0.125)
            np.testing.assert_array_equal(out[alone.real], expected[alone.real])
            assert alone.real.sum() > 0


def test_huge_logits_stay_finite():
    check(padded(ragged_batch(decodes=(40,), prefills=((3, 9),), **ROOM)), scale=1e4, tolerance=1e-3)


@pytest.mark.parametrize("batch_options", [DECODE, {"prefills": ((0, 8),), **ROOM}], ids=["decode", "prefill"])
def test_a_step_with_nothing_in_it_is_zero_and_touches_no_page(batch_options):
    batch = padded(ragged_batch(**batch_options))
    batch.meta = dataclasses.replace(batch.meta, seq_ids=jnp.full_like(batch.meta.seq_ids, len(batch.meta.context_len)))
    out, pages = run(batch, scale=0.125)
    np.testing.assert_array_equal(out, 0)
    for buffer, before in zip(pages, batch.pages, strict=True):
        np.testing.assert_array_equal(buffer, before)


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


@every_isa
def test_a_query_that_is_not_finite_spoils_itself_alone(isa):
    batch = padded(ragged_batch(**MIXED))
    with cpu_kernels.forced(isa):
        expected, _ = run(batch, scale=0.125)
        batch.q = batch.q.at[jnp.array([1, 9]), 0, 5].set(jnp.nan)
        out, _ = run(batch, scale=0.125)
    assert np.isnan(out[[1, 9], 0]).all()
    others = np.ones(out.shape[:2], bool)
    others[[1, 9], 0] = False
    np.testing.assert_array_equal(out[others], expected[others])


def test_pages_update_in_place_when_donated():
    batch = ragged_batch(decodes=(30, 40), kv_heads=4, head_dim=128)
    pages = tuple(jnp.zeros((4096, *buffer.shape[1:])) for buffer in batch.pages)
    where = [buffer.unsafe_buffer_pointer() for buffer in pages]

    @partial(jax.jit, donate_argnums=0)
    def step(pages):
        meta = batch.meta
        return cpu_kernels.attention(
            batch.q, batch.k, batch.v, pages, meta.positions, meta.seq_ids, meta.page_table, scale=0.1
        )[1]

    assert [buffer.unsafe_buffer_pointer() for buffer in step(pages)] == where


def test_pages_that_are_kept_stay_as_they_were():
    batch = padded(ragged_batch(decodes=(30, 40)))
    before = [np.array(buffer) for buffer in batch.pages]
    run(batch, scale=0.1)
    for buffer, old in zip(batch.pages, before, strict=True):
        np.testing.assert_array_equal(buffer, old)


def test_dtypes_that_are_not_served_are_refused():
    batch = ragged_batch(decodes=(30,), dtype=jnp.float16)
    with pytest.raises(ValueError, match="q is float16 and pages are float16; CPU kernels serve q of float32 and "):
        run(batch, scale=1.0)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """In float64, from the definition: pairs as complex numbers, times exp(i angle)."""
    half = cos.shape[1]
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    numbers = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * (cos + 1j * sin)[:, None]
    out = x.copy()
    out[..., pairs[0]], out[..., pairs[1]] = numbers.real, numbers.imag
    return out


@every_isa
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [8, 32])
@pytest.mark.parametrize("norms", [False, True])
def test_heads_are_normalised_and_rotated_first(isa, interleaved, half, norms):
    batch = padded(ragged_batch(**MIXED))
    rng = np.random.default_rng(0)
    angles = rng.normal(size=(len(batch.q), half)) * 3
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    heads = cpu_kernels.HeadNorms(*(jnp.asarray(rng.normal(size=(2, 64)), jnp.float32)), 1e-5, 1.0) if norms else None
    meta = batch.meta

    @jax.jit
    def step(q, k, v, pages, cos, sin):
        rotary = cpu_kernels.Rotary(cos, sin, interleaved)
        where = meta.positions, meta.seq_ids, meta.page_table
        return cpu_kernels.attention(q, k, v, pages, *where, scale=0.125, rotary=rotary, norms=heads)

    with cpu_kernels.forced(isa):
        out, pages = step(batch.q, batch.k, batch.v, batch.pages, cos, sin)

    def ready(x, weight):
        x = np.asarray(x, np.float64)
        if heads is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (1 + np.asarray(weight, np.float64))
        return rotated(x, cos, sin, interleaved)

    q, k = ready(batch.q, heads and heads.q), ready(batch.k, heads and heads.k)
    expected, expected_pages = attention_oracle(q, k, batch.v, batch.pages, meta, scale=0.125)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(pages[0][1:], expected_pages[0][1:], rtol=1e-5, atol=1e-5)
