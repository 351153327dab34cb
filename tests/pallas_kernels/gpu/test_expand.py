"""The PTX that makes codes numbers, run by a machine of these few instructions, against the same in jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.gpu import expand
from jaxllm.pallas_kernels.packed_matrix import PackedFormat
from jaxllm.quantization.unpacked import BLOCKS

FORMATS = {name: block.format for name, block in BLOCKS.items()} | {
    "2 bits": PackedFormat(2, offset=2),
    "4 bits": PackedFormat(4),
    "e2m1": PackedFormat(4, e2m1=True),
}
WHOLE = np.uint64(0xFFFFFFFF)


class Machine:
    """Registers of as many threads as there are words in the inputs."""

    def __init__(self, inputs: list[np.ndarray]) -> None:
        self.inputs, self.registers = inputs, {}

    def value(self, name: str) -> np.ndarray:
        if name[0].isdigit():
            return np.full(len(self.inputs[0]), int(name, 0), np.uint64)
        return self.registers[name] if name in self.registers else self.inputs[int(name.removeprefix("$")) - 2]

    def run(self, program: str) -> list[np.ndarray]:
        for line in program.strip("{ }").split(";"):
            operation, _, rest = line.strip().partition(" ")
            if operation and operation != ".reg":
                to, *given = (name.strip() for name in rest.split(","))
                found = self.do(operation, given)
                self.registers[to] = found & WHOLE
        return [self.registers[name] for name in ("$0", "$1")]

    def do(self, operation: str, given: list[str]) -> np.ndarray:
        if operation == "prmt.b32":
            return self.permuted(*given)
        a, *rest = (self.value(name) for name in given)
        if operation == "lop3.b32":
            assert given[3] == "0xEA"
            return (a & rest[0]) | rest[1]
        if operation.startswith("fma.rn."):
            dtype = {"bf16x2": jnp.bfloat16, "f16x2": np.float16}[operation.rpartition(".")[2]]
            x, y, z = (n.astype(np.uint32).view(np.uint16).view(dtype).astype(np.float64) for n in (a, *rest))
            return (x * y + z).astype(dtype).view(np.uint16).view(np.uint32).astype(np.uint64)
        simple: dict[str, Any] = {
            "mov.b32": lambda: a,
            "and.b32": lambda: a & rest[0],
            "or.b32": lambda: a | rest[0],
            "xor.b32": lambda: a ^ rest[0],
            "shr.u32": lambda: a >> rest[0],
            "shl.b32": lambda: a << rest[0],
        }
        return simple[operation]()

    def permuted(self, low: str, high: str, selector: str) -> np.ndarray:
        both = self.value(low) | (self.value(high) << np.uint64(32))
        found = np.zeros_like(both)
        for byte in range(4):
            chosen = int(selector, 16) >> (4 * byte) & 15
            assert chosen < 8
            found |= ((both >> np.uint64(8 * chosen)) & np.uint64(255)) << np.uint64(8 * byte)
        return found


def run_assembly(asm: str, arguments: Any, *, constraints: str, pack: int, dtype: Any) -> jax.Array:
    assert pack == 4 and constraints == "=r,=r" + ",r" * len(arguments)
    words = [np.asarray(array).copy().view(np.uint32).reshape(-1).astype(np.uint64) for array in arguments]
    pairs = Machine(words).run(asm.partition("//")[0])
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
    ones = expand.ones(low, dtype, plain=False)
    np.testing.assert_array_equal(ones.astype(np.float32), 1)
