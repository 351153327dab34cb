"""The build on first use, and a host without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxllm.cpu_kernels import build, library
from tests.cpu_kernels.weights import needs_kernels


def test_without_a_compiler_the_reason_is_said(tmp_path):
    program = "from jaxllm import cpu_kernels as ck; print(ck.available(), '|', ck.reason())"
    environment = {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False | no C++ compiler (no-such-compiler) is installed"


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.cc:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match=r"failed: x[.]cc:1: error: no such thing"):
        build.library_path(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))


@needs_kernels
def test_a_second_start_finds_the_library(monkeypatch):
    monkeypatch.setattr(build, "_compile", None)
    assert build.library_path().exists()


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
