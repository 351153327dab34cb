"""Attention on NVIDIA GPUs, interpreted or on such a GPU, against the float64 oracle; and its lowering for CUDA."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxllm.models.layers.rope import RopeConfig, rope_angles, rotate
from jaxllm.pallas_kernels import RootMeanSquare, Unsummed, reference
from jaxllm.pallas_kernels.gpu import flash
from jaxllm.pallas_kernels.gpu.attention import paged_attention
from jaxllm.pallas_kernels.gpu.tile import AttentionSpec
from jaxllm.pallas_kernels.metadata import StepMetadata, prefill_tiles
from jaxllm.pallas_kernels.pages import QUANTIZED, to_storage, write_pages
from tests.pallas_kernels.oracle import RaggedBatch, attention_oracle, ragged_batch, with_numbers_of_heads
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware

NAN = float("nan")


@cache
def jitted(programs: int, **options: Any) -> Callable[..., Any]:
    """One for all batches of the same shapes; `programs`, by which the grid goes as well, is what tests set."""
    return jax.jit(partial(paged_attention, **options))


def run(
    batch: RaggedBatch, *, interpret: bool = INTERPRET, **options: Any
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    of_heads = {name: options.pop(name) for name in ("sinks", "slopes") if name in options}
    if "angles" in options:
        attend = jax.jit(partial(paged_attention, interpret=interpret, **options))
    else:
        attend = jitted(flash.TARGET_PROGRAMS, interpret=interpret, **options)
    out, pages = attend(batch.q, batch.k, batch.v, batch.pages, batch.meta, **of_heads)
    return np.asarray(out), tuple(np.asarray(buffer) for buffer in pages)


def check(batch: RaggedBatch, *, interpret: bool = INTERPRET, tolerance: float = 2e-5, **options: Any) -> None:
    options = {"scale": batch.q.shape[-1] ** -0.5, **options}
    expected, expected_pages = attention_oracle(batch.q, batch.k, batch.v, batch.pages, batch.meta, **options)
    out, pages = run(batch, interpret=interpret, **options)
    assert out.dtype == batch.q.dtype
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=tolerance, atol=tolerance)
    for buffer, expected_buffer in zip(pages, expected_pages, strict=True):
        np.testing.assert_array_equal(buffer[1:], expected_buffer[1:])


# Contexts of one token, of a page less one, exactly, plus one, and of several blocks of keys.
CONTEXTS = (1, 15, 16, 17, 47, 300)
MIXED: dict[str, Any] = {
    "decodes": (33, 1, 17),
    "prefills": ((0, 7), (16, 5), (31, 1), (40, 70)),
    "tokens": 96,
    "seqs": 9,
}

LATENT: dict[str, Any] = {"heads": 5, "kv_heads": 1, "head_dim": 48, "value_dim": 36}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode": ({"decodes": CONTEXTS}, {}),
    "decode, padded": ({"decodes": CONTEXTS, "seqs": 8}, {}),
    "decode, multi-head": ({"decodes": CONTEXTS, "heads": 2, "kv_heads": 2}, {}),
    "decode, multi-query": ({"decodes": CONTEXTS, "heads": 20, "kv_heads": 1}, {}),
    "decode, group of 3": ({"decodes": CONTEXTS, "heads": 9, "kv_heads": 3}, {}),
    "decode, window, softcap, sinks": (
        {"decodes": CONTEXTS, "window": 20},
        {"window": 20, "softcap": 5.0, "sinks": True},
    ),
    "decode, slopes": ({"decodes": CONTEXTS, "seqs": 8}, {"slopes": True}),
    "mixed": (MIXED, {}),
    "mixed, slopes": ({**MIXED, "heads": 6, "kv_heads": 6}, {"slopes": True}),
    "mixed, slopes, window, softcap, sinks": (
        {**MIXED, "window": 24},
        {"window": 24, "softcap": 5.0, "sinks": True, "slopes": True},
    ),
    "mixed, fewer tokens than sequences": ({"decodes": (9, 30), "prefills": ((3, 4),), "tokens": 8, "seqs": 12}, {}),
    "mixed, one chunk, D=80": ({"decodes": (20,), "prefills": ((17, 9),), "head_dim": 80, "page_size": 8}, {}),
    "prefill": ({"prefills": ((0, 1), (0, 15), (0, 16), (0, 17), (64, 33))}, {}),
    "prefill, padded tokens": ({"prefills": ((5, 20),), "tokens": 32}, {}),
    "prefill, D=128": ({"prefills": ((16, 40),), "head_dim": 128, "page_size": 32}, {}),
    "prefill, D=256, multi-query": ({"prefills": ((16, 40),), "head_dim": 256, "kv_heads": 1}, {}),
    "prefill, group of 7": ({"prefills": ((3, 50), (0, 4)), "heads": 14, "kv_heads": 2, "page_size": 128}, {}),
    "prefill, window of 1": ({"prefills": ((20, 40),), "window": 1}, {"window": 1}),
    "mixed, window": ({**MIXED, "window": 24}, {"window": 24}),
    "mixed, chunks": ({**MIXED, "window": 24, "chunked": True}, {"window": 24, "chunked": True}),
    "mixed, keys and values of another layer": ({**MIXED, "stored": True}, {}),
    "mixed, softcap": (MIXED, {"softcap": 2.0, "scale": 1.0}),
    "mixed, sinks": (MIXED, {"sinks": True}),
    "latent, decode": ({"decodes": CONTEXTS, "seqs": 8, **LATENT}, {"value_dim": 36}),
    "latent, decode, 512 and 64": (
        {"decodes": (33, 1), "heads": 20, "kv_heads": 1, "head_dim": 576, "value_dim": 512},
        {"value_dim": 512},
    ),
    "latent, decode, every channel a value": ({"decodes": CONTEXTS, **LATENT, "value_dim": 48}, {"value_dim": 48}),
    "latent, mixed": ({**MIXED, **LATENT, "heads": 33}, {"value_dim": 36}),
    "latent, prefill": ({"prefills": ((0, 17), (64, 33)), **LATENT}, {"value_dim": 36}),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case):
    """Whatever no query may see is NaN, so that one stale or foreign row read shows."""
    batch_options, options = CASES[case]
    batch = ragged_batch(unused=NAN, **batch_options)
    check(batch, **with_numbers_of_heads(batch, options))


@pytest.mark.parametrize("window", [None, 24])
def test_tokens_that_see_later_ones(window):
    batch = ragged_batch(**MIXED, window=window)
    until = with_numbers_of_heads(batch, {"visible_until": 9})["visible_until"]
    expected, _ = attention_oracle(
        batch.q, batch.k, batch.v, batch.pages, batch.meta, scale=0.1, window=window, visible_until=until
    )
    attend = partial(paged_attention, scale=0.1, window=window, interpret=INTERPRET)
    out, _ = jax.jit(attend)(batch.q, batch.k, batch.v, batch.pages, batch.meta, visible_until=until)
    np.testing.assert_allclose(np.asarray(out)[batch.real], expected[batch.real], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)])
def test_half_precision_accumulates_in_float32(dtype, tolerance):
    check(ragged_batch(**MIXED, dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize("sinks", [False, True])
def test_splits_combine_to_the_same(sinks):
    """A long context among short ones: more splits than programs have at once, of one block and of two."""
    batch = ragged_batch(decodes=(2300, 1, 700), seqs=4, heads=2, kv_heads=1, head_dim=16, unused=NAN)
    check(batch, sinks=jnp.arange(2.0) if sinks else None)


@pytest.mark.parametrize("programs", [1, 3])
def test_programs_take_turns_at_the_splits(monkeypatch, programs):
    monkeypatch.setattr(flash, "TARGET_PROGRAMS", programs)
    check(ragged_batch(decodes=(1100, 1, 300), heads=2, kv_heads=1, unused=NAN))


def test_a_sequences_splits_depend_on_it_alone():
    """Bit for bit the same output beside others, and in a larger bucket."""
    beside = ragged_batch(decodes=(1500, 600, 30), seqs=8, heads=2, kv_heads=1, head_dim=32)
    first = {
        name: getattr(beside.meta, name)[:1] for name in ("positions", "context_len", "page_table", "rotary_lengths")
    }
    one = {"seq_ids": jnp.zeros(1, jnp.int32), "query_start": jnp.arange(2), "num_decodes": jnp.int32(1)}
    meta = dataclasses.replace(beside.meta, **first, **one, num_seqs=jnp.int32(1))
    alone = dataclasses.replace(beside, q=beside.q[:1], k=beside.k[:1], v=beside.v[:1], meta=meta)
    np.testing.assert_array_equal(run(alone, scale=0.2)[0][0], run(beside, scale=0.2)[0][0])


def test_a_window_reads_no_page_before_it():
    """Pages that no query sees hold NaN; and the number of blocks does not grow with the context."""
    spec = AttentionSpec(4, 2, 64, 16, jnp.float32, 1.0, 100, None)
    blocks = [int(flash._blocks(jnp.int32(context), spec)[1]) for context in (100, 1000, 100_000)]
    assert max(blocks) <= 100 // spec.block_k + 2
    check(ragged_batch(decodes=(900, 130), prefills=((700, 40),), window=100, unused=NAN), window=100)


class Rotary(NamedTuple):
    angles: Any
    norms: Any


def rotary_inputs(batch: RaggedBatch, dim: int, interleaved: bool, normed: bool) -> Rotary:
    random = np.random.default_rng(5)
    rope = RopeConfig(dim=dim, interleaved=interleaved)
    angles = rope_angles(rope, batch.meta.positions, batch.meta.rotary_lengths)
    weights = random.uniform(0.5, 1.5, (2, batch.q.shape[-1]))
    norms = tuple(RootMeanSquare(jnp.asarray(w, jnp.float32), 1e-6) for w in weights)
    return Rotary(angles, norms if normed else None)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("dim", "interleaved", "head_dim"), [(64, False, 64), (64, True, 64), (32, False, 80), (96, False, 96)]
)
def test_heads_are_normed_and_rotated_on_the_way(dim, interleaved, head_dim, normed):
    batch = ragged_batch(**MIXED, head_dim=head_dim, unused=NAN)
    rotary = rotary_inputs(batch, dim, interleaved, normed)
    q, k = batch.q, batch.k
    if rotary.norms:
        q, k = (norm(x) for norm, x in zip(rotary.norms, (q, k), strict=True))
    beforehand = dataclasses.replace(batch, q=rotate(q, rotary.angles), k=rotate(k, rotary.angles))
    expected, expected_pages = run(beforehand, scale=0.1)
    out, pages = run(batch, scale=0.1, angles=rotary.angles, norms=rotary.norms)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for buffer, expected_buffer in zip(pages, expected_pages, strict=True):
        np.testing.assert_allclose(buffer[1:], expected_buffer[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_heads_of_a_product_by_parts_are_added_up_on_the_way(normed):
    """What is given as the heads' sum is not read."""
    batch = ragged_batch(**MIXED, head_dim=80, unused=NAN)
    rotary = rotary_inputs(batch, 64, interleaved=False, normed=normed)
    expected, expected_pages = run(batch, scale=0.1, angles=rotary.angles, norms=rotary.norms)
    heads = np.concatenate([np.reshape(x, (len(batch.q), -1)) for x in (batch.q, batch.k, batch.v)], axis=1)
    some, more = np.random.default_rng(6).standard_normal((2, *heads.shape)).astype(np.float32)
    unsummed = Unsummed(jnp.stack([some, more, heads - some - more]))
    unread = dataclasses.replace(batch, **{name: jnp.full_like(getattr(batch, name), NAN) for name in "qkv"})
    out, pages = run(unread, scale=0.1, angles=rotary.angles, norms=rotary.norms, unsummed=unsummed)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    for buffer, expected_buffer in zip(pages, expected_pages, strict=True):
        np.testing.assert_allclose(buffer[1:], expected_buffer[1:], rtol=1e-4, atol=1e-5)


