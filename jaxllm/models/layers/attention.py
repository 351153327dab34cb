"""Self-attention over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.layers.norm import HeadLayerNorms, LayerNorm, RMSNorm, WholeRMSNorm
from jaxllm.models.layers.params import param
from jaxllm.models.layers.rope import Angles, rotate
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Norm, Pages, RootMeanSquare, StepMetadata
from jaxllm.sharding.layout import Layout, Segment, split_rows
from jaxllm.sharding.mesh import TENSOR

QKNorm = Literal["rms", "layer", "layer_per_head", "rms_whole"]


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
        qk_norm_rotated: bool = False,
        norm_eps: float = 1e-6,
        query_scaling: QueryScaling | None = None,
        sinks: bool = False,
    ):
        tp = options.tp
        shards = kv_shards(num_kv_heads, tp)
        kv = Segment(num_kv_heads * head_dim, shards)
        self.qkv = ColumnLinear(size, Layout((Segment(num_heads * head_dim, tp), kv, kv), tp), options, bias)
        self.output = RowLinear(num_heads * head_dim, size, options, output_bias)
        self.q_norm = _qk_norm(qk_norm, num_heads, head_dim, norm_eps, tp, options)
        self.k_norm = _qk_norm(qk_norm, num_kv_heads, head_dim, norm_eps, shards, options)
        self.heads, self.kv_heads = num_heads // tp, num_kv_heads // shards
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.softcap = softcap
        self.query_scaling = query_scaling
        self.sinks = param((num_heads,), jnp.float32, (TENSOR,), split_rows(num_heads, tp)) if sinks else None
        self.qk_norm_rotated = qk_norm_rotated
        self.kernels = options.kernels

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles | None,
        pages: Pages,
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "T E"] | None = None,
    ) -> tuple[Float[Array, "T E"], Pages]:
        """Attention of `norm(x)`, added to `residual` if there is one, and the pages with the new keys and values."""
        q, k, v = (part.reshape(x.shape[0], -1, self.head_dim) for part in self.qkv.segments(x, norm))
        options: dict[str, Any] = {}
        knows_norm = self.q_norm is None or (isinstance(self.q_norm, RMSNorm) and not self.qk_norm_rotated)
        if self.kernels.rotates_heads and self.query_scaling is None and knows_norm:
            options |= {"angles": angles, "norms": self._head_norms()}
        else:
            q, k = self._turned(q, k, angles, meta)
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        with jax.named_scope("paged_attention"):
            out, pages = self.kernels.attention(
                q, k, v, pages, meta, scale=self.scale, window=self.window, softcap=self.softcap, **options
            )
        return self.output(out.reshape(x.shape[0], -1), residual=residual), pages

    def _turned(
        self, q: Float[Array, "T H D"], k: Float[Array, "T K D"], angles: Angles | None, meta: StepMetadata
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"]]:
        if not self.qk_norm_rotated:
            q, k = self._normed(q, k)
        q, k = rotate(q, angles), rotate(k, angles)
        if self.qk_norm_rotated:
            q, k = self._normed(q, k)
        return q if self.query_scaling is None else self.query_scaling(q, meta.positions), k

    def _normed(
        self, q: Float[Array, "T H D"], k: Float[Array, "T K D"]
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"]]:
        return (q, k) if self.q_norm is None else (self.q_norm(q), self.k_norm(k))

    def _head_norms(self) -> tuple[RootMeanSquare, RootMeanSquare] | None:
        return None if self.q_norm is None else (self.q_norm.traced, self.k_norm.traced)


def _qk_norm(kind: QKNorm | None, heads: int, head_dim: int, eps: float, shards: int, options: BuildOptions) -> Any:
    if kind is None:
        return None
    if kind == "layer_per_head":
        return HeadLayerNorms(heads, head_dim, eps, shards, options)
    if kind == "rms_whole":
        return WholeRMSNorm(heads * head_dim, eps, shards, options)
    return (RMSNorm if kind == "rms" else LayerNorm)(head_dim, eps, options.kernels)
