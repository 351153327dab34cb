"""Short causal convolutions between two gates, which take the place of attention in some layers (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.caches import Cache, PerSlot
from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.layers.params import param
from jaxllm.models.layers.rope import Angles
from jaxllm.models.layers.state import read_state, write_state
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Norm, StateRows, StepMetadata
from jaxllm.sharding.layout import Layout, Segment, split_rows
from jaxllm.sharding.mesh import TENSOR


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

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles | None,
        cache: Cache,
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "T E"] | None = None,
    ) -> tuple[Float[Array, "T E"], Cache]:
        """The block of `norm(x)`, added to `residual` if there is one, and the state after it; `angles` say nothing."""
        assert meta.states is not None, "a model with states is run with their rows"
        gate_in, gate_out, x = self.input.segments(x, norm)
        u = (gate_in * x).astype(jnp.float32)
        past = read_state(cache[0], meta.states)
        convolved = self._convolve(u, past, meta)
        kept = _last_inputs(u, past, meta, _kept_length(meta.states, meta))
        after = _last_inputs(u, past, meta, jnp.diff(meta.query_start))
        out = self.output((gate_out * convolved).astype(x.dtype), residual=residual)
        return out, (write_state(cache[0], after, kept, meta.states),)

    def _convolve(self, u: Float[Array, "T C"], past: Float[Array, "S k C"], meta: StepMetadata) -> Float[Array, "T C"]:
        """The taps over each token's own input and those before it, the oldest of which are in `past`."""
        taps, reach = self.taps[...], past.shape[1]
        seq = jnp.minimum(meta.seq_ids, past.shape[0] - 1)
        place = jnp.arange(u.shape[0]) - meta.query_start[seq]
        total = u * taps[:, reach]
        for back in range(1, reach + 1):
            before = past[seq, jnp.clip(reach + place - back, 0, reach - 1)]
            seen = jnp.where((place >= back)[:, None], jnp.roll(u, back, axis=0), before)
            total += seen * taps[:, reach - back]
        return total if self.bias is None else total + self.bias[...]


def _kept_length(rows: StateRows, meta: StepMetadata) -> Int[Array, "S"]:
    """How many of this step's tokens each kept state has behind it."""
    length = jnp.diff(meta.query_start)
    return jnp.clip(rows.kept_tokens - (meta.context_len - length), 0, length)


def _last_inputs(
    u: Float[Array, "T C"], past: Float[Array, "S k C"], meta: StepMetadata, length: Int[Array, "S"]
) -> Float[Array, "S k C"]:
    """The last `k` inputs of each sequence once `length` of its tokens in this step have run."""
    reach = past.shape[1]
    place = length[:, None] - reach + jnp.arange(reach)  # in this step's tokens; before them where negative
    new = u[jnp.clip(meta.query_start[:-1, None] + place, 0, u.shape[0] - 1)]
    old = jnp.take_along_axis(past, jnp.clip(reach + place, 0, reach - 1)[:, :, None], axis=1)
    return jnp.where((place >= 0)[:, :, None], new, old)
