"""Pages of eight bits in the C++ attention: written as the reference writes them, and read as what they stand for."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.pallas_kernels.pages import QUANTIZED, SCALE_BYTES, to_storage, write_pages
from tests.cpu_kernels.test_attention import LONG, attend, run
from tests.cpu_kernels.weights import ISAS, needs_kernels
from tests.pallas_kernels.oracle import RaggedBatch, attention_oracle, ragged_batch, with_numbers_of_heads
from tests.pallas_kernels.test_reference import CASES, LATENT, MIXED, ROOM, padded
from tests.support.devices import over_devices

pytestmark = needs_kernels

every_kind = pytest.mark.parametrize("kind", QUANTIZED)
every_isa = pytest.mark.parametrize("isa", ISAS)


@partial(jax.jit, static_argnames="kind")
def stored(x: jax.Array, kind: str) -> jax.Array:
    return to_storage(x, QUANTIZED[kind])


def numbers(rows: Any) -> np.ndarray:
    """What codes and scales stand for, in float64."""
    rows = np.asarray(rows)
    codes = np.ascontiguousarray(rows[..., :-SCALE_BYTES])
    codes = codes if rows.dtype == np.int8 else codes.view(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)


def with_codes(batch: RaggedBatch, kind: str) -> RaggedBatch:
    return dataclasses.replace(batch, pages=tuple(stored(buffer, kind) for buffer in batch.pages))


def check(batch: RaggedBatch, kind: str, *, threads: tuple[int | None, ...] = (None,), **options: Any) -> None:
    """With every instruction set that this machine has."""
    options = {"scale": batch.q.shape[-1] ** -0.5, **options}
    batch = with_codes(batch, kind)
    writes = batch.k.shape[1] > 0  # otherwise the keys and values are another layer's
    expected_pages = jax.jit(write_pages)(batch.pages, batch.k, batch.v, batch.meta) if writes else batch.pages
    k, v = (None if x is None else numbers(stored(x, kind)) for x in (batch.k, batch.v))
    pages = tuple(numbers(buffer) for buffer in batch.pages)
    expected, _ = attention_oracle(batch.q, k, v, pages, batch.meta, value_dim=batch.value_dim, **options)
    for isa, count in itertools.product(ISAS, threads):
        with cpu_kernels.forced(isa, count):
            out, got = run(batch, **options)
        tolerance = 2e-2 if batch.q.dtype == jnp.bfloat16 or cpu_kernels.rounds_to_bf16(isa) else 2e-5
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=tolerance, atol=tolerance, err_msg=isa)
        np.testing.assert_array_equal(out[~batch.real], 0)
        for buffer, expected_buffer in zip(got, expected_pages, strict=True):
            np.testing.assert_array_equal(buffer[1:], expected_buffer[1:], err_msg=isa)


@every_kind
@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case, kind):
    batch_options, options = CASES[case]
    batch = padded(ragged_batch(**batch_options))
    check(batch, kind, **with_numbers_of_heads(batch, options))


@every_kind
@pytest.mark.parametrize(
    "case", ["mixed, softcap and sinks", "mixed, window", "decode, group of 3, D=80", "latent, mixed"]
)
def test_queries_of_bfloat16(case, kind):
    batch_options, options = CASES[case]
    batch = padded(ragged_batch(**batch_options, dtype=jnp.bfloat16))
    check(batch, kind, **with_numbers_of_heads(batch, options))


@every_kind
@pytest.mark.parametrize("shape", [{}, LATENT, {"heads": 9, "kv_heads": 3}], ids=["plain", "latent", "groups of 3"])
def test_long_contexts_are_split_over_threads(shape, kind):
    batch = padded(ragged_batch(**LONG, **shape), columns=64)
    check(batch, kind, threads=(1, 2, 3, 4), sinks=jnp.linspace(-3.0, 3.0, batch.q.shape[1]))
    check(batch, kind, window=300)


@every_kind
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_match_oracle(seed, kind):
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
    check(batch, kind, window=window, threads=(1 + seed,))


@every_isa
@every_kind
def test_threads_change_no_bit(isa, kind):
    batch = with_codes(padded(ragged_batch(**LONG, heads=9, kv_heads=3, dtype=jnp.bfloat16), columns=64), kind)
    found = []
    for threads in (1, 2, 3, 4):
        with cpu_kernels.forced(isa, threads):
            found.append(run(batch, scale=0.125))
    for out, pages in found[1:]:
        np.testing.assert_array_equal(out.view(np.uint16), found[0][0].view(np.uint16))
        for buffer, first in zip(pages, found[0][1], strict=True):
            np.testing.assert_array_equal(buffer, first)


@every_isa
@every_kind
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("dim", [4, 20, 64, 100])
def test_codes_and_scales_are_those_of_the_reference(isa, kind, dtype, dim):
    """Of all sizes of numbers that a float32 has, ties of the rounding, zeros, and what is not finite."""
    tokens = 512
    rng = np.random.default_rng(dim)
    rows = rng.normal(size=(2, tokens, 2, dim)) * np.exp(rng.uniform(-80, 80, (2, tokens, 2, 1)))
    rows[0, :100] = rng.integers(-254, 255, (100, 2, dim)) / 2  # halves: the largest is a code already
    rows[0, :100, :, 0] = 127
    rows[1, :100] = rng.integers(-448 * 4, 448 * 4 + 1, (100, 2, dim)) / 4 * 2.0 ** rng.integers(-12, 1, (100, 2, 1))
    rows[1, :100, :, 0] = 448
    rows[:, 100:110] *= 1e-40
    rows[:, 110:112] = 0
    rows[:, 112:114, :, 1] = np.nan
    rows[:, 114:116, :, 2] = -np.inf
    rows[:, 116:118] = -0.0
    with np.errstate(over="ignore"):
        k, v = (jnp.asarray(x, jnp.float32).astype(dtype) for x in rows)
    batch = with_codes(ragged_batch(prefills=((0, tokens),), kv_heads=2, heads=2, head_dim=dim), kind)
    expected = jax.jit(write_pages)(batch.pages, k, v, batch.meta)
    with cpu_kernels.forced(isa):
        _, pages = attend(k, k, v, batch.pages, batch.meta, {}, scale=0.125)
    for buffer, expected_buffer in zip(pages, expected, strict=True):
        np.testing.assert_array_equal(buffer[1:], expected_buffer[1:])
    assert len(np.unique(expected[0][1:, ..., :-SCALE_BYTES])) > 100


@every_kind
def test_heads_are_rotated_before_they_are_rounded(kind):
    batch = with_codes(padded(ragged_batch(**MIXED)), kind)
    angles = np.random.default_rng(0).normal(size=(len(batch.q), 32)).astype(np.float32)
    rotary = cpu_kernels.Rotary(jnp.cos(angles), jnp.sin(angles))
    meta = batch.meta
    _, pages = cpu_kernels.attention(
        batch.q,
        batch.k,
        batch.v,
        batch.pages,
        meta.positions,
        meta.seq_ids,
        meta.page_table,
        scale=0.125,
        rotary=rotary,
    )
    k, halves = np.asarray(batch.k, np.float64), (slice(0, 32), slice(32, 64))
    rotated = (k[..., halves[0]] + 1j * k[..., halves[1]]) * np.exp(1j * angles.astype(np.float64))[:, None]
    k = jnp.asarray(np.concatenate([rotated.real, rotated.imag], -1), jnp.float32)
    expected = jax.jit(write_pages)(batch.pages, k, batch.v, meta)
    for buffer, expected_buffer in zip(pages, expected, strict=True):
        got, wanted = (numbers(x[1:]) for x in (buffer, expected_buffer))
        step = np.abs(wanted).max(-1, keepdims=True) * (1 / 127 if kind == "int8" else 1 / 14)
        assert (np.abs(got - wanted) <= 1.01 * step).all()  # a tie may fall to the other side
        assert (got == wanted).mean() > 0.5


@every_isa
@every_kind
def test_a_token_does_not_depend_on_its_batch(isa, kind):
    whole = with_codes(padded(ragged_batch(**LONG), columns=64), kind)
    with cpu_kernels.forced(isa, threads=2):
        expected, pages = run(whole, scale=0.125)
        for kept in (0, 3, 4):
            seq_ids = jnp.where(whole.meta.seq_ids == kept, kept, 24)
            alone = dataclasses.replace(whole, pages=pages, meta=dataclasses.replace(whole.meta, seq_ids=seq_ids))
            out, _ = run(alone, scale=0.125)
            np.testing.assert_array_equal(out[alone.real], expected[alone.real])
            assert alone.real.sum() > 0


def test_pages_without_room_for_a_scale_are_refused():
    batch = padded(ragged_batch(decodes=(30,)))
    batch.pages = tuple(buffer.astype(jnp.int8) for buffer in batch.pages)
    with pytest.raises(Exception, match="a page's rows are not as wide as keys and values"):
        run(batch, scale=1.0)


def test_heads_divided_over_devices_give_the_same_bits(tmp_path):
    found = over_devices(4, "tests.cpu_kernels.run_sharded_pages", tmp_path / "out.npz")
    for kind in QUANTIZED:
        for part in ("", " 0", " 1"):
            np.testing.assert_array_equal(found[f"{kind} many{part}"], found[f"{kind} one{part}"])