def test_what_is_not_finite_is_stored_as_zero():
    batch = ragged_batch(decodes=(20, 33), heads=2, kv_heads=1)
    batch.k, batch.v = batch.k.at[0, 0, 3].set(NAN), batch.v.at[1, 0, 5].set(float("inf"))
    check(batch)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("case", ["decode, padded", "mixed", "latent, mixed"])
def test_quantized_pages_are_read_and_written_as_by_the_reference(case, kind):
    batch_options, options = CASES[case]
    batch = ragged_batch(**batch_options, unused=0.0)
    stored = QUANTIZED[kind]
    pages = tuple(to_storage(buffer, stored) for buffer in batch.pages)
    quantized = dataclasses.replace(batch, pages=pages)
    expected, expected_pages = jax.jit(partial(reference.paged_attention, scale=0.1, **options))(
        batch.q, batch.k, batch.v, pages, batch.meta
    )
    out, own = run(quantized, scale=0.1, **options)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    for buffer, expected_buffer in zip(own, expected_pages, strict=True):
        np.testing.assert_array_equal(buffer[1:], expected_buffer[1:])


def test_huge_logits_stay_finite():
    batch = ragged_batch(decodes=(40,), prefills=((3, 9),))
    check(batch, scale=1e4, tolerance=1e-3)


