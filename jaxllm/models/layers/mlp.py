"""Feed-forward blocks, and the gates through which single layers read inputs of their own (Gemma 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.linear import ColumnLinear, Linear, RowLinear, VocabEmbedding, adapter_uses, param
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Late, Norm, Residual, StepMetadata
from jaxllm.sharding.mesh import Layout, Segment, split_rows, tensor_size

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {  # by the names of `hidden_act`
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


XIELU = "xielu"  # which MLPs without a gate may also have


class Curve(nnx.Module):
    """xIELU with the curvatures that a layer has learnt, and its two constants (arXiv:2411.13010)."""

    def __init__(self) -> None:
        self.numbers = param((4,), jnp.float32)

    def __call__(self, x: Float[Array, "N n"]) -> Float[Array, "N n"]:
        positive, negative, slope, eps = self.numbers[...]
        return jnp.where(x > 0, positive * x * x, negative * (jnp.expm1(jnp.minimum(x, eps)) - x)) + slope * x


def gated(gate_up: Float[Array, "N n"], activation: str, scale: float = 1.0) -> Float[Array, "N n//2"]:
    """`act(scale * gate) * up` of the two side by side, in float32."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return ACTIVATIONS[activation](gate if scale == 1.0 else gate * scale) * up


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's gate: `(up + 1) * gate * sigmoid(alpha * gate)`, gates up to `limit`, ups within `limit` of 0."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Float[Array, "N n"]) -> Float[Array, "N n//2"]:
        gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class MLP(nnx.Module):
    """`down(act(up(x)))`."""

    def __init__(self, size: int, hidden: int, activation: str, options: BuildOptions, bias: bool = False):
        self.up = ColumnLinear(size, split_rows(hidden, options.tp), options, bias)
        self.down = RowLinear(hidden, size, options, bias)
        self.activation = activation
        self.curve = Curve() if activation == XIELU else None

    def __call__(
        self, x: Float[Array, "T E"], meta: StepMetadata, *, norm: Norm | None = None, residual: Residual = None
    ) -> Late:
        return self.down(self._between(x, norm).astype(x.dtype), residual=residual)

    def partial(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return self.down.partial(self._between(x))

    def _between(self, x: Float[Array, "T E"], norm: Norm | None = None) -> Float[Array, "T F"]:
        return (self.curve or ACTIVATIONS[self.activation])(self.up(x, norm).astype(jnp.float32))


class GatedMLP(MLP):
    """`down(act(gate_scale * gate(x)) * up(x))`, gate and up in one product (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self, size: int, hidden: int, activation: str, options: BuildOptions, bias: bool = False,
        gate_scale: float = 1.0,
    ):  # fmt: skip
        half = Segment(hidden, options.tp)
        self.gate_up = ColumnLinear(size, Layout((half, half), options.tp), options, bias)
        self.down = RowLinear(hidden, size, options, bias)
        self.activation, self.gate_scale = activation, gate_scale

    def __call__(
        self, x: Float[Array, "T E"], meta: StepMetadata, *, norm: Norm | None = None, residual: Residual = None
    ) -> Late:
        out = self._at_once(x, norm, residual, x.dtype) if tensor_size() == 1 else None
        return super().__call__(x, meta, norm=norm, residual=residual) if out is None else out

    def partial(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        out = self._at_once(x)
        return super().partial(x) if out is None else out

    def _between(self, x: Float[Array, "T E"], norm: Norm | None = None) -> Float[Array, "T F"]:
        return gated(self.gate_up(x, norm), self.activation, self.gate_scale)

    def _at_once(
        self, x: Float[Array, "T E"], norm: Norm | None = None, residual: Residual = None, dtype: Any = jnp.float32
    ) -> Late | None:
        """This device's part by one kernel, where there is one."""
        first, second = self.gate_up, self.down
        if first.bias is not None or second.bias is not None or self.gate_scale != 1.0:
            return None
        adapters = None
        if first.low_rank is not None and second.low_rank is not None:
            adapters = (first.low_rank.arrays, second.low_rank.arrays, adapter_uses())
        weights = first.weight.get_value(), second.weight.get_value()
        return first.kernels.gated_mlp(x, *weights, self.activation, norm, residual, dtype, adapters)


@dataclass(frozen=True)
class PerLayerConfig:
    """The inputs of single layers: their size in each layer, and the tokens that have some."""

    size: int
    vocab_size: int


class PerLayerInputs(nnx.Module):
    """The mean of an embedding of the token for every layer, and of a normed projection of the one that all begin with.

    It is multiplied by the root of two, so that its variance is that of one of them.
    """

    def __init__(self, config: PerLayerConfig, size: int, num_layers: int, norm_eps: float, options: BuildOptions):
        self.embed = VocabEmbedding(config.vocab_size, num_layers * config.size, options)
        self.projection = Linear(size, num_layers * config.size, options)
        self.norm = RMSNorm(config.size, norm_eps, options.kernels)
        self.shape = (num_layers, config.size)
        self.scale = size**-0.5

    def __call__(self, tokens: Int[Array, "T"], x: Float[Array, "T E"]) -> Float[Array, "T L n"]:
        rows = self.embed(tokens).reshape(-1, *self.shape).astype(jnp.float32) * self.shape[1] ** 0.5
        projected = self.norm((self.projection.partial(x) * self.scale).reshape(-1, *self.shape))
        return ((rows + projected) * 2**-0.5).astype(x.dtype)


class PerLayerGate(nnx.Module):
    """`x + norm(projection(act(gate(x)) * given))`, with which a layer takes in its own input."""

    def __init__(self, config: PerLayerConfig, size: int, activation: str, norm_eps: float, options: BuildOptions):
        self.gate = Linear(size, config.size, options)
        self.projection = Linear(config.size, size, options)
        self.norm = RMSNorm(size, norm_eps, options.kernels)
        self.activation = activation

    def __call__(self, x: Float[Array, "T E"], given: Float[Array, "T n"]) -> Float[Array, "T E"]:
        gate = ACTIVATIONS[self.activation](self.gate.partial(x))
        return x + self.norm(self.projection((gate * given).astype(x.dtype)))
