"""Follows buffers through the text of a compiled program, to find the ones that are written out once more."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

AS_IT_IS = {"bitcast", "reshape", "optimization-barrier", "dynamic-update-slice", "scatter", "copy-done"}
"""What leaves its first operand where it is, or changes a part of it there."""
COPYING = {"copy", "copy-start", "transpose", "convert"}


@dataclass(frozen=True)
class Instruction:
    name: str
    computation: str
    opcode: str
    size: int
    """Numbers in its result; 0 of a tuple."""
    operands: tuple[str, ...]
    text: str

    def called(self) -> list[str]:
        return re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", self.text)

    def number(self, field: str) -> int:
        """Of `parameter(3)` or `index=3`."""
        return int(re.search(rf"\b{field}[=(](\d+)", self.text)[1])  # type: ignore[index]


class Program:
    """The instructions of a compiled module, whose names are all different."""

    def __init__(self, text: str):
        self.instructions: dict[str, Instruction] = {}
        self.roots: dict[str, str] = {}
        computation = ""
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" "):
                computation = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
            elif match := re.match(r"\s+(ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w\-]+)\(", line):
                root, name, kind, opcode = match.groups()
                self.instructions[name] = Instruction(
                    name, computation, opcode, _size(kind), _operands(line[match.end() :]), line
                )
                if root:
                    self.roots[computation] = name

    @cached_property
    def callers(self) -> dict[str, Instruction]:
        """By computation."""
        return {called: x for x in self.instructions.values() for called in x.called()}

    def origin(self, name: str, index: int | None = None) -> str | None:
        """The weight or page buffer that an instruction's result is, moved or not, as the step's arguments name it.

        `index` is of a tuple's element.
        """
        x = self.instructions.get(name)
        if x is None:
            return None
        if x.opcode == "parameter":
            argument = re.search(r'op_name="((?:weights|caches)\[[^"]*)"', x.text)
            if argument:
                return argument[1]
            caller = self.callers.get(x.computation)
            if caller is None:
                return None
            at = 0 if caller.opcode == "while" else x.number("parameter")
            return self.origin(caller.operands[at], index)
        if x.opcode == "get-tuple-element":
            return self.origin(x.operands[0], x.number("index"))
        if x.opcode == "tuple" and index is not None:
            return self.origin(x.operands[index])
        if x.opcode == "while":
            return self.origin(x.operands[0], index)
        if x.opcode in ("fusion", "call"):
            return self.origin(self.roots[x.called()[0]], index)
        if x.opcode == "custom-call":
            aliases = dict(re.findall(r"\{(\d*)\}: \((\d+), \{\}", x.text))
            alias = aliases.get("" if index is None else str(index))
            return None if alias is None else self.origin(x.operands[int(alias)])
        return self.origin(x.operands[0], index) if x.opcode in AS_IT_IS | COPYING else None

    def copies(self, least: int = 2**20) -> list[str]:
        """What copies, transposes or converts a whole weight or page buffer of at least so many numbers, and which.

        Inside a fusion only where that is what the fusion writes: elsewhere it is done in registers.
        """
        found = []
        for x in self.instructions.values():
            if x.opcode not in COPYING or x.size < least or not self._is_written(x):
                continue
            argument = self.origin(x.name)
            if argument is not None:
                found.append(f"{x.name} of {argument}")
        return found

    def _is_written(self, x: Instruction) -> bool:
        caller = self.callers.get(x.computation)
        if caller is None or caller.opcode != "fusion":
            return True
        ends = [self.roots[x.computation]]
        for name in ends:
            end = self.instructions[name]
            if name == x.name:
                return True
            if end.opcode in AS_IT_IS | COPYING | {"tuple"}:
                ends += end.operands if end.opcode == "tuple" else end.operands[:1]
        return False


def _size(kind: str) -> int:
    shape = re.match(r"\w+\[([\d,]*)\]", kind)
    return math.prod(int(n) for n in shape[1].split(",") if n) if shape else 0


def _operands(rest: str) -> tuple[str, ...]:
    """Names up to the bracket that closes the operands'."""
    depth = 1
    for at, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return tuple(re.findall(r"%([\w.\-]+)", rest[:at]))
    return ()
