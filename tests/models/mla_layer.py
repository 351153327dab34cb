"""One latent-attention layer, on any number of devices, and what it computes from its definition in float64 NumPy.

JAX_NUM_CPU_DEVICES=4 NPROC=16 python -m tests.models.mla_layer OUT.npz CASE:TP ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.models.layers.attention import MLAConfig, MLAttention
from jaxllm.models.layers.rope import Angles
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import REFERENCE, Kernels, StepMetadata
from jaxllm.pallas_kernels.gpu.attention import latent_attention
from jaxllm.sharding.mesh import TENSOR, build_meshes
from tests.support.gpu_here import INTERPRET

SIZE = 44
EPS = 1e-3
PAGE = 8
COLUMNS = 6
LENGTHS = (41, 9, 24)
"""Tokens of each sequence: over a page's edge, just over one page, and exactly three."""
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 17), (1, 0, 8)),
    ((1, 8, 9), (0, 17, 34), (2, 0, 15)),
    ((0, 34, 35), (2, 15, 23)),
    ((0, 35, 36), (2, 23, 24)),
    *(((0, at, at + 1),) for at in range(36, 41)),
)
"""Chunks (sequence, first token, end) of each step, one-token chunks first: prefill, mixed, decode-only."""


@dataclass(frozen=True)
class Case:
    """A layer. No two of its sizes are alike, so that none can stand in for another."""

    config: MLAConfig
    heads: int
    interleaved: bool = True
    bias: bool = False

    @property
    def scale(self) -> float:
        """Not the usual one: what yarn multiplies it by is the caller's."""
        return 1.3 * self.config.qk_head_dim**-0.5


CASES = {
    "q_lora": Case(MLAConfig(28, 32, 18, 12, 20), heads=4),
    "one_step_queries": Case(MLAConfig(None, 32, 18, 12, 20), heads=8),
    "biases": Case(MLAConfig(28, 30, 10, 14, 22), heads=4, bias=True),
    "halves": Case(MLAConfig(None, 16, 24, 10, 6), heads=12, interleaved=False),
}


def weights_of(case: Case) -> dict[str, np.ndarray]:
    """A checkpoint: random float64 tensors by parameter path."""
    c, rng = case.config, np.random.default_rng(5)
    queries, expanded = case.heads * c.qk_head_dim, case.heads * (c.qk_nope_head_dim + c.v_head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a.weight": (c.kv_lora_rank + c.qk_rope_head_dim, SIZE),
        "kv_a_norm.weight": (c.kv_lora_rank,),
        "kv_b.weight": (expanded, c.kv_lora_rank),
        "output.weight": (SIZE, case.heads * c.v_head_dim),
    }
    if c.q_lora_rank is None:
        shapes["q.weight"] = (queries, SIZE)
    else:
        shapes |= {
            "q_a.weight": (c.q_lora_rank, SIZE),
            "q_a_norm.weight": (c.q_lora_rank,),
            "q_b.weight": (queries, c.q_lora_rank),
        }
    if case.bias:
        shapes |= {f"{name}.bias": (shapes[f"{name}.weight"][0],) for name in ("q_a", "kv_a", "output")}
    return {path: rng.normal(size=shape) * shape[-1] ** -0.5 + ("norm" in path) for path, shape in shapes.items()}


def hidden_states() -> list[np.ndarray]:
    """`[L, E]` of each sequence."""
    rng = np.random.default_rng(6)
    return [rng.normal(size=(length, SIZE)) for length in LENGTHS]


