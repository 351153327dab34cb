"""Linear attention by the gated delta rule, which takes the place of attention in some layers (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.caches import Cache, PerSlot
from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.params import param
from jaxllm.models.layers.rope import Angles
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Late, Norm, Residual, StepMetadata, run_states
from jaxllm.sharding.mesh import TENSOR, Layout, Segment, split_rows


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Heads of the gated delta rule, and the convolution in front of it, which sees `kernel` tokens.

    Each head of queries and keys serves as many neighbouring heads of values as there are more of these.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def cache(self) -> PerSlot:
        """The last inputs of the convolution, and a matrix `[key_dim, value_dim]` for each value head."""
        matrices = (self.value_heads, self.key_dim, self.value_dim)
        return PerSlot(((self.kernel - 1, self.channels), matrices), (1, 0))


class GatedDeltaNet(nnx.Module):
    """`output(norm(rule(conv(q, k, v), decay, beta)) * silu(gate))`; see `pallas_kernels.delta_rule`.

    Heads are divided over the tensor axis, and the convolution's channels with them.
    """

    def __init__(self, size: int, config: DeltaConfig, options: BuildOptions, *, activation: str, norm_eps: float):
        tp, c = options.tp, config
        key, value = Segment(c.key_heads * c.key_dim, tp), Segment(c.value_heads * c.value_dim, tp)
        head, channels, heads = Segment(c.value_heads, tp), Layout((key, key, value), tp), split_rows(c.value_heads, tp)
        self.qkv = ColumnLinear(size, channels, options)
        self.gate = ColumnLinear(size, Layout((value,), tp), options)
        self.beta_decay = ColumnLinear(size, Layout((head, head), tp), options)
        self.taps = param((c.channels, c.kernel), jnp.float32, (TENSOR, None), channels)
        self.rate = param((c.value_heads,), jnp.float32, (TENSOR,), heads)
        self.rate_bias = param((c.value_heads,), jnp.float32, (TENSOR,), heads)
        self.norm = RMSNorm(c.value_dim, norm_eps, options.kernels)
        self.output = RowLinear(value.rows, size, options)
        self.key_heads = c.key_heads // tp
        self.activation = ACTIVATIONS[activation]
        self.kernels = options.kernels

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles | None,
        cache: Cache,
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Residual = None,
    ) -> tuple[Late, Cache]:
        """The block of `norm(x)`, added to `residual` if there is one, and the state after it; `angles` say nothing."""
        inputs, matrices = cache
        qkv = jnp.concatenate(self.qkv.segments(x, norm), axis=-1)
        (gate,) = self.gate.segments(x, norm)
        beta, decay = jnp.split(self.beta_decay.partial(x, norm), 2, axis=-1)
        decay = self.rate[...] * jax.nn.softplus(decay + self.rate_bias[...])
        with jax.named_scope("causal_conv"):
            convolution = partial(self.kernels.causal_conv, activation=self.activation)
            qkv, inputs = run_states(convolution, (qkv,), (self.taps[...], None), inputs, meta)
        with jax.named_scope("delta_rule"):
            rule = partial(self.kernels.delta_rule, key_heads=self.key_heads)
            out, matrices = run_states(rule, (qkv, decay, jax.nn.sigmoid(beta)), (), matrices, meta)
        gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(out.shape)
        gated = (self.norm(out) * gate).astype(x.dtype).reshape(x.shape[0], -1)
        return self.output(gated, residual=residual), (inputs, matrices)
