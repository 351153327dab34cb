"""Layers that keep a state of each sequence, one row of a buffer a sequence; to be called while tracing."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Int

from jaxllm.cpu_kernels.library import call


class Runs(NamedTuple):
    """The tokens of each sequence in a step, one run after the other, and the rows of its state.

    Attributes:
        sequences: how many there are.
        start: the first token of each, and where the last one ends.
        read, begins: the row that holds the state before the run; 1 where that is zero, whatever the row holds.
        written: the row that it is brought into, and that holds the state after the run.
        kept, kept_length: the row that another state is kept in, and after how many of the run's tokens; 0 is nothing.
    """

    sequences: Int[Array, "1"]
    start: Int[Array, "S+1"]
    read: Int[Array, "S"]
    begins: Int[Array, "S"]
    written: Int[Array, "S"]
    kept: Int[Array, "S"]
    kept_length: Int[Array, "S"]


def causal_conv(
    x: Float[Array, "T C"],
    taps: Float[Array, "C k"],
    bias: Float[Array, "C"] | None,
    buffer: Float[Array, "N r C"],
    runs: Runs,
    silu: bool,
) -> tuple[Float[Array, "T C"], Float[Array, "N r C"]]:
    """A depthwise convolution over each run and the inputs before it, with silu behind it or not; float32.

    `x` is float32 or bfloat16. The buffer, of the last `r = k - 1` inputs, is updated in place when donated. Padding
    gives zero.
    """
    shapes = ShapeDtypeStruct(x.shape, jnp.float32), ShapeDtypeStruct(buffer.shape, buffer.dtype)
    more = () if bias is None else (bias.astype(jnp.float32),)
    return call("jaxllm_causal_conv", shapes, input_output_aliases={2: 1})(
        x, taps.astype(jnp.float32), buffer, *_integers(runs), *more, bias=bias is not None, silu=silu
    )


def delta_rule(
    qkv: Float[Array, "T C"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    buffer: Float[Array, "N H Dk Dv"],
    runs: Runs,
    *,
    key_heads: int,
    epsilon: float,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "N H Dk Dv"]]:
    """The gated delta rule of float32, token by token: a result does not depend on the batch around it.

    `epsilon` is added to the sum of a query's or key's squares. The buffer is updated in place when donated. Padding
    gives zero.
    """
    _, heads, _, value_dim = buffer.shape
    shapes = ShapeDtypeStruct((len(qkv), heads, value_dim), jnp.float32), ShapeDtypeStruct(buffer.shape, buffer.dtype)
    return call("jaxllm_delta_rule", shapes, input_output_aliases={3: 1})(
        qkv, decay, beta, buffer, *_integers(runs), key_heads=np.int64(key_heads), epsilon=np.float32(epsilon)
    )


def ssd(
    x: Float[Array, "T H P"],
    dt: Float[Array, "T H"],
    a: Float[Array, "H"],
    b: Float[Array, "T G N"],
    c: Float[Array, "T G N"],
    skip: Float[Array, "H"],
    buffer: Float[Array, "B H P N"],
    runs: Runs,
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """State-space duals of float32 (see `pallas_kernels/ssd.py`), token by token: a result does not depend on the batch
    around it.

    The buffer is updated in place when donated. Padding gives zero.
    """
    shapes = ShapeDtypeStruct(x.shape, jnp.float32), ShapeDtypeStruct(buffer.shape, buffer.dtype)
    return call("jaxllm_ssd", shapes, input_output_aliases={6: 1})(x, dt, a, b, c, skip, buffer, *_integers(runs))


def _integers(runs: Runs) -> tuple[Array, ...]:
    return tuple(field.astype(jnp.int32) for field in runs)