def test_padding_rows_are_zero():
    for batch in (ragged_batch(decodes=(3, 4), seqs=4, unused=NAN), ragged_batch(**MIXED, unused=NAN)):
        out, _ = run(batch, scale=0.1)
        assert not batch.real.all()
        np.testing.assert_array_equal(out[~batch.real], 0)


def test_tiles_cut_chunks_as_documented():
    batch = ragged_batch(decodes=(9,), prefills=((4, 3), (0, 2)), tokens=8, seqs=4)
    tiles = np.asarray(prefill_tiles(batch.meta, tokens=8, block_q=2))
    np.testing.assert_array_equal(tiles[tiles[:, 2] > 0], [[1, 1, 2, 4], [1, 3, 1, 6], [2, 4, 2, 0]])


def test_pages_update_in_place_when_donated():
    batch = ragged_batch(decodes=(30, 40), page_size=64, kv_heads=4, head_dim=128)
    # Lots of pages, so that a copy of them would dwarf everything else.
    pages = tuple(jnp.zeros((512, *buffer.shape[1:])) for buffer in batch.pages)
    meta, tree = jax.tree.flatten(batch.meta)  # lower() would fill it with placeholders, which are no arrays

    def write(pages, k, v, meta):
        return write_pages(pages, k, v, jax.tree.unflatten(tree, meta))

    compiled = jax.jit(write, donate_argnums=0).lower(pages, batch.k, batch.v, meta).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages[0].nbytes // 100


