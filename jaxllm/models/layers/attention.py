"""Self-attention, plain and latent, over paged keys and values or over those of the step alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.hands import tap
from jaxllm.models.layers.linear import ColumnLinear, Linear, RowLinear, param
from jaxllm.models.layers.norm import HeadLayerNorms, LayerNorm, RMSNorm, UnitRMSNorm, WholeRMSNorm
from jaxllm.models.layers.rope import Angles, rotate
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Late, Norm, Pages, Residual, StepMetadata, Unsummed
from jaxllm.sharding.mesh import TENSOR, Layout, Segment, gather_over_tensor, split_rows, tensor_rank, tensor_size

USUAL_STEEPNESS = 8.0  # of ALiBi (arXiv:2108.12409): the paper's, and that of almost all models


def alibi_slopes(heads: int, steepness: float = USUAL_STEEPNESS) -> Float[np.ndarray, "H"]:
    """ALiBi: how much the logits of each head fall with every token of distance.

    Of a power of two of heads, head `h` (from 1 on) has `2 ** (-steepness * h / heads)`. Of another number the first
    have those of the next lower power of two, and the rest every second one of twice that power.
    """
    power = 1 << heads.bit_length() - 1
    between = np.arange(1, 2 * (heads - power), 2)
    return 2.0 ** (-steepness * np.concatenate([np.arange(1, power + 1) / power, between / (2 * power)]))


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
    """The number of different pieces of the KV heads; with more devices than heads each is replicated."""
    return min(num_kv_heads, tp)


class Attention(nnx.Module):
    """Multi-head, grouped-query or multi-query attention with what families add to it."""

    def __init__(
        self, size: int, num_heads: int, num_kv_heads: int, head_dim: int, options: BuildOptions, *,
        scale: float | None = None, window: int | None = None, chunked: bool = False, softcap: float | None = None,
        bias: bool = False, qkv_clip: float | None = None, output_bias: bool = False, qk_norm: QKNorm | None = None,
        qk_norm_rotated: bool = False, norm_eps: float = 1e-6, query_scaling: QueryScaling | None = None,
        sinks: bool = False, alibi: float | None = None, value_norm: bool = False, keys_are_values: bool = False,
        has_kv: bool = True, gate: bool = False, causal: bool = True, input_size: int | None = None,
        sees_images: bool = False,
    ):  # fmt: skip
        """Without `causal` a token sees those after it too: all of a text is in the step, and nothing is kept.

        Without keys and values of its own (`has_kv`) it finds those of an earlier layer in the pages. `qkv_clip` is how
        far from 0 queries, keys and values may be. `input_size` is of what it reads, where that is not `size` as well.
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
        self.heads, self.head_dim = num_heads // tp, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.chunked, self.softcap = window, chunked, softcap
        self.qkv_clip, self.query_scaling = qkv_clip, query_scaling
        self.sinks = param((num_heads,), jnp.float32, (TENSOR,), split_rows(num_heads, tp)) if sinks else None
        self.alibi, self.gated, self.causal, self.has_kv = alibi, gate, causal, has_kv
        self.sees_images = sees_images
        self.qk_norm_rotated = qk_norm_rotated
        self.v_norm = UnitRMSNorm(head_dim, norm_eps, options.kernels) if value_norm and has_kv else None
        self.kernels = options.kernels

    def __call__(
        self, x: Float[Array, "T i"], angles: Angles | None, pages: Pages, meta: StepMetadata, *,
        norm: Norm | None = None, residual: Residual = None,
    ) -> tuple[Late, Pages]:  # fmt: skip
        """Attention of `norm(x)`, added to `residual` if there is one, and the pages with the new keys and values."""
        q, k, v, unsummed = self._heads(x, norm)
        q, gate = (q[:, ::2], q[:, 1::2]) if self.gated else (q, None)
        if not self.causal:
            q, k = self._turned(q, k, angles, meta)
            with jax.named_scope("packed_attention"):
                out = self.kernels.packed_attention(
                    q, k, v, meta, scale=self.scale, window=self.window, softcap=self.softcap
                )
            return self.output(out.reshape(x.shape[0], -1), residual=residual), pages
        if self.has_kv:
            tap("keys", lambda: self._all_heads(self._turned(q, k, angles, meta)[1]))
            tap("values", lambda: self._all_heads(v))
        options: dict[str, Any] = {"chunked": True} if self.chunked else {}
        by_head = isinstance(self.q_norm, RMSNorm)
        knows_norm = self.q_norm is None or (by_head and not self.qk_norm_rotated)
        rotates = self.kernels.rotates_heads and (self.has_kv or self.kernels.native)
        if rotates and self.query_scaling is None and knows_norm:
            norms = None if self.q_norm is None else (self.q_norm.traced, (self.k_norm or self.q_norm).traced)
            options |= {"angles": angles, "norms": norms}
            if unsummed is not None:
                options["unsummed"] = unsummed
        else:
            q, k = self._turned(q, k, angles, meta)
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        if self.alibi is not None:
            options["slopes"] = self._slopes(self.alibi)
        if self.sees_images and meta.visible_until is not None:
            options["visible_until"] = meta.visible_until
        with jax.named_scope("paged_attention"):
            out, pages = self.kernels.attention(
                q, k, v, pages, meta, scale=self.scale, window=self.window, softcap=self.softcap, **options
            )
        if gate is not None:
            out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)
        return self.output(out.reshape(x.shape[0], -1), residual=residual), pages

    def _all_heads(self, x: Float[Array, "T K D"]) -> Float[Array, "T n"]:
        heads = gather_over_tensor(x.swapaxes(1, 2)).swapaxes(1, 2)  # [T, heads of all devices, D]
        repeats = tensor_size() // kv_shards(self.num_kv_heads, tensor_size())
        return heads[:, ::repeats].reshape(len(x), -1)

    def _slopes(self, steepness: float) -> Float[Array, "H"]:
        slopes = jnp.asarray(alibi_slopes(self.num_heads, steepness), jnp.float32)
        if self.heads == self.num_heads:
            return slopes
        return lax.dynamic_slice_in_dim(slopes, tensor_rank() * self.heads, self.heads)

    def _heads(
        self, x: Float[Array, "T i"], norm: Norm | None
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"], Unsummed | None]:
        """Queries, keys and values, without the last two where the pages have them from an earlier layer.

        The last result is what they are the sum of, where a kernel can read it in their place.
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


def _qk_norm(kind: QKNorm | None, heads: int, head_dim: int, eps: float, shards: int, options: BuildOptions) -> Any:
    if kind is None:
        return None
    if kind == "layer_per_head":
        return HeadLayerNorms(heads, head_dim, eps, shards, options)
    if kind == "rms_whole":
        return WholeRMSNorm(heads * head_dim, eps, shards, options)
    norms = {"rms": RMSNorm, "layer": LayerNorm, "unit": UnitRMSNorm}
    return norms[kind](head_dim, eps, options.kernels)


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of latent attention, under the names that `config.json` has for them.

    Attributes:
        q_lora_rank: size of the queries' latent; None where queries are projected in one step.
        kv_lora_rank: size of the latent that keys and values are expanded from.
        qk_nope_head_dim, qk_rope_head_dim: channels of a head's query and key without and with rotation.
        v_head_dim: channels of a head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Channels that are cached for a token: the latent, then the rotated part of the key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class MLAttention(nnx.Module):
    """Attention whose keys and values are expanded from one latent a token, in the absorbed form (arXiv:2405.04434).

    A head's key is `[W_UK c, k]` and its value `W_UV c`, where the latent `c` and the rotated `k` are shared by all
    heads and are all that is cached. `q . (W_UK c) = (W_UK^T q) . c`, and a weighted sum of `W_UV c` is `W_UV` of the
    weighted sum of `c`; so queries go to the latent's space, attention runs there with one KV head, and its output
    comes back through `W_UV`. `kv_b` holds both: a head's `qk_nope_head_dim` rows of `W_UK`, then its `v_head_dim`
    rows of `W_UV`.

    With DeepSeek's sizes a decode step reads 576 channels a cached token, whatever the number of heads. Prefills in
    chunks of up to about 170 tokens over a long context are cheaper than with expanded keys and values; the attention
    of much longer chunks costs up to 3.4 times as much. Heads are divided over the tensor axis; the latent is computed
    and cached on every device.
    """

    def __init__(
        self, size: int, num_heads: int, config: MLAConfig, options: BuildOptions, *, scale: float, norm_eps: float,
        qkv_bias: bool = False, output_bias: bool = False, query_scaling: QueryScaling | None = None,
    ):  # fmt: skip
        """`qkv_bias` is one on the products that make latents (`q_a`, `kv_a`), `norm_eps` is of the latents' norms."""
        query_rows = split_rows(num_heads * config.qk_head_dim, options.tp)
        if config.q_lora_rank is None:
            self.q = ColumnLinear(size, query_rows, options)
        else:
            self.q_a = Linear(size, config.q_lora_rank, options, qkv_bias)
            self.q_a_norm = RMSNorm(config.q_lora_rank, norm_eps, options.kernels)
            self.q_b = ColumnLinear(config.q_lora_rank, query_rows, options)
        self.kv_a = Linear(size, config.latent_dim, options, qkv_bias)
        self.kv_a_norm = RMSNorm(config.kv_lora_rank, norm_eps, options.kernels)
        self.expanded = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b = ColumnLinear(
            config.kv_lora_rank, split_rows(num_heads * self.expanded, options.tp), options, adaptable=False
        )
        self.output = RowLinear(num_heads * config.v_head_dim, size, options, output_bias)
        self.heads, self.config = num_heads // options.tp, config
        self.scale, self.query_scaling = scale, query_scaling
        self.kernels = options.kernels

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles | None, pages: Pages, meta: StepMetadata, *,
        norm: Norm | None = None, residual: Residual = None,
    ) -> tuple[Late, Pages]:  # fmt: skip
        """Attention of `norm(x)`, added to `residual` if there is one, and the pages with the new latents."""
        x = x if norm is None else norm(x)
        queries = self.q(x) if self.config.q_lora_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        queries = queries.reshape(x.shape[0], self.heads, self.config.qk_head_dim)  # without rotation first
        if self.query_scaling is not None:
            queries = self.query_scaling(queries, meta.positions)
        latent, kv_b = self.kv_a(x), self.kv_b.weight.get_value()
        with jax.named_scope("paged_attention"):
            done = self.kernels.latent_attention(
                queries, latent, kv_b, self.kv_a_norm.traced, angles, pages, meta,
                scale=self.scale, one_product=self.config.q_lora_rank is None,
            )  # fmt: skip
        out, pages = done or self._attend(queries, latent, kv_b, angles, pages, meta)
        return self.output(out.reshape(x.shape[0], -1), residual=residual), pages

    def _attend(
        self, queries: Float[Array, "T H d"], latent: Float[Array, "T D"], kv_b: Any, angles: Angles | None,
        pages: Pages, meta: StepMetadata,
    ) -> tuple[Float[Array, "T H Dv"], Pages]:  # fmt: skip
        config = self.config
        q_nope, q_rope = jnp.split(queries, [config.qk_nope_head_dim], axis=-1)
        absorbed = kv_b.absorb_heads(q_nope, self.expanded, slice(config.qk_nope_head_dim))
        q = jnp.concatenate([absorbed, rotate(q_rope, angles)], axis=-1)
        with jax.named_scope("paged_attention"):
            out, pages = self.kernels.attention(
                q, self._keys(latent, angles), None, pages, meta, scale=self.scale, value_dim=config.kv_lora_rank
            )
        return kv_b.expand_heads(out, self.expanded, slice(config.qk_nope_head_dim, None)), pages

    def _keys(self, latent: Float[Array, "T D"], angles: Angles | None) -> Float[Array, "T 1 D"]:
        """The cached row: the normalised latent, then the rotated channels."""
        latent, k_rope = jnp.split(latent[:, None], [self.config.kv_lora_rank], axis=-1)
        return jnp.concatenate([self.kv_a_norm(latent), rotate(k_rope, angles)], axis=-1)
