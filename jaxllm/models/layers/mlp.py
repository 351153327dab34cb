"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.linear import ColumnLinear, RowLinear
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Norm, StepMetadata
from jaxllm.sharding.collectives import tensor_size
from jaxllm.sharding.layout import Layout, Segment, split_rows

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
"""Activation functions under the names that `hidden_act` and `hidden_activation` use."""


def gated(gate_up: Float[Array, "N n"], activation: str) -> Float[Array, "N n//2"]:
    """`act(gate) * up` of the two side by side, in float32."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's gate: `(up + 1) * gate * sigmoid(alpha * gate)`, gates up to `limit`, ups within `limit` of 0."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Float[Array, "N n"]) -> Float[Array, "N n//2"]:
        """Of the two side by side, in float32."""
        gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, gate and up in one product (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, size: int, hidden: int, activation: str, options: BuildOptions, bias: bool = False):
        half = Segment(hidden, options.tp)
        self.gate_up = ColumnLinear(size, Layout((half, half), options.tp), options, bias)
        self.down = RowLinear(hidden, size, options, bias)
        self.activation = activation

    def __call__(
        self,
        x: Float[Array, "T E"],
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "T E"] | None = None,
    ) -> Float[Array, "T E"]:
        """The block of `norm(x)`, added to `residual` if there is one."""
        if tensor_size() == 1:
            out = self._at_once(x, norm, residual, x.dtype)
            if out is not None:
                return out
        return self.down(gated(self.gate_up(x, norm), self.activation).astype(x.dtype), residual=residual)

    def partial(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """This device's part of the output, in float32."""
        out = self._at_once(x)
        return self.down.partial(gated(self.gate_up(x), self.activation)) if out is None else out

    def _at_once(
        self,
        x: Float[Array, "T E"],
        norm: Norm | None = None,
        residual: Float[Array, "T E"] | None = None,
        dtype: Any = jnp.float32,
    ) -> Float[Array, "T E"] | None:
        """This device's part by one kernel, where there is one."""
        if self.gate_up.bias is not None or self.down.bias is not None:
            return None
        weights = self.gate_up.weight.get_value(), self.down.weight.get_value()
        return self.gate_up.kernels.gated_mlp(x, *weights, self.activation, norm, residual, dtype)


class MLP(nnx.Module):
    """`down(act(up(x)))`."""

    def __init__(self, size: int, hidden: int, activation: str, options: BuildOptions, bias: bool = False):
        self.up = ColumnLinear(size, split_rows(hidden, options.tp), options, bias)
        self.down = RowLinear(hidden, size, options, bias)
        self.activation = activation

    def __call__(
        self,
        x: Float[Array, "T E"],
        meta: StepMetadata,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "T E"] | None = None,
    ) -> Float[Array, "T E"]:
        """The block of `norm(x)`, added to `residual` if there is one."""
        up = self.up(x, norm).astype(jnp.float32)
        return self.down(ACTIVATIONS[self.activation](up).astype(x.dtype), residual=residual)
