"""Self-attention over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.layers.norm import HeadLayerNorms, LayerNorm, RMSNorm
from jaxllm.models.layers.rope import Angles, rotate
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Pages, StepMetadata
from jaxllm.sharding.layout import Layout, Segment

QKNorm = Literal["rms", "layer", "layer_per_head"]


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position `p` are multiplied by `1 + beta * ln(1 + p // original_length)` (Llama 4, Ministral 3)."""

    beta: float
    original_length: int

    def __call__(self, q: Float[Array, "T H D"], positions: Int[Array, "T"]) -> Float[Array, "T H D"]:
        scale = 1 + self.beta * jnp.log1p((positions // self.original_length).astype(jnp.float32))
        return q * scale.astype(q.dtype)[:, None, None]


def kv_shards(num_kv_heads: int, tp: int) -> int:
    """How many different pieces the KV heads are cut into; with more devices than heads each is replicated."""
    return min(num_kv_heads, tp)


class Attention(nnx.Module):
    """Multi-head, grouped-query or multi-query attention with what families add to it."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        options: BuildOptions,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: QKNorm | None = None,
        norm_eps: float = 1e-6,
        query_scaling: QueryScaling | None = None,
    ):
        tp = options.tp
        shards = kv_shards(num_kv_heads, tp)
        kv = Segment(num_kv_heads * head_dim, shards)
        self.qkv = ColumnLinear(size, Layout((Segment(num_heads * head_dim, tp), kv, kv), tp), options, bias)
        self.output = RowLinear(num_heads * head_dim, size, options, output_bias)
        self.q_norm = _qk_norm(qk_norm, num_heads, head_dim, norm_eps, tp, tp)
        self.k_norm = _qk_norm(qk_norm, num_kv_heads, head_dim, norm_eps, shards, tp)
        self.heads, self.kv_heads = num_heads // tp, num_kv_heads // shards
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.softcap = softcap
        self.query_scaling = query_scaling
        self.kernels = options.kernels

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles | None, pages: Pages, meta: StepMetadata
    ) -> tuple[Float[Array, "T E"], Pages]:
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        if self.query_scaling is not None:
            q = self.query_scaling(q, meta.positions)
        with jax.named_scope("paged_attention"):
            out, pages = self.kernels.attention(
                q, k, v, pages, meta, scale=self.scale, window=self.window, softcap=self.softcap
            )
        return self.output(out.reshape(x.shape[0], -1)), pages

    def _project(self, x: Float[Array, "T E"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[T, H, D]`, keys and values `[T, K, D]`; H and K are this device's own."""
        heads = self.qkv(x).reshape(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = jnp.split(heads, [self.heads, self.heads + self.kv_heads], axis=1)
        return q, k, v


def _qk_norm(kind: QKNorm | None, heads: int, head_dim: int, eps: float, shards: int, tp: int) -> Any:
    if kind is None:
        return None
    if kind == "layer_per_head":
        return HeadLayerNorms(heads, head_dim, eps, shards, tp)
    return (RMSNorm if kind == "rms" else LayerNorm)(head_dim, eps)
