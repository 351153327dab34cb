"""Meshes of TPUs that need not be there: some can be lowered for by JAX alone, some compiled for with libtpu."""

from __future__ import annotations

import os

import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxllm.sharding.mesh import DATA, TENSOR

V5E = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")

_HERE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
"""What libtpu would ask Google's cloud for."""


def described(tp: int = 1) -> AbstractMesh:
    """A (data, tensor) mesh of devices of which only the kind is known."""
    return AbstractMesh((1, tp), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2, abstract_device=V5E)


def compilable(tp: int = 1) -> Mesh:
    """The same of a topology that libtpu knows."""
    for name, value in _HERE.items():
        os.environ.setdefault(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    return Mesh(np.array(devices[:tp]).reshape(1, tp), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)
