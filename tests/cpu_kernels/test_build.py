"""The build on first use, the library of a wheel, and a host without a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxllm.cpu_kernels import compiler, library
from tests.cpu_kernels.weights import needs_kernels

ROOT = Path(__file__).parents[2]
NO_COMPILER = "no C++ compiler (no-such-compiler) is installed"


def test_without_a_compiler_the_reason_is_said(tmp_path):
    program = "from jaxllm import cpu_kernels as ck; print(ck.available(), '|', ck.reason())"
    environment = {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == f"False | {NO_COMPILER}"


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.cc:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(compiler.BuildError, match=r"failed: x[.]cc:1: error: no such thing"):
        library.compiled_path(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.fixture
def quick_compiler(tmp_path, monkeypatch) -> str:
    """A compiler that makes empty files."""
    path = tmp_path / "quick"
    path.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return str(path)


def test_the_first_start_says_that_it_compiles_even_where_nothing_is_set_up_to_log(tmp_path, quick_compiler):
    program = "import sys; from pathlib import Path; from jaxllm.cpu_kernels import library; "
    program += "library.compiled_path(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"compiling the CPU kernels with {quick_compiler}, once for this version")


def test_progress_is_told_file_by_file(tmp_path, quick_compiler):
    told = []
    library = tmp_path / "library.so"
    compiler.compile_library(quick_compiler, "x86_64", tmp_path, library, lambda *counts: told.append(counts))
    files = len(compiler.ISAS["x86_64"]) + len(list(compiler.SOURCES.glob("*.cc")))
    assert told == [(done, files) for done in range(1, files + 1)]


def test_some_instruction_sets_are_compiled_by_themselves(tmp_path, quick_compiler, monkeypatch):
    monkeypatch.setattr(library, "output_of", lambda command: "1.0")
    asked = []
    monkeypatch.setattr(library, "compile_library", lambda *given: (asked.append(given[-1]), given[3].touch()))
    small = library.compiled_path(tmp_path, isas=["avx2"])
    assert library.compiled_path(tmp_path, isas=["avx2"]) == small and asked == [["avx2"]]
    assert library.compiled_path(tmp_path, isas=["avx512"]) != small
    whole = library.compiled_path(tmp_path)
    assert asked == [["avx2"], ["avx512"], None]
    assert library.compiled_path(tmp_path, isas=["avxvnni"]) == whole  # it has them all


@needs_kernels
def test_a_library_of_few_sets_chooses_among_them(tmp_path):
    """Without the set of this processor the next one that is there runs, at last the portable one."""
    asked = (["avx2"] if "avx2" in library.runnable_isas() else []) if platform.machine() == "x86_64" else []
    path = tmp_path / compiler.LIBRARY
    compiler.compile_library(
        compiler.find_compiler(), platform.machine(), Path(jax.ffi.include_dir()), path, isas=asked
    )
    program = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); lib.jaxllm_isa.restype = ctypes.c_char_p;"
        "lib.jaxllm_runs_isa.restype = ctypes.c_bool;"
        "print(lib.jaxllm_isa().decode(), lib.jaxllm_runs_isa(b'avx512'), lib.jaxllm_runs_isa(b'portable'))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*[*asked, "portable"][:1], "False", "True"]


@needs_kernels
def test_what_linux_tells_of_the_processor_is_what_the_kernels_find():
    """Except that a system may refuse AMX's registers to a process."""
    known = list(compiler.ISAS[platform.machine()])
    told = library.runnable_here(known)
    if told is None:
        pytest.skip("this system does not tell")
    found = [isa for isa in known if isa in library.runnable_isas()]
    assert [isa for isa in told if isa != "amx"] == [isa for isa in found if isa != "amx"]


