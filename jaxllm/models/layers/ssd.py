"""State-space duality layers (Mamba-2, arXiv:2405.21060): a convolution, a state that fades, and a gate."""

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
from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.layers.norm import GroupRMSNorm
from jaxllm.models.layers.params import param
from jaxllm.models.layers.rope import Angles
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Late, Norm, Residual, SSDInputs, StepMetadata, run_states
from jaxllm.sharding.mesh import TENSOR, Layout, Segment, split_rows

NormPlace = Literal["after_gate", "before_gate"]


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
    norm: NormPlace | None = "after_gate"
    scales: tuple[float, ...] = (1.0,) * 5
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Channels of all heads together."""
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
    """`output(norm(ssd(silu(conv(x | b | c)), dt) * silu(z)))`, where `z`, `x`, `b` and `c` are one product.

    `dt` is by itself, since its rows are as many as there are heads, which may be no whole tiles.

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
        self,
        x: Float[Array, "T E"],
        angles: Angles | None,
        cache: Cache,
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Residual = None,
    ) -> tuple[Late, Cache]:
        """The layer of `norm(x)`, added to `residual` if there is one, and the state after it; `angles` say nothing."""
        parts = zip([*self.input.segments(x, norm), self.dt(x, norm)], self.config.scales, strict=True)
        z, *convolved, dt = (part if scale == 1.0 else (part * scale).astype(part.dtype) for part, scale in parts)
        bias = None if self.conv_bias is None else self.conv_bias[...]
        convolution = partial(self.kernels.causal_conv, activation=jax.nn.silu)
        inputs = (jnp.concatenate(convolved, axis=-1),)
        u, past = run_states(convolution, inputs, (self.taps[...], bias), cache[0], meta)
        with jax.named_scope("ssd"):
            y, states = run_states(partial(_ssd, self.kernels.ssd), *self._inputs(u, dt), cache[1], meta)
        return self.output(self._gated(y, z).astype(x.dtype), residual=residual), (past, states)

    def _inputs(
        self, u: Float[Array, "T C"], dt: Float[Array, "T H"]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """What the states take of each token, and of the layer."""
        tokens, heads = dt.shape
        config = self.config
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

    def _gated(self, y: Float[Array, "T H P"], z: Float[Array, "T C"]) -> Float[Array, "T C"]:
        flat, gate = y.reshape(z.shape), jax.nn.silu(z.astype(jnp.float32))
        if self.norm is None:
            return flat * gate
        return self.norm(flat * gate) if self.config.norm == "after_gate" else self.norm(flat) * gate


def _ssd(
    kernel: Callable[..., Any], x: jax.Array, dt: jax.Array, b: jax.Array, c: jax.Array, a: jax.Array, skip: jax.Array,
    states: jax.Array, meta: StepMetadata,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel with what it takes of each token first."""
    found: tuple[jax.Array, jax.Array] = kernel(SSDInputs(x, dt, a, b, c, skip), states, meta)
    return found
