"""Products of every kind of weight over several devices, in a process of its own: their number is fixed at start-up.

JAX_NUM_CPU_DEVICES=4 NPROC=16 python -m tests.quantization.run_sharded OUT.npz
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllm import cpu_kernels
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.quantization.tiles import TiledKind, tile_format
from jaxllm.quantization.weight import WeightKind
from jaxllm.sharding.mesh import TENSOR, Layout, Segment, build_meshes, named_sharding
from tests.quantization.blocks import stored

ROWS, INPUTS = (64, 64), 1024


def kinds() -> dict[str, WeightKind]:
    """Every scheme, for plain XLA and in the C++ kernels' tiles."""
    plain = {name: make(np.dtype(np.float32)) for name, make in SCHEMES.items()}
    in_tiles = {f"{name} in tiles": TiledKind(kind) for name, kind in plain.items() if tile_format(kind)}  # type: ignore[arg-type]
    return plain | (in_tiles if cpu_kernels.available() else {})


def values() -> tuple[np.ndarray, ...]:
    """The rows of two segments, and inputs."""
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(n, INPUTS)).astype(np.float32) for n in (*ROWS, 3))


def main(out: str) -> None:
    *tensors, x = values()
    found = {"devices": np.array(jax.device_count())}
    for tp in (2, 4):
        mesh = build_meshes(tp)[0]
        layout = Layout((Segment(ROWS[0], tp), Segment(ROWS[1], 2)), tp)  # on 4 devices two hold each of the second's
        for scheme, kind in kinds().items():
            for axes, laid_out in (((TENSOR, None), layout), ((None, TENSOR), None)):
                mine = tensors if laid_out else [np.concatenate(tensors)]
                weight = kind.pack([stored(tensor) for tensor in mine], laid_out)
                leaves, tree = jax.tree.flatten(weight)
                specs = [P(*a) for a in weight.axes(axes)]
                placed = [
                    jax.device_put(a, named_sharding(mesh, s)) for a, s in zip(leaves, weight.axes(axes), strict=True)
                ]

                def product(leaves, x, tree=tree, rows=laid_out is not None):
                    out = jax.tree.unflatten(tree, leaves).matmul(x)
                    return out if rows else jax.lax.psum(out, TENSOR)

                run = jax.shard_map(
                    product,
                    mesh=mesh,
                    in_specs=(specs, P() if laid_out else P(None, TENSOR)),
                    out_specs=P(None, TENSOR) if laid_out else P(),
                    check_vma=False,
                )
                found[f"{scheme}:{tp}:{'rows' if laid_out else 'inputs'}"] = np.asarray(jax.jit(run)(placed, x))
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
