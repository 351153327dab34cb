"""Short causal convolutions between two gates, which take the place of attention in some layers (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.caches import Cache, PerSlot
from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.layers.params import param
from jaxllm.models.layers.rope import Angles
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Late, Norm, Residual, StepMetadata, run_states
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
    """`output(c * conv(b * x))`, where `b`, `c` and `x` are one product's thirds and each channel has its own taps.

    Channels are divided over the tensor axis.
    """

    def __init__(self, size: int, config: ConvConfig, options: BuildOptions):
        third = Segment(size, options.tp)
        rows = split_rows(size, options.tp)
        self.input = ColumnLinear(size, Layout((third, third, third), options.tp), options, config.bias)
        self.taps = param((size, config.kernel), jnp.float32, (TENSOR, None), rows)
        self.bias = param((size,), jnp.float32, (TENSOR,), rows) if config.bias else None
        self.output = RowLinear(size, size, options, config.bias)
        self.causal_conv = options.kernels.causal_conv

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
        gate_in, gate_out, x = self.input.segments(x, norm)
        bias = None if self.bias is None else self.bias[...]
        constants = (self.taps[...], bias)
        convolved, state = run_states(self.causal_conv, (gate_in * x,), constants, cache[0], meta)
        return self.output((gate_out * convolved).astype(x.dtype), residual=residual), (state,)
