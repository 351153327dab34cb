"""The kernels of every instruction set without XLA: this machine's own, and AMX and ARM's in emulators."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels.compiler import ISAS, SOURCES, find_compiler
from jaxllm.cpu_kernels.library import compiled_path
from tests.cpu_kernels.weights import ISAS as ISAS_HERE
from tests.cpu_kernels.weights import needs_kernels

CHECKS = Path(__file__).with_name("native")
ARM = "aarch64-linux-gnu-g++", "qemu-aarch64"
needs_arm = pytest.mark.skipif(
    not all(map(shutil.which, ARM)), reason="no emulated ARM: install g++-aarch64-linux-gnu and qemu-user"
)


def build(compiler: str, library: Path) -> Path:
    """The checks of a library, compiled beside it where that has not been done."""
    command = [compiler, "-std=c++17", "-O2", "-I", str(SOURCES), *map(str, sorted(CHECKS.glob("*.cc"))), str(library)]
    text = "".join(path.read_text() for path in sorted(CHECKS.iterdir()))
    program = library.with_name(f"checks-{hashlib.sha256(repr((command, text)).encode()).hexdigest()[:16]}")
    if not program.exists():
        own = program.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-o", str(own)], check=True)
        own.replace(program)
    return program


def lines_of(command: list[str]) -> list[str]:
    """What a program prints, which must have ended well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def products_of(lines: list[str], isas: list[str]) -> set[str]:
    """Hashes of the products that vector instruction sets made, all of which must have been checked.

    The best of them is the one that a process takes by itself.
    """
    assert lines[0] == f"best {isas[0]}"
    checked = dict(line.split() for line in lines[1:])
    assert list(checked) == isas
    return {checked[isa] for isa in isas if isa != "portable"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """What float64 gives: this machine writes it, and the emulator, which takes half a minute for it, reads it."""
    return tmp_path_factory.mktemp("expected") / "numbers"


@pytest.fixture(scope="module")
def products_here(expected) -> set[str]:
    """Those of this machine, where the checks are run."""
    isas = cpu_kernels.runnable_isas()
    program = build(find_compiler(), compiled_path())
    return products_of(lines_of([str(program), str(expected), *isas]), isas)


@needs_kernels
def test_vector_instruction_sets_agree_to_the_last_bit(products_here):
    assert len(products_here) <= 1


@needs_kernels
@pytest.mark.skipif("avx512bf16" not in ISAS_HERE, reason="AMX is emulated on processors with AVX-512 BF16 alone")
def test_amx_computes_the_same_bits(products_here, expected):
    program = build(find_compiler(), compiled_path())
    lines = lines_of([str(program), str(expected), "amx"])
    assert products_of(lines, ["amx"]) == products_here


@pytest.fixture(scope="module")
def arm_program() -> Path:
    return build(ARM[0], compiled_path(compiler=ARM[0], machine="aarch64"))


def emulated(program: Path, processor: str, expected: Path, *isas: str) -> list[str]:
    command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", processor, program, expected, *isas]
    return lines_of([str(part) for part in command])


@needs_arm
@needs_kernels
def test_arm_computes_the_same_bits(arm_program, products_here, expected):
    isas = [*reversed(ISAS["aarch64"]), "portable"]
    products = products_of(emulated(arm_program, "max", expected, *isas), isas)
    assert len(products | products_here) == 1


@needs_arm
@pytest.mark.parametrize(("processor", "best"), [("cortex-a76", "neon"), ("cortex-a72", "portable")])
def test_an_arm_processor_runs_what_it_has(arm_program, expected, processor, best):
    assert emulated(arm_program, processor, expected, "neon_i8mm") == [f"best {best}"]
