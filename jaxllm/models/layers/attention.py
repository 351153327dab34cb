"""Self-attention over paged keys and values."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.rope import Angles, rotate
from jaxllm.pallas_kernels import AttentionMetadata, Pages, paged_attention
from jaxllm.sharding.layout import Layout, Segment


def kv_shards(num_kv_heads: int, tp: int) -> int:
    """How many different pieces the KV heads are cut into; with more devices than heads each is replicated."""
    return min(num_kv_heads, tp)


class Attention(nnx.Module):
    """Multi-head, grouped-query or multi-query attention, with optional per-head QK norm, window and soft cap."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        tp: int,
        dtype: Any,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        backend: str = "auto",
    ):
        kv = Segment(num_kv_heads * head_dim, kv_shards(num_kv_heads, tp))
        self.qkv = ColumnLinear(size, Layout((Segment(num_heads * head_dim, tp), kv, kv), tp), dtype, bias)
        self.output = RowLinear(num_heads * head_dim, size, dtype, output_bias)
        self.q_norm = RMSNorm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.softcap = softcap
        self.backend = backend

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles, pages: Pages, meta: AttentionMetadata
    ) -> tuple[Float[Array, "T E"], Pages]:
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        with jax.named_scope("paged_attention"):
            out, pages = paged_attention(
                q, k, v, pages, meta, scale=self.scale, window=self.window, softcap=self.softcap, backend=self.backend
            )
        return self.output(out.reshape(x.shape[0], -1)), pages

    def _project(self, x: Float[Array, "T E"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[T, H, D]`, keys and values `[T, K, D]`; H and K are this device's own."""
        heads = self.qkv(x).reshape(x.shape[0], -1, self.head_dim)
        num_q = self.output.weight.shape[1] // self.head_dim
        num_kv = (heads.shape[1] - num_q) // 2
        return heads[:, :num_q], heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]
