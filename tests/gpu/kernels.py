"""Compile each Pallas kernel by itself for one architecture, and say as JSON what registers it takes.

`python -m tests.gpu.kernels ARCHITECTURE [CASE …]`, with the CUDA plugin of PJRT on PYTHONPATH; without cases, all.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.models.layers.rope import Angles
from jaxllm.pallas_kernels import Mixture, RootMeanSquare, SSDInputs, Unsummed
from jaxllm.pallas_kernels.gpu.attention import absorb_and_store, expand_heads, rotate_and_store
from jaxllm.pallas_kernels.gpu.experts import add_norm
from jaxllm.pallas_kernels.gpu.few_rows import few_rows_of_blocks, few_rows_of_groups
from jaxllm.pallas_kernels.gpu.flash import decode_attention, prefill_attention
from jaxllm.pallas_kernels.gpu.matmul import choose_tile_rows, integer_matmul, matmul
from jaxllm.pallas_kernels.gpu.packed import grouped_matmul, late_matmul
from jaxllm.pallas_kernels.gpu.route import RowLists, most_tiles, route
from jaxllm.pallas_kernels.gpu.states import delta_rule
from jaxllm.pallas_kernels.gpu.states import ssd_decode as decode_states
from jaxllm.pallas_kernels.gpu.tile import AttentionSpec, PerHead
from jaxllm.pallas_kernels.matrices import E2M1
from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata
from jaxllm.pallas_kernels.pages import QUANTIZED, SCALE_BYTES
from jaxllm.quantization.coded import Coded, CodedKind, fp8_blocks, groups, per_channel
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.gpu_tiles import BLOCKS, gpu_tiled
from jaxllm.quantization.stored import E8M0, FP8, INT8
from jaxllm.quantization.weight import DenseKind, Weight
from tests.gpu.ptx import DUMP, Taken, taken_by_kernels
from tests.gpu.targets import mesh_of

BF16, F16, F32 = (np.dtype(dtype) for dtype in (jnp.bfloat16, np.float16, np.float32))

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its abstract arguments."""