@pytest.mark.parametrize(
    ("cpuinfo", "wanted"),
    [
        ("flags\t\t: sse2 avx avx2 fma f16c bmi2", ["avx2"]),
        ("flags\t\t: avx2 fma f16c bmi2 avx_vnni", ["avxvnni"]),
        ("flags\t\t: avx2 fma f16c", []),
        ("flags : avx2 fma f16c bmi2 avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni", ["avx512"]),
        (
            "flags : avx2 fma f16c bmi2 avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile "
            "amx_int8 amx_bf16",
            ["avx512bf16", "amx"],
        ),
        ("nothing about it", None),
        (None, None),
    ],
)
def test_the_sets_that_a_first_start_compiles(cpuinfo, wanted, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(f"processor\t: 0\n{cpuinfo}\n")
    known = list(compiler.ISAS["x86_64"])
    found = library.runnable_here(known, path)
    monkeypatch.setattr(library, "runnable_here", lambda isas: found)
    assert library.wanted_here(known, platform.machine()) == wanted
    assert library.wanted_here(known, "another") is None


def test_a_choice_that_is_passed_on_compiles_nothing_more(monkeypatch):
    """A process that is told what another has chosen finds that one's library."""
    monkeypatch.setattr(library, "wanted_here", lambda known, machine: ["avx512bf16", "amx"])
    known = list(compiler.ISAS["x86_64"])
    for chosen in ("", "amx", "avx512bf16"):
        assert library._compiled_for(chosen, known) == ["avx512bf16", "amx"]
    assert library._compiled_for("avx2", known) == ["avx2"]


@needs_kernels
def test_a_second_start_finds_the_library(monkeypatch):
    monkeypatch.setattr(library, "_compile", None)
    assert library.compiled_path().exists()


@needs_kernels
def test_an_instruction_set_can_be_forced_from_outside():
    program = "from jaxllm import cpu_kernels as ck; print(ck.available() and ck.isa(), ck.reason())"
    for isa, said in (("portable", "portable"), ("mmx", "False JAXLLM_CPU_ISA is 'mmx'; this machine runs ")):
        environment = {**os.environ, "JAXLLM_CPU_ISA": isa}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.startswith(said)


@needs_kernels
def test_forcing_ends_with_the_block():
    before = library.isa()
    with library.forced("portable"):
        assert library.isa() == "portable"
    assert library.isa() == before
    with pytest.raises(ValueError, match="the ISA is 'mmx'; this machine runs "), library.forced("mmx"):
        pass


def packaged(directory: Path) -> Path:
    """Where a wheel that is installed in `directory` has the library of these sources."""
    path = directory / compiler.sources_version(platform.machine()) / compiler.LIBRARY
    path.parent.mkdir()
    return path


def start_with(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that looks for a wheel's library in `directory`: are there kernels, if not why, and does JAX run?"""
    program = (
        "import sys, pathlib, jax; from jaxllm import cpu_kernels as ck; from jaxllm.cpu_kernels import library;"
        "library.PACKAGED = pathlib.Path(sys.argv[1]); print(ck.available(), '|', ck.reason());"
        "print(int(jax.numpy.arange(4).sum()))"
    )
    command = [sys.executable, "-c", program, str(directory)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True)


@needs_kernels
def test_the_library_of_a_wheel_needs_no_compiler(tmp_path):
    shutil.copy(library.compiled_path(), packaged(tmp_path))
    done = start_with(tmp_path, CXX="no-such-compiler")
    assert (done.stdout, done.stderr) == ("True | \n6\n", "")


@needs_kernels
def test_a_library_of_other_sources_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "PACKAGED", tmp_path)
    path = packaged(tmp_path)
    path.touch()
    assert library.packaged_path() == path
    sources = shutil.copytree(compiler.SOURCES, tmp_path / "src")
    with (sources / "team.cc").open("a") as file:
        file.write("// changed")
    monkeypatch.setattr(compiler, "SOURCES", sources)
    assert library.packaged_path() is None


OTHER_FFI = """
#include "xla/ffi/api/c_api.h"
void jaxllm_isa() {}
void jaxllm_set_isa() {}
void jaxllm_runs_isa() {}
void jaxllm_rounds_to_bf16() {}
void jaxllm_set_reads_by_group() {}
XLA_FFI_Error* jaxllm_linear(XLA_FFI_CallFrame* call) {
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)call->extension_start)->metadata;
  metadata->api_version.major_version = 0;
  metadata->api_version.minor_version = 99;
  return 0;
}
"""


@needs_kernels
@pytest.mark.parametrize("kind", ["made for another version of XLA's FFI", "not a library"])
def test_a_library_that_does_not_run_here_is_compiled_anew(kind, tmp_path):
    path = packaged(tmp_path)
    if kind == "not a library":
        path.write_text("!")
        reason = f"{path}: file too short"
    else:
        source = tmp_path / "other.c"
        source.write_text(OTHER_FFI)
        include = ["-I", jax.ffi.include_dir()]
        command = [compiler.find_compiler(), "-x", "c", "-shared", "-fPIC", *include, str(source), "-o", str(path)]
        subprocess.run(command, check=True)
        reason = "the handler's API version (0.99) is incompatible with the framework's API version"
    done = start_with(tmp_path)
    assert done.stdout == "True | \n6\n"
    without = start_with(tmp_path, CXX="no-such-compiler")
    assert without.stdout == f"False | {NO_COMPILER}\n6\n"
    for process in (done, without):
        (line,) = process.stderr.splitlines()
        assert "the CPU kernels that came with jaxllm do not run here: " in line
        assert reason in line


def test_a_build_of_wheels_can_load_the_compiler_alone():
    subprocess.run([sys.executable, "-I", "-S", compiler.__file__], check=True)


def build_wheel(directory: Path, **environment: str) -> tuple[Path, str]:
    """The wheel of this checkout, built as pip builds it, and what pip said."""
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel, done.stdout + done.stderr


def run_installed(wheel: Path, directory: Path, program: str) -> str:
    """What a program prints where that wheel is installed, with no program on the path and nothing compiled before."""
    target = directory / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True)
    environment = {"PATH": "", "HOME": str(directory), "PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", f"import jaxllm; assert jaxllm.__file__.startswith({str(target)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


PRODUCT = """
import numpy as np
from jaxllm import cpu_kernels as ck
rng = np.random.default_rng(0)
weights, x = rng.normal(size=(32, 64)).astype(np.float32), rng.normal(size=(3, 64)).astype(np.float32)
(result,) = ck.linears(x, [ck.Tiles(ck.repack("f32", weights), "f32", 32)])
np.testing.assert_allclose(result, x.astype(float) @ weights.T.astype(float), rtol=1e-5, atol=1e-5)
print(*ck.runnable_isas())
"""


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="kernels are packaged for Linux only")
def test_a_wheel_carries_the_kernels(tmp_path):
    wheel, _ = build_wheel(tmp_path / "wheels", JAXLLM_WHEEL_KERNELS="on")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert run_installed(wheel, tmp_path, PRODUCT).split() == library.runnable_isas()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"CXX": "no-such-compiler"}, NO_COMPILER), ({"JAXLLM_WHEEL_KERNELS": "off"}, "JAXLLM_WHEEL_KERNELS is off")],
)
def test_a_wheel_without_kernels_says_why(environment, reason, tmp_path):
    wheel, said = build_wheel(tmp_path / "wheels", **environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert f"this wheel has no compiled CPU kernels: {reason}" in said
    program = "from jaxllm import cpu_kernels as ck; print(ck.available(), '|', ck.reason())"
    assert run_installed(wheel, tmp_path, program).startswith("False | no C++ compiler ")
