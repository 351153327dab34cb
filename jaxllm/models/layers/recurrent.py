"""Mixers that keep a state of each sequence: short convolutions, the gated delta rule, state-space duality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.caches import Cache, PerSlot, Repeated
from jaxllm.models.layers.linear import ColumnLinear, RowLinear, param
from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.models.layers.norm import GroupRMSNorm, RMSNorm
from jaxllm.models.layers.rope import Angles
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Late, Norm, Residual, SSDInputs, StepMetadata, run_states
from jaxllm.sharding.mesh import TENSOR, Layout, Segment, split_rows


@dataclass(frozen=True)
class ConvConfig:
    """A convolution that sees `kernel` tokens: each one's own and the `kernel - 1` before it."""

    kernel: int
    bias: bool = False

    def cache(self, channels: int) -> PerSlot:
        """The inputs of the tokens that a sequence's next ones still see: `[kernel - 1, channels]`."""
        return PerSlot(((self.kernel - 1, channels),), (1,))


class ShortConv(nnx.Module):
    """LFM2's `output(c * conv(b * x))`: `b`, `c` and `x` are thirds of one product; each channel has its own taps."""

    def __init__(self, size: int, config: ConvConfig, options: BuildOptions):
        third = Segment(size, options.tp)
        rows = split_rows(size, options.tp)
        self.input = ColumnLinear(size, Layout((third, third, third), options.tp), options, config.bias)
        self.taps = param((size, config.kernel), jnp.float32, (TENSOR, None), rows)
        self.bias = param((size,), jnp.float32, (TENSOR,), rows) if config.bias else None
        self.output = RowLinear(size, size, options, config.bias)
        self.causal_conv = options.kernels.causal_conv

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles | None, cache: Cache, meta: StepMetadata, *,
        norm: Norm | None = None, residual: Residual = None,
    ) -> tuple[Late, Cache]:  # fmt: skip
        """The block of `norm(x)`, added to `residual` if there is one, and the state after it; `angles` say nothing."""
        gate_in, gate_out, x = self.input.segments(x, norm)
        constants = (self.taps[...], None if self.bias is None else self.bias[...])
        convolved, state = run_states(self.causal_conv, (gate_in * x,), constants, cache[0], meta)
        return self.output((gate_out * convolved).astype(x.dtype), residual=residual), (state,)


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
    """`output(norm(rule(conv(q, k, v), decay, beta)) * silu(gate))`; see `pallas_kernels.delta_rule` (Qwen3-Next)."""

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
        self, x: Float[Array, "T E"], angles: Angles | None, cache: Cache, meta: StepMetadata, *,
        norm: Norm | None = None, residual: Residual = None,
    ) -> tuple[Late, Cache]:  # fmt: skip
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


@dataclass(frozen=True, kw_only=True)
class SSDConfig:
    """The sizes of a state-space layer, and what families do otherwise.

    Attributes:
        heads, head_dim: each head puts vectors of `head_dim` into its state.
        state_size: of those that a head's state is put at and read from.
        groups: of heads, which share these; the norm of the output is taken over a group's channels.
        kernel: tokens that the convolution sees: each one's own and the `kernel - 1` before it.
        conv_bias, bias, output_bias: on the convolution, and on the products before and after it.
        dt_min, dt_max: what a step's length is kept within; None is without an upper bound.
        norm: of the output, after the gate or before it; None is no norm.
        scales: on `z`, `x`, `b`, `c` and `dt`.
        out_scale: on the layer's output.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    scales: tuple[float, ...] = (1.0,) * 5
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Channels that heads of a group share: what states are put at and read from."""
        return 2 * self.groups * self.state_size

    @property
    def cache(self) -> PerSlot:
        """The convolution's last inputs `[kernel - 1, channels]`, and the states `[H, P, N]`."""
        return PerSlot(
            ((self.kernel - 1, self.inner + self.shared), (self.heads, self.head_dim, self.state_size)),
            (1, 0),
            (Repeated(self.shared, self.groups), None),
        )