def array(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def metadata(tokens: int, seqs: int, table_width: int) -> StepMetadata:
    one = array()
    return StepMetadata(
        array(tokens), array(tokens), array(seqs), array(seqs + 1), array(seqs, table_width), one, one, array(tokens),
        decode_only=tokens == seqs,
    )  # fmt: skip


def attention(
    heads: int, kv_heads: int, head_dim: int, pages: str = "", *, page_size: int = 16, dtype: np.dtype = BF16,
    latent_dim: int | None = None, normed: bool = False, sinks: bool = False, slopes: bool = False,
    window: int | None = None, softcap: float | None = None, chunked: bool = False,
) -> Program:  # fmt: skip
    """What stands before attention, decode of 64 rows, and prefill of tiles with as few and as many rows as there are.

    `pages` are of the heads' type, or "int8" or "fp8".
    """
    spec = AttentionSpec(
        heads, kv_heads, head_dim, page_size, dtype, 0.1, window, softcap, latent_dim, bool(pages), chunked
    )
    page = array(
        1024, kv_heads, page_size, head_dim + SCALE_BYTES * bool(pages), dtype=QUANTIZED[pages] if pages else dtype
    )

    def run(q: Any, new: Any, pages: Any, meta: StepMetadata, few: StepMetadata, angles: Any, norms: Any, own: PerHead):
        if latent_dim is None:
            rotated = Angles(*angles, interleaved=False)
            normers = tuple(RootMeanSquare(weight, 1e-6) for weight in norms) if norms else None
            q, pages = rotate_and_store(q, new, new, pages, meta, spec, rotated, normers)
        decoded = decode_attention(q[:64], pages, meta, spec, own)
        small = prefill_attention(q[: len(few.positions)], pages, few, spec, own)
        return decoded, small, prefill_attention(q, pages, meta, spec, own), pages

    tokens, few = 512, max(1, 16 // spec.tile_heads)
    width = 8192 // page_size
    return run, (
        array(tokens, heads, head_dim, dtype=dtype),
        array(tokens, kv_heads, head_dim, dtype=dtype),
        (page,) * (1 if latent_dim else 2),
        metadata(tokens, 64, width),
        metadata(few, few, width),
        (array(tokens, head_dim // 2, dtype=F32),) * 2,
        (array(head_dim, dtype=F32),) * 2 if normed else None,
        PerHead(*(array(heads, dtype=F32) if given else None for given in (sinks, slopes))),
    )


def latents(heads: int, pages: str = "") -> Program:
    """What stands before attention over DeepSeek's latents, and behind it, of few rows and many."""
    kept, rotary, still, values = 512, 64, 128, 128
    size = kept + rotary
    spec = AttentionSpec(heads, 1, size, 16, BF16, 0.1, None, None, kept, quantized=bool(pages))
    page = array(1024, 1, 16, size + SCALE_BYTES * bool(pages), dtype=QUANTIZED[pages] if pages else BF16)

    def run(expand: Any, weight: Any, page: Any, *steps: Any) -> Any:
        norm, found = RootMeanSquare(weight, 1e-6), []
        for q, latent, angles, meta in steps:
            rotated = Angles(*angles, interleaved=True)
            q, (page,) = absorb_and_store(q, latent, expand, norm, rotated, (page,), meta, spec, one_product=False)
            found.append((expand_heads(q[..., :kept], expand, still), q, page))
        return found

    steps = [
        (
            array(n, heads, still + rotary, dtype=BF16),
            array(n, size, dtype=BF16),
            (array(n, rotary // 2, dtype=F32),) * 2,
            metadata(n, 16, 512),
        )
        for n in (16, 512)
    ]
    return run, (array(heads * (still + values), kept, dtype=BF16), array(kept, dtype=F32), page, *steps)


def experts(weight: Weight, activation: str = "silu") -> Program:
    """Tiles of 16, 64 and 128 rows, with the activation and without, of rows that are read as they are or shared."""
    count, _, inputs = weight.shape

    def run(weight: Weight, *arrays: Any) -> Any:
        (matrix,) = weight.kernel_matrices or ()
        found = []
        for x, lists in zip(arrays[::2], arrays[1::2], strict=True):
            rows = 2 * x.shape[0]
            found.append(matmul(x, matrix, lists, rows, activation=ACTIVATIONS[activation], dtype=x.dtype))
            found.append(matmul(jnp.repeat(x, 2, axis=0), matrix, lists, rows))
        return found

    given: list[Any] = []
    for rows in (2 * count, 64 * count, 128 * count):
        tiles = most_tiles(rows, count, choose_tile_rows(rows, count))
        given += [array(rows // 2, inputs, dtype=BF16), RowLists(array(count * rows // 2), array(tiles, 3))]
    return run, (weight, *given)


def in_blocks(count: int, outputs: int, inputs: int) -> Coded:
    codes = array(count, outputs // 128, 128, inputs, dtype=FP8)
    scale = array(count, outputs // 128, inputs // 128, dtype=F32)
    return Coded(codes, scale, None, fp8_blocks(BF16, 128, 128).coding, BF16)


def packed(kind: GgufKind | CodedKind, inputs: int = 2048, long_inputs: int = 14336) -> Program:
    """In tiles: few rows of one part and of several, a hundred and more; experts, with few rows and many."""

    def run(x: Any, some: Any, many: Any, weight: Any, long_x: Any, long: Any, stack: Any, *arrays: Any) -> Any:
        found = [late_matmul(each, [weight]) for each in (x, some, many)]
        found.append(late_matmul(long_x, [long]))
        for x, lists in zip(arrays[::2], arrays[1::2], strict=True):
            options = {"activation": ACTIVATIONS["silu"], "dtype": x.dtype}
            rows = 2 * x.shape[0]
            found.append(grouped_matmul(x, stack, lists, rows, choose_tile_rows(rows, 8), **options))
        return found

    def made(*shape: int) -> Any:
        return gpu_tiled(kind, [shape[-2]], shape[-1]).abstract(shape)

    given: list[Any] = []
    for rows in (16, 2048):
        tiles = most_tiles(rows, 8, choose_tile_rows(rows, 8))
        given += [array(rows // 2, inputs, dtype=kind.dtype), RowLists(array(8 * rows // 2), array(tiles, 3))]
    return run, (
        *(array(rows, inputs, dtype=kind.dtype) for rows in (2, 100, 300)), made(4096, inputs),
        array(16, long_inputs, dtype=kind.dtype), made(4096, long_inputs), made(8, 1536, inputs), *given,
    )  # fmt: skip


def beside(*types: str) -> Program:
    """Queries, keys and values in tiles of several formats, for few rows and many."""

    def run(matrices: Any, *rows: Any) -> Any:
        return [late_matmul(x, matrices) for x in rows]

    kinds = [gpu_tiled(GgufKind(type_, BF16), [1024], 4096) for type_ in types]
    matrices = [kind.abstract((1024, 4096)) for kind in kinds]
    return run, (matrices, *(array(rows, 4096, dtype=BF16) for rows in (2, 16, 100)))


def few(kind: CodedKind) -> Program:
    """Rows of one part, and of several; and those of experts, with an activation and without."""
    dtype, (count, _, size) = kind.dtype, EXPERTS
    rows = 32

    def run(one: Any, short: Weight, many: Any, long: Weight, x: Any, experts: Weight, lists: RowLists) -> Any:
        found = []
        for rows_of, weight in ((one, short), (many, long)):
            (matrix,) = weight.kernel_matrices or ()
            found.append(few_rows_of_groups(rows_of, matrix))
        (matrix,) = experts.kernel_matrices or ()
        for activation in (jax.nn.silu, None):
            found.append(few_rows_of_groups(x, matrix, lists, rows, activation=activation, dtype=dtype))
        return found

    lists = RowLists(array(count * rows), array(most_tiles(rows, count, 16), 3))
    return run, (
        array(2, 2048, dtype=dtype), kind.abstract((4096, 2048)),
        array(16, 14336, dtype=dtype), kind.abstract((4096, 14336)),
        array(rows // 2, size, dtype=dtype), kind.abstract(EXPERTS), lists,
    )  # fmt: skip


def few_of_blocks(dtype: np.dtype) -> Program:
    """Rows of e4m3 in blocks, of one part and of several, one and 16; and those of experts, with an activation and
    without."""
    short, long = (
        jax.tree.map(lambda leaf: array(*leaf.shape[1:], dtype=leaf.dtype), in_blocks(1, outputs, inputs))
        for outputs, inputs in ((65536, 2048), (4096, 14336))
    )
    count, _, size = EXPERTS
    rows = 32

    def run(one: Any, short: Weight, many: Any, long: Weight, x: Any, experts: Weight, lists: RowLists) -> Any:
        found = []
        for rows_of, weight in ((one, short), (many, long)):
            (matrix,) = replace(weight, dtype=dtype).kernel_matrices or ()
            found.append(few_rows_of_blocks(rows_of, matrix, dtype=dtype))
        (matrix,) = replace(experts, dtype=dtype).kernel_matrices or ()
        for activation in (jax.nn.silu, None):
            found.append(few_rows_of_blocks(x, matrix, lists, rows, activation=activation, dtype=dtype))
        return found

    lists = RowLists(array(count * rows), array(most_tiles(rows, count, 16), 3))
    return run, (
        array(1, 2048, dtype=dtype), short, array(16, 14336, dtype=dtype), long,
        array(rows // 2, size, dtype=dtype), in_blocks(*EXPERTS), lists,
    )  # fmt: skip


def integers() -> Program:
    """Tiles of 16 rows in parts, of 64 and 128; and those of experts, with an activation and without."""
    kind = per_channel(INT8, BF16, activations=True)
    count, _, size = EXPERTS
    rows = 32

    def run(weight: Weight, few: Any, some: Any, many: Any, experts: Weight, x: Any, lists: RowLists) -> Any:
        (matrix,) = weight.kernel_matrices or ()
        found = [integer_matmul(x, matrix, dtype=BF16) for x in (few, some, many)]
        (matrix,) = experts.kernel_matrices or ()
        for activation in (jax.nn.silu, None):
            found.append(integer_matmul(x, matrix, lists, rows, 16, activation=activation, dtype=BF16))
        return found

    lists = RowLists(array(count * rows), array(most_tiles(rows, count, 16), 3))
    return run, (
        kind.abstract((4096, 14336)), *(array(n, 14336, dtype=BF16) for n in (1, 64, 512)), kind.abstract(EXPERTS),
        array(rows // 2, size, dtype=BF16), lists,
    )  # fmt: skip


def delta(key_heads: int, heads: int, size: int) -> Program:
    """A token of each of 64 sequences."""
    keys, seqs = key_heads * size, 64

    def run(qkv: Any, decay: Any, beta: Any, buffer: Any, meta: StepMetadata) -> Any:
        return delta_rule(qkv, decay, beta, buffer, meta, key_heads=key_heads)

    numbers = array(seqs)
    rows = StateRows(numbers, array(seqs, dtype=np.bool_), numbers, numbers, numbers)
    return run, (
        array(seqs, 2 * keys + heads * size, dtype=F32),
        array(seqs, heads, dtype=F32),
        array(seqs, heads, dtype=F32),
        array(2 * seqs, heads, size, size, dtype=F32),
        replace(metadata(seqs, seqs, 8), states=rows),
    )


def norm(size: int) -> Program:
    """Behind a layer, behind a product by two parts and by eight, and behind a mixture of six experts without shared
    ones and with them."""

    def run(x: Any, weight: Any, few: Any, parts: Any, weights: Any, outputs: Any) -> Any:
        norm, alone = RootMeanSquare(weight, 1e-5), Mixture(weights, outputs)
        sums = (x, Unsummed(few), Unsummed(parts), alone, replace(alone, shared=x.astype(F32)))
        return [add_norm(x, out, norm) for out in sums]

    tokens, used = 64, 6
    return run, (
        array(tokens, size, dtype=BF16),
        array(size, dtype=F32),
        array(2, tokens, size, dtype=F32),
        array(8, tokens, size, dtype=F32),
        array(tokens, used, dtype=F32),
        array(tokens, used, size, dtype=F32),
    )


def routing(config: MoEConfig) -> Program:
    """Of one token, of 16 and of 2048."""

    def run(bias: Any, *arrays: Any) -> Any:
        own = bias if config.correction_bias else None
        return [
            route(logits, own, 0, config.num_experts, config, 16, meta)
            for logits, meta in zip(arrays[::2], arrays[1::2], strict=True)
        ]

    steps = [(array(n, config.num_experts, dtype=F32), metadata(n, n, 8)) for n in (1, 16, 2048)]
    return run, (array(config.num_experts, dtype=F32), *(argument for step in steps for argument in step))


def states(heads: int, dim: int, groups: int, size: int) -> Program:
    """A token of each of 64 sequences, with states of this shape."""
    tokens, rows = 64, 80
    rows_of = StateRows(array(tokens), array(tokens, dtype=bool), array(tokens), array(tokens), array(tokens))
    shared = array(tokens, groups, size, dtype=F32)
    inputs = SSDInputs(
        array(tokens, heads, dim, dtype=F32), array(tokens, heads, dtype=F32), array(heads, dtype=F32), shared, shared,
        array(heads, dtype=F32),
    )  # fmt: skip
    meta = replace(metadata(tokens, tokens, 8), states=rows_of)
    return decode_states, (inputs, array(rows, heads, dim, size, dtype=F32), meta)


EXPERTS = (64, 768, 2048)
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
PAGES = ("", "int8", "fp8")
SHAPES: dict[str, tuple[Any, Sequence[str]]] = {
    "Llama-3.1-8B": (partial(attention, 32, 8, 128), PAGES),
    "Qwen3-30B-A3B": (partial(attention, 32, 4, 128, normed=True), ("",)),
    "gemma-3-1b": (partial(attention, 4, 1, 256, page_size=128, window=512, softcap=50.0, normed=True), PAGES),
    "gemma-4-26B, without a window": (partial(attention, 16, 2, 512, normed=True), PAGES),
    "chunks": (partial(attention, 32, 8, 128, window=8192, chunked=True), ("",)),
    "gpt-oss-20b": (partial(attention, 64, 8, 64, page_size=8, sinks=True, window=128), PAGES),
    "baichuan-13b": (partial(attention, 40, 40, 128, slopes=True), PAGES),
    "SmolLM2-135M": (partial(attention, 9, 3, 64), ("",)),
    "phi-2": (partial(attention, 32, 32, 80, dtype=F16), ("",)),
    "float32": (partial(attention, 6, 2, 192, dtype=F32), ("",)),
    "DeepSeek-V3": (partial(attention, 128, 1, 576, latent_dim=512), PAGES),
}
"""Attention as models ask for it, and the kinds of pages that it is compiled with."""
ROUTERS = {
    "Qwen3-30B-A3B": MoEConfig(num_experts=128, top_k=8, hidden=768, renormalize=True),
    "Qwen3-Next": MoEConfig(num_experts=512, top_k=10, hidden=512, renormalize=True),
    "Mixtral": MoEConfig(num_experts=8, top_k=2, hidden=14336, renormalize=True),
    "DeepSeek-V2": MoEConfig(num_experts=160, top_k=6, hidden=1536, num_groups=8, top_groups=3, scale=16.0),
    "DeepSeek-V3": MoEConfig(
        num_experts=256, top_k=8, hidden=2048, scoring="sigmoid", correction_bias=True, num_groups=8, top_groups=4,
        group_score="top2_sum", renormalize=True, renormalize_eps=1e-20, scale=2.5,
    ),
}  # fmt: skip

CASES: dict[str, Callable[[], Program]] = {
    **{
        f"{model} {pages or 'plain'} pages": partial(make, pages=pages)
        for model, (make, kinds) in SHAPES.items()
        for pages in kinds
    },
    "experts bf16": lambda: experts(DenseKind(BF16).abstract(EXPERTS)),
    "experts bf16, gelu by tanh": lambda: experts(DenseKind(BF16).abstract(EXPERTS), "gelu_pytorch_tanh"),
    "experts f32": lambda: experts(DenseKind(F32).abstract(EXPERTS)),
    "experts int8": lambda: experts(per_channel(INT8, BF16).abstract(EXPERTS)),
    "experts fp8": lambda: experts(per_channel(FP8, BF16).abstract(EXPERTS)),
    "experts fp8 in blocks": lambda: experts(in_blocks(*EXPERTS)),
    "experts 4 bits": lambda: experts(groups(BF16).abstract(EXPERTS)),
    "experts 4 bits, symmetric, by 128": lambda: experts(groups(BF16, 4, 128, symmetric=True).abstract(EXPERTS)),
    "experts 4 bits, levels": lambda: experts(groups(BF16, 4, 32, True, levels=FP4).abstract(EXPERTS)),
    "experts 2 bits": lambda: experts(groups(BF16, 2).abstract(EXPERTS)),
    "experts 8 bits": lambda: experts(groups(BF16, 8).abstract(EXPERTS)),
    "few rows, 4 bits": lambda: few(groups(BF16)),
    "few rows, 4 bits, symmetric, by 128": lambda: few(groups(BF16, 4, 128, symmetric=True)),
    "few rows, 4 bits, levels": lambda: few(groups(BF16, 4, 32, True, levels=FP4)),
    "few rows, 4 bits, f32": lambda: few(groups(F32)),
    "few rows, 2 bits": lambda: few(groups(BF16, 2)),
    "few rows, 8 bits": lambda: few(groups(BF16, 8)),
    "integers": integers,
    "few rows, fp8 in blocks": lambda: few_of_blocks(BF16),
    "few rows, fp8 in blocks, f16": lambda: few_of_blocks(F16),
    **{f"in tiles, {type_}": partial(packed, GgufKind(type_, BF16)) for type_ in BLOCKS},
    "in tiles, Q5_1 of 1408 inputs": lambda: packed(GgufKind("Q5_1", BF16), 1408, 14208),
    "in tiles, Q5_1 of 704 inputs": lambda: packed(GgufKind("Q5_1", BF16), 704, 7104),
    "in tiles, Q5_0 of 896 inputs": lambda: packed(GgufKind("Q5_0", BF16), 896, 352),
    "in tiles, Q5_0 of 1120 inputs": lambda: packed(GgufKind("Q5_0", BF16), 1120, 14368),
    "in tiles, Q4_0 of 1120 inputs": lambda: packed(GgufKind("Q4_0", BF16), 1120, 14368),
    "in tiles, Q4_1 of 1120 inputs": lambda: packed(GgufKind("Q4_1", BF16), 1120, 14368),
    "in tiles, 4 bits of 1120 inputs": lambda: packed(groups(BF16), 1120, 14368),
    "in tiles, MXFP4 of 1120 inputs": lambda: packed(groups(BF16, 4, 32, True, E8M0, E2M1), 1120, 14368),
    "in tiles, 2 bits of 1120 inputs": lambda: packed(groups(BF16, 2), 1120, 14368),
    "in tiles, Q4_K beside Q6_K": lambda: beside("Q4_K", "Q6_K"),
    "in tiles, Q5_K beside Q6_K": lambda: beside("Q5_K", "Q6_K"),
    "in tiles, Q4_K in float16": lambda: packed(GgufKind("Q4_K", F16)),
    "in tiles, 4 bits": lambda: packed(groups(BF16)),
    "in tiles, 4 bits by 128": lambda: packed(groups(BF16, 4, 128)),
    "in tiles, 4 bits, symmetric, by 128": lambda: packed(groups(BF16, 4, 128, symmetric=True)),
    "in tiles, 8 bits by 128": lambda: packed(groups(BF16, 8, 128)),
    "in tiles, NVFP4": lambda: packed(groups(BF16, 4, 16, True, FP8, E2M1)),
    "in tiles, MXFP4": lambda: packed(groups(BF16, 4, 32, True, E8M0, E2M1)),
    **{f"latents, {pages or 'plain'}": partial(latents, 128, pages) for pages in PAGES},
    "latents of 16 heads": lambda: latents(16),
    "delta rule of 128": lambda: delta(16, 32, 128),
    "delta rule of 256": lambda: delta(2, 6, 256),
    "norm of 1024": lambda: norm(1024),
    "norm of 2048": lambda: norm(2048),
    "norm of 4096": lambda: norm(4096),
    "norm of 16384": lambda: norm(16384),
    "states of Granite 4": lambda: states(48, 64, 1, 128),
    "states of Falcon-H1": lambda: states(32, 128, 2, 256),
    "states of Nemotron Nano": lambda: states(128, 80, 8, 128),
    **{f"routing as {name}": partial(routing, config) for name, config in ROUTERS.items()},
}
"""By name: a program of kernels, made when it is asked for."""


SPILLING: dict[str, Callable[[], Program]] = {"float32 int8 pages": lambda: attention(6, 2, 192, "int8", dtype=F32)}
"""What an A100's registers do not hold: `choose_kernels` leaves it to XLA."""


def compile_case(program: Program, architecture: str) -> dict[str, Taken]:
    """The registers of each kernel of a program compiled for an architecture."""
    function, arguments = program
    mesh = mesh_of(architecture)
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), arguments)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with tempfile.TemporaryDirectory() as directory:
        jax.jit(mapped).lower(*placed).compile(compiler_options={"xla_dump_to": directory, **DUMP})
        return taken_by_kernels(Path(directory), architecture)


def main(architecture: str, *cases: str) -> None:
    for case in cases or CASES:
        try:
            found: Any = compile_case((CASES | SPILLING)[case](), architecture)
        except jax.errors.JaxRuntimeError as error:
            found = str(error)
        print(json.dumps({case: found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
