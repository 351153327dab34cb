"""The PTX that makes codes numbers, run by a machine of these few instructions, against the same in jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.gpu import expand
from jaxllm.pallas_kernels.matrices import PackedFormat
from jaxllm.quantization.gpu_tiles import BLOCKS
from tests.pallas_kernels.gpu.ptx_machine import PtxMachine

pytestmark = pytest.mark.hardware

FORMATS = {name: block.format for name, block in BLOCKS.items()} | {
    "2 bits": PackedFormat(2, offset=2),
    "4 bits": PackedFormat(4),
    "e2m1": PackedFormat(4, e2m1=True),
}


def run_assembly(asm: str, arguments: Any, *, constraints: str, pack: int, dtype: Any) -> jax.Array:
    assert pack == 4 and constraints == "=r,=r" + ",r" * len(arguments)
    words = [np.asarray(array).copy().view(np.uint32).reshape(-1) for array in arguments]
    pairs = PtxMachine(words).run(asm.partition("//")[0])
    return jnp.asarray(np.stack(pairs, 1).astype(np.uint32).view(np.uint16).view(dtype).reshape(arguments[0].shape))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_assembly_makes_the_same_numbers(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand, "triton_elementwise_asm", run_assembly)
    format, dtype = FORMATS[name], np.dtype(dtype)
    low, high = (jnp.asarray(np.random.default_rng().integers(0, 256, (64, 64), np.uint8)) for _ in range(2))
    for shift in range(0, 8, format.bits):
        for high_shift in range(0, 8, format.high or 8):
            planes = low, high if format.high else None
            plain = expand.expand(format, *planes, shift, high_shift, np.dtype(np.float32), plain=True)
            found = expand.expand(format, *planes, shift, high_shift, dtype, plain=False)
            np.testing.assert_array_equal(found.astype(np.float32), np.asarray(plain))
