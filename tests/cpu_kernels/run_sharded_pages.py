"""Attention over pages of eight bits whose heads are divided over devices, in a process of its own.

JAX_NUM_CPU_DEVICES=4 NPROC=16 python -m tests.cpu_kernels.run_sharded_pages OUT.npz
"""

from __future__ import annotations

import sys
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxllm import cpu_kernels
from jaxllm.pallas_kernels.pages import QUANTIZED
from tests.cpu_kernels.test_quantized_pages import with_codes
from tests.pallas_kernels.oracle import ragged_batch
from tests.pallas_kernels.test_reference import MIXED, padded


def main(out: str) -> None:
    found = {"devices": np.array(jax.device_count())}
    for kind in QUANTIZED:
        batch = with_codes(padded(ragged_batch(**MIXED, heads=12, kv_heads=4)), kind)
        meta = batch.meta

        def attend(q, k, v, pages, meta=meta):
            where = meta.positions, meta.seq_ids, meta.page_table
            return cpu_kernels.attention(q, k, v, pages, *where, scale=0.125)

        heads, pages = P(None, "tp"), (P(None, "tp"), P(None, "tp"))
        divided = partial(
            jax.shard_map, mesh=Mesh(np.array(jax.devices()), ("tp",)),
            in_specs=(heads, heads, heads, pages), out_specs=(heads, pages), check_vma=False,
        )  # fmt: skip
        for name, function in (("one", attend), ("many", divided(attend))):
            result, new_pages = jax.jit(function)(batch.q, batch.k, batch.v, batch.pages)
            found[f"{kind} {name}"] = np.asarray(result)
            found |= {f"{kind} {name} {i}": np.asarray(buffer) for i, buffer in enumerate(new_pages)}
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
