"""Parameters: plain NNX params that also say how they are sharded and what checkpoint rows they are made of.

They have a shape and no memory: what a model is loaded with takes their place.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxllm.quantization.host_stack import HostShare
from jaxllm.quantization.weight import Dense
from jaxllm.sharding.mesh import Axes, Layout


def param(shape: tuple[int, ...], dtype: Any, axes: Axes | None = None, layout: Layout | None = None) -> nnx.Param:
    """A plain array of the global `shape`, replicated unless `axes` names a mesh axis; `layout` describes its axis 0.

    The axes are our own metadata: NNX's `sharding` would ask for a mesh.
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes or (None,) * len(shape), layout=layout)


def weight(
    shape: tuple[int, ...],
    dtype: Any,
    axes: Axes | None = None,
    layout: Layout | None = None,
    host: HostShare | None = None,
) -> nnx.Param:
    """A matrix `[*stack, o, i]`, likewise. It is declared dense; what it is kept as is decided when it is loaded.

    `host` says what part of a stack is to be in host memory.
    """
    dense = Dense(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(dense, axes=axes or (None,) * len(shape), layout=layout, host=host)