def rotated(x: np.ndarray, positions: np.ndarray, interleaved: bool) -> np.ndarray:
    """`x [L, ..., r]` rotated as complex numbers: channels (2i, 2i + 1), or (i, i + r / 2), make one."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * frequencies(2 * half)
    angle = angle.reshape(len(positions), *(1,) * (x.ndim - 2), half)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    z = (a + 1j * b) * np.exp(1j * angle)
    if not interleaved:
        return np.concatenate([z.real, z.imag], -1)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def frequencies(dim: int) -> np.ndarray:
    """Radians a token."""
    return 100.0 ** -(np.arange(0, dim, 2) / dim)


def oracle(case: Case, x: np.ndarray) -> np.ndarray:
    """The layer's output `[L, E]` for one sequence: every head's keys and values expanded, softmax over all before."""
    c, w = case.config, weights_of(case)

    def project(name: str, y: np.ndarray) -> np.ndarray:
        return y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(name: str, y: np.ndarray) -> np.ndarray:
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"]

    positions = np.arange(len(x))
    q = project("q", x) if c.q_lora_rank is None else project("q_b", norm("q_a_norm", project("q_a", x)))
    q = q.reshape(len(x), case.heads, c.qk_head_dim)
    q_nope, q_rope = q[..., : c.qk_nope_head_dim], rotated(q[..., c.qk_nope_head_dim :], positions, case.interleaved)
    compressed = project("kv_a", x)
    k_rope = rotated(compressed[:, c.kv_lora_rank :], positions, case.interleaved)
    kv = project("kv_b", norm("kv_a_norm", compressed[:, : c.kv_lora_rank])).reshape(len(x), case.heads, -1)
    k_nope, v = kv[..., : c.qk_nope_head_dim], kv[..., c.qk_nope_head_dim :]

    logits = np.einsum("ihd,jhd->hij", q_nope, k_nope) + np.einsum("ihd,jd->hij", q_rope, k_rope)
    logits = np.where(positions[None, :] <= positions[:, None], case.scale * logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return project("output", np.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1))


def metadata(chunks: Sequence[tuple[int, int, int]], tokens: int, table: np.ndarray) -> StepMetadata:
    """A step of `chunks`, padded to `tokens` tokens; decode-only steps are padded to that many sequences."""
    decodes = sum(end - start == 1 for _, start, end in chunks)
    decode_only = decodes == len(chunks)
    seqs = tokens if decode_only else len(LENGTHS) + 1
    positions, seq_ids = np.zeros(tokens, np.int32), np.full(tokens, seqs, np.int32)
    query_start, context_len = np.zeros(seqs + 1, np.int32), np.zeros(seqs, np.int32)
    rows = np.zeros((seqs, COLUMNS), np.int32)
    row = 0
    for index, (seq, start, end) in enumerate(chunks):
        stop = row + end - start
        positions[row:stop], seq_ids[row:stop] = np.arange(start, end), index
        context_len[index], rows[index] = end, table[seq]
        row = stop
        query_start[index + 1 :] = row
    counts = np.int32(decodes), np.int32(len(chunks))
    arrays = (positions, seq_ids, context_len, query_start, rows, *counts, positions + 1)
    return StepMetadata(*map(jnp.asarray, arrays), decode_only=decode_only)


def interpreted(q: Any, latent: Any, weight: Any, *arrays: Any, **options: Any) -> Any:
    """The latent attention of NVIDIA GPUs, on any platform and of any float type."""
    return latent_attention(q, latent, weight.dequantize(), *arrays, **options, interpret=INTERPRET)


INTERPRETED = replace(REFERENCE, latent_attention=interpreted)


def run(case: Case, tp: int, dtype: Any = jnp.float32, kernels: Kernels = REFERENCE) -> list[np.ndarray]:
    """The layer's output `[L, E]` for every sequence, step by step through pages; padding tokens are NaN."""
    c = case.config
    layer = MLAttention(
        SIZE,
        case.heads,
        c,
        BuildOptions(dtype, tp, kernels),
        scale=case.scale,
        norm_eps=EPS,
        qkv_bias=case.bias,
        output_bias=case.bias,
    )
    graph, state = nnx.split(layer)
    treedef = jax.tree.structure(state)
    variables = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    checkpoint = weights_of(case)
    weights, specs = [], []
    for path, variable in variables:
        value, abstract = checkpoint.pop(".".join(str(key.key) for key in path)), variable.get_value()
        assert value.shape == abstract.shape
        (leaf,) = jax.tree.leaves(abstract)
        weights.append(jnp.asarray(value, leaf.dtype))
        specs.append(P(*variable.get_metadata()["axes"]))
    assert not checkpoint, f"no such parameters: {list(checkpoint)}"

    def step(weights: Any, x: jax.Array, pages: Any, meta: StepMetadata) -> Any:
        angle = meta.positions[:, None] * jnp.asarray(frequencies(c.qk_rope_head_dim), jnp.float32)
        angles = Angles(jnp.cos(angle), jnp.sin(angle), case.interleaved)
        return nnx.merge(graph, jax.tree.unflatten(treedef, weights))(x, angles, pages, meta)

    pages_spec = P(None, TENSOR)
    jitted = jax.jit(
        jax.shard_map(
            step,
            mesh=build_meshes(tp)[0],
            in_specs=(specs, P(), pages_spec, P()),
            out_specs=(P(), pages_spec),
            check_vma=False,
        )
    )
    count = len(LENGTHS) * COLUMNS
    table = 1 + np.random.default_rng(7).permutation(count).reshape(len(LENGTHS), COLUMNS).astype(np.int32)
    pages = (jnp.zeros((count + 1, tp, PAGE, c.kv_lora_rank + c.qk_rope_head_dim), dtype),)
    hidden = hidden_states()
    outputs = [np.full(x.shape, np.nan) for x in hidden]
    for chunks in STEPS:
        live = np.concatenate([hidden[seq][start:end] for seq, start, end in chunks])
        tokens = 4 if len(live) <= 4 else 40
        x = np.pad(live, ((0, tokens - len(live)), (0, 0)), constant_values=np.nan)
        out, pages = jitted(weights, jnp.asarray(x, dtype), pages, metadata(chunks, tokens, table))
        row = 0
        for seq, start, end in chunks:
            outputs[seq][start:end] = np.asarray(out[row : row + end - start], np.float64)
            row += end - start
    return outputs


def main(out: str, *cases: str) -> None:
    outputs = {"devices": np.array(jax.device_count())}
    for case in cases:
        name, tp = case.split(":")
        outputs[case] = np.concatenate(run(CASES[name], int(tp)))
    np.savez(out, **outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
