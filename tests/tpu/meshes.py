"""Meshes of TPUs that need not be there: some can be lowered for by JAX alone, some compiled for with libtpu."""

from __future__ import annotations

import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxllm.sharding.mesh import DATA, TENSOR

V5E = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")


def described(tp: int = 1) -> AbstractMesh:
    """A (data, tensor) mesh of devices of which only the kind is known."""
    return AbstractMesh((1, tp), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2, abstract_device=V5E)


def compilable(tp: int = 1) -> Mesh:
    """The same of a topology that libtpu knows."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    return Mesh(np.array(devices[:tp]).reshape(1, tp), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)
