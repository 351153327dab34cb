"""A machine of the few PTX instructions by which kernels make codes numbers in registers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

WHOLE = np.uint64(0xFFFFFFFF)


class PtxMachine:
    """Registers of as many threads as there are words in the inputs, which a program calls $2 and so on."""

    def __init__(self, inputs: list[np.ndarray]) -> None:
        self.inputs = [words.astype(np.uint64) for words in inputs]
        self.registers: dict[str, np.ndarray] = {}

    def value(self, name: str) -> np.ndarray:
        if name[0].isdigit():
            return np.full(len(self.inputs[0]), int(name, 0), np.uint64)
        return self.registers[name] if name in self.registers else self.inputs[int(name.removeprefix("$")) - 2]

    def run(self, program: str) -> list[np.ndarray]:
        """What it leaves in $0 and $1."""
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
