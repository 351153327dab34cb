"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over pages that hold only the latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.attention import QueryScaling
from jaxllm.models.layers.linear import ColumnLinear, Linear, RowLinear
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.rope import Angles, rotate
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Late, Norm, Pages, Residual, StepMetadata
from jaxllm.sharding.mesh import split_rows


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
        """Channels of a head's whole query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Channels that are cached for a token: the latent, then the rotated part of the key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class MLAttention(nnx.Module):
    """Attention whose keys and values are expanded from one latent a token, in the absorbed form.

    A head's key is `[W_UK c, k]` and its value `W_UV c`, where the latent `c` and the rotated `k` are shared by all
    heads and are all that is cached. `q . (W_UK c) = (W_UK^T q) . c`, and a weighted sum of `W_UV c` is `W_UV` of the
    weighted sum of `c`; so queries go to the latent's space, attention runs there with one KV head, and its output
    comes back through `W_UV`. `kv_b` holds both: a head's `qk_nope_head_dim` rows of `W_UK`, then its `v_head_dim`
    rows of `W_UV`.

    What it costs, with DeepSeek's sizes (latent 512, rotated 64, heads of 128): a decode step reads 576 channels a
    cached token, whatever the number of heads. A prefilled token pays 2,176 FLOPs a head for each token it sees, where
    expanded keys and values would take 640, and 262,144 once for every token of the context: chunks of up to about 170
    tokens over a long context are cheaper as they are here, and the attention of much longer ones costs up to 3.4 times
    as much.

    Heads are divided over the tensor axis; the latent is computed and cached on every device.
    """

    def __init__(
        self,
        size: int,
        num_heads: int,
        config: MLAConfig,
        options: BuildOptions,
        *,
        scale: float,
        norm_eps: float,
        qkv_bias: bool = False,
        output_bias: bool = False,
        query_scaling: QueryScaling | None = None,
    ):
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
        self.heads = num_heads // options.tp
        self.config = config
        self.scale = scale
        self.query_scaling = query_scaling
        self.kernels = options.kernels

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles | None,
        pages: Pages,
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Residual = None,
    ) -> tuple[Late, Pages]:
        """Attention of `norm(x)`, added to `residual` if there is one, and the pages with the new latents."""
        x = x if norm is None else norm(x)
        queries, latent, kv_b = self._queries(x, meta), self.kv_a(x), self.kv_b.weight.get_value()
        with jax.named_scope("paged_attention"):
            done = self.kernels.latent_attention(
                queries, latent, kv_b, self.kv_a_norm.traced, angles, pages, meta,
                scale=self.scale, one_product=self.config.q_lora_rank is None,
            )  # fmt: skip
        out, pages = done or self._attend(queries, latent, kv_b, angles, pages, meta)
        return self.output(out.reshape(x.shape[0], -1), residual=residual), pages

    def _queries(self, x: Float[Array, "T E"], meta: StepMetadata) -> Float[Array, "T H D"]:
        """This device's heads, channels without rotation first. A factor on all of a query may come before it."""
        q = self.q(x) if self.config.q_lora_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        q = q.reshape(x.shape[0], self.heads, self.config.qk_head_dim)
        return q if self.query_scaling is None else self.query_scaling(q, meta.positions)

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
                q,
                self._keys(latent, angles),
                None,
                pages,
                meta,
                scale=self.scale,
                value_dim=config.kv_lora_rank,
            )
        return kv_b.expand_heads(out, self.expanded, slice(config.qk_nope_head_dim, None)), pages

    def _keys(self, latent: Float[Array, "T D"], angles: Angles | None) -> Float[Array, "T 1 D"]:
        """What is cached: the normalised latent, then the rotated channels."""
        latent, k_rope = jnp.split(latent[:, None], [self.config.kv_lora_rank], axis=-1)
        return jnp.concatenate([self.kv_a_norm(latent), rotate(k_rope, angles)], axis=-1)