class StateSpaceDual(nnx.Module):
    """`output(norm(ssd(silu(conv(x | b | c)), dt) * silu(z)))`: Mamba-2's layer (arXiv:2405.21060).

    `z`, `x`, `b` and `c` are one product. `dt` is another: it has a row for each head, which may be no whole tiles.
    Heads are divided over the tensor axis, and groups as far as there are any to divide.
    """

    def __init__(self, size: int, config: SSDConfig, norm_eps: float, options: BuildOptions):
        tp, inner = options.tp, config.inner
        group_shards = min(config.groups, tp)
        channels = Segment(inner, tp)
        shared = Segment(config.shared // 2, group_shards)
        convolved = Layout((channels, shared, shared), tp)
        self.input = ColumnLinear(size, Layout((channels, *convolved.segments), tp), options, config.bias)
        by_head = split_rows(config.heads, tp)
        self.dt = ColumnLinear(size, by_head, options, config.bias)
        self.taps = param((convolved.rows, config.kernel), jnp.float32, (TENSOR, None), convolved)
        self.conv_bias = param((convolved.rows,), jnp.float32, (TENSOR,), convolved) if config.conv_bias else None
        self.fade = param((config.heads,), jnp.float32, (TENSOR,), by_head)
        self.dt_bias = param((config.heads,), jnp.float32, (TENSOR,), by_head)
        self.skip = param((config.heads,), jnp.float32, (TENSOR,), by_head)
        self.norm = GroupRMSNorm(inner, config.groups, norm_eps, options) if config.norm else None
        self.output = RowLinear(inner, size, options, config.output_bias)
        self.config = config
        self.groups = config.groups // group_shards
        self.kernels = options.kernels

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles | None, cache: Cache, meta: StepMetadata, *,
        norm: Norm | None = None, residual: Residual = None,
    ) -> tuple[Late, Cache]:  # fmt: skip
        """The layer of `norm(x)`, added to `residual` if there is one, and the state after it; `angles` say nothing."""
        parts = zip([*self.input.segments(x, norm), self.dt(x, norm)], self.config.scales, strict=True)
        z, *convolved, dt = (part if scale == 1.0 else (part * scale).astype(part.dtype) for part, scale in parts)
        constants = (self.taps[...], None if self.conv_bias is None else self.conv_bias[...])
        convolution = partial(self.kernels.causal_conv, activation=jax.nn.silu)
        u, past = run_states(convolution, (jnp.concatenate(convolved, axis=-1),), constants, cache[0], meta)
        with jax.named_scope("ssd"):
            y, states = run_states(partial(_ssd, self.kernels.ssd), *self._inputs(u, dt), cache[1], meta)
        y, gate = y.reshape(z.shape), jax.nn.silu(z.astype(jnp.float32))
        if self.norm is None or self.config.norm == "after_gate":
            y = y * gate if self.norm is None else self.norm(y * gate)
        else:
            y = self.norm(y) * gate
        return self.output(y.astype(x.dtype), residual=residual), (past, states)

    def _inputs(
        self, u: Float[Array, "T C"], dt: Float[Array, "T H"]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        (tokens, heads), config = dt.shape, self.config
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...])
        shared = self.groups * config.state_size
        b, c = u[:, -2 * shared : -shared], u[:, -shared:]
        of_tokens = (
            u[:, : -2 * shared].reshape(tokens, heads, config.head_dim),
            jnp.clip(dt, config.dt_min, config.dt_max),
            b.reshape(tokens, self.groups, config.state_size),
            c.reshape(tokens, self.groups, config.state_size),
        )
        return of_tokens, (-self.fade[...], self.skip[...])


def _ssd(
    kernel: Callable[..., Any], x: jax.Array, dt: jax.Array, b: jax.Array, c: jax.Array, a: jax.Array, skip: jax.Array,
    states: jax.Array, meta: StepMetadata,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    found: tuple[jax.Array, jax.Array] = kernel(SSDInputs(x, dt, a, b, c, skip), states, meta)
    return found