def specs(*, tokens, seqs, heads, kv_heads, head_dim, page_size, dtype, context=4096, decode_only=False, **of_heads):
    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    arrays = (
        array((tokens,)),
        array((tokens,)),
        array((seqs,)),
        array((seqs + 1,)),
        array((seqs, context // page_size)),
        array(()),
        array(()),
        array((tokens,)),
    )
    new = array((tokens, kv_heads, head_dim), dtype)
    pages = (array((1024, kv_heads, page_size, head_dim), dtype),) * 2
    numbers = {name: array((heads,), jnp.float32) for name in of_heads}
    return array((tokens, heads, head_dim), dtype), new, new, pages, arrays, numbers


# From jax 0.11 on the lowering asks which GPU it is for.
H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")

LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": jnp.bfloat16}
SMOLLM2 = {"heads": 9, "kv_heads": 3, "head_dim": 64, "page_size": 16, "dtype": jnp.bfloat16}
GEMMA3 = {"heads": 4, "kv_heads": 1, "head_dim": 256, "page_size": 128, "dtype": jnp.bfloat16}
GPT_OSS = {"heads": 64, "kv_heads": 8, "head_dim": 64, "page_size": 8, "dtype": jnp.bfloat16, "sinks": True}
BAICHUAN_13B = {"heads": 40, "kv_heads": 40, "head_dim": 128, "page_size": 16, "dtype": jnp.bfloat16, "slopes": True}
PHI = {"heads": 32, "kv_heads": 32, "head_dim": 80, "page_size": 16, "dtype": jnp.float16}
FLOAT32 = {"heads": 6, "kv_heads": 2, "head_dim": 192, "page_size": 16, "dtype": jnp.float32}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (LLAMA_8B, {}),
        (SMOLLM2, {}),
        (GEMMA3, {"window": 512, "softcap": 50.0}),
        (GPT_OSS, {"window": 128}),
        (BAICHUAN_13B, {}),
        (PHI, {}),
        (FLOAT32, {}),
    ],
    ids=["llama-8b", "smollm2", "gemma3", "gpt-oss", "baichuan-13b", "phi", "float32"],
)
@pytest.mark.parametrize("decode_only", [True, False], ids=["decode", "mixed"])
def test_lowers_for_cuda(shape, options, decode_only):
    """Tracing and the Triton lowering run without a GPU: the store, decode, its sum, and prefill in a mixed batch."""

    def attend(q, k, v, pages, arrays, of_heads):
        meta = StepMetadata(*arrays, decode_only=decode_only)
        return paged_attention(q, k, v, pages, meta, scale=0.1, **of_heads, **options)

    tokens, seqs = (4, 4) if decode_only else (512, 64)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=H100)):
        lowered = jax.jit(attend).trace(*specs(tokens=tokens, seqs=seqs, **shape)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @__gpu$xla.gpu.triton") == (3 if decode_only else 4)
