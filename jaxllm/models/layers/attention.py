"""Self-attention over paged keys and values, or over those of the step alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.alibi import alibi_slopes
from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.layers.norm import HeadLayerNorms, LayerNorm, RMSNorm, UnitRMSNorm, WholeRMSNorm
from jaxllm.models.layers.params import param
from jaxllm.models.layers.rope import Angles, rotate
from jaxllm.models.layers.taps import tap
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Late, Norm, Pages, Residual, RootMeanSquare, StepMetadata, Unsummed
from jaxllm.sharding.mesh import TENSOR, Layout, Segment, gather_over_tensor, split_rows, tensor_rank, tensor_size

QKNorm = Literal["rms", "layer", "layer_per_head", "rms_whole", "unit"]


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position `p` are multiplied by `1 + beta * ln(1 + (p + first) // original_length)` (Ministral 3).

    With `unrotated_only` it is those of layers without positions (Llama 4, arXiv:2501.19399).
    """

    beta: float
    original_length: int
    first: int = 0
    unrotated_only: bool = False

    def __call__(self, q: Float[Array, "T H D"], positions: Int[Array, "T"]) -> Float[Array, "T H D"]:
        positions = positions + self.first if self.first else positions
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
        chunked: bool = False,
        softcap: float | None = None,
        bias: bool = False,
        qkv_clip: float | None = None,
        output_bias: bool = False,
        qk_norm: QKNorm | None = None,
        qk_norm_rotated: bool = False,
        norm_eps: float = 1e-6,
        query_scaling: QueryScaling | None = None,
        sinks: bool = False,
        alibi: float | None = None,
        value_norm: bool = False,
        keys_are_values: bool = False,
        has_kv: bool = True,
        gate: bool = False,
        causal: bool = True,
        input_size: int | None = None,
    ):
        """Without `causal` a token sees those behind it too: all of a text is in the step, and nothing is kept.

        Without keys and values of its own (`has_kv`) it finds those of an earlier layer in the pages. With `qkv_clip`
        numbers of queries, keys and values that are further than that from 0 become as far as that. `input_size` is of
        what it reads, where that is not `size` as well.
        """
        tp = options.tp
        shards = kv_shards(num_kv_heads, tp)
        kv = Segment(num_kv_heads * head_dim, shards)
        queries = Segment(num_heads * head_dim * (2 if gate else 1), tp)
        parts = (kv,) * (0 if not has_kv else 1 if keys_are_values else 2)
        self.qkv = ColumnLinear(input_size or size, Layout((queries, *parts), tp), options, bias)
        self.output = RowLinear(num_heads * head_dim, size, options, output_bias)
        self.q_norm = _qk_norm(qk_norm, num_heads, head_dim, norm_eps, tp, options)
        self.k_norm = _qk_norm(qk_norm if has_kv else None, num_kv_heads, head_dim, norm_eps, shards, options)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.heads, self.kv_heads = num_heads // tp, num_kv_heads // shards
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.chunked = chunked
        self.softcap = softcap
        self.qkv_clip = qkv_clip
        self.query_scaling = query_scaling
        self.sinks = param((num_heads,), jnp.float32, (TENSOR,), split_rows(num_heads, tp)) if sinks else None
        self.alibi = alibi
        self.gated = gate
        self.qk_norm_rotated = qk_norm_rotated
        self.causal = causal
        self.v_norm = UnitRMSNorm(head_dim, norm_eps, options.kernels) if value_norm and has_kv else None
        self.has_kv = has_kv
        self.kernels = options.kernels

    def __call__(
        self,
        x: Float[Array, "T i"],
        angles: Angles | None,
        pages: Pages,
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Residual = None,
    ) -> tuple[Late, Pages]:
        """Attention of `norm(x)`, added to `residual` if there is one, and the pages with the new keys and values."""
        q, k, v, unsummed = self._heads(x, norm)
        q, gate = (q[:, ::2], q[:, 1::2]) if self.gated else (q, None)
        if not self.causal:
            return self.output(self._among_texts(q, k, v, angles, meta), residual=residual), pages
        if self.has_kv:
            tap("keys", lambda: self._all_heads(self._turned(q, k, angles, meta)[1]))
            tap("values", lambda: self._all_heads(v))
        options: dict[str, Any] = {}
        if self.chunked:
            options["chunked"] = True
        by_head = isinstance(self.q_norm, RMSNorm | UnitRMSNorm)
        knows_norm = self.q_norm is None or (by_head and not self.qk_norm_rotated)
        rotates = self.kernels.rotates_heads and (self.has_kv or self.kernels.native)
        if rotates and self.query_scaling is None and knows_norm:
            options |= {"angles": angles, "norms": self._head_norms()}
            if unsummed is not None:
                options["unsummed"] = unsummed
        else:
            q, k = self._turned(q, k, angles, meta)
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        if self.alibi is not None:
            options["slopes"] = self._slopes(self.alibi)
        with jax.named_scope("paged_attention"):
            out, pages = self.kernels.attention(
                q, k, v, pages, meta, scale=self.scale, window=self.window, softcap=self.softcap, **options
            )
        if gate is not None:
            out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)
        return self.output(out.reshape(x.shape[0], -1), residual=residual), pages

    def _all_heads(self, x: Float[Array, "T K D"]) -> Float[Array, "T n"]:
        """Those of all devices one after another, each once."""
        heads = gather_over_tensor(x.swapaxes(1, 2)).swapaxes(1, 2)  # [T, heads of all devices, D]
        repeats = tensor_size() // kv_shards(self.num_kv_heads, tensor_size())
        return heads[:, ::repeats].reshape(len(x), -1)

    def _slopes(self, steepness: float) -> Float[Array, "H"]:
        """Those of this device's heads."""
        slopes = jnp.asarray(alibi_slopes(self.num_heads, steepness), jnp.float32)
        if self.heads == self.num_heads:
            return slopes
        return lax.dynamic_slice_in_dim(slopes, tensor_rank() * self.heads, self.heads)

    def _among_texts(
        self, q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], angles: Angles | None,
        meta: StepMetadata,
    ) -> Float[Array, "T n"]:  # fmt: skip
        q, k = self._turned(q, k, angles, meta)
        with jax.named_scope("packed_attention"):
            out = self.kernels.packed_attention(
                q, k, v, meta, scale=self.scale, window=self.window, softcap=self.softcap
            )
        return out.reshape(q.shape[0], -1)

    def _heads(
        self, x: Float[Array, "T i"], norm: Norm | None
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"], Unsummed | None]:
        """Queries, keys and values, of which there are none where the pages have them from an earlier layer.

        Behind them what they are the sum of, where a kernel can read it in their place.
        """
        parts, unsummed = self.qkv.late_segments(x, norm)
        if self.qkv_clip is not None:
            parts = [jnp.clip(part, -self.qkv_clip, self.qkv_clip) for part in parts]
        q, *kv = (part.reshape(x.shape[0], -1, self.head_dim) for part in parts)
        if not kv:
            return q, q[:, :0], q[:, :0], None
        k, v = kv[0], kv[-1]
        if self.gated or self.qkv_clip is not None or self.v_norm is not None or len(kv) == 1:
            unsummed = None
        return q, k, v if self.v_norm is None else self.v_norm(v), unsummed

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
        if self.q_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k) if self.has_kv else k

    def _head_norms(self) -> tuple[RootMeanSquare, RootMeanSquare] | None:
        return None if self.q_norm is None else (self.q_norm.traced, (self.k_norm or self.q_norm).traced)


def _qk_norm(kind: QKNorm | None, heads: int, head_dim: int, eps: float, shards: int, options: BuildOptions) -> Any:
    if kind is None:
        return None
    if kind == "layer_per_head":
        return HeadLayerNorms(heads, head_dim, eps, shards, options)
    if kind == "rms_whole":
        return WholeRMSNorm(heads * head_dim, eps, shards, options)
    norms = {"rms": RMSNorm, "layer": LayerNorm, "unit": UnitRMSNorm}
    return norms[kind](head_dim, eps, options.kernels)
