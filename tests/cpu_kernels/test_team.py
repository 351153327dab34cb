"""The threads that share a call's work, under the compiler's sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jaxllm.cpu_kernels.compiler import SOURCES, BuildError, find_compiler

STRESS = Path(__file__).with_name("team_stress.cc")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_each_unit_is_worked_on_once(sanitizer: str, tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    command = [compiler, "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-pthread", "-I", str(SOURCES)]
    nothing, program = tmp_path / "nothing", tmp_path / "stress"
    nothing.with_suffix(".cc").write_text("int main() {}")
    built = subprocess.run([*command, f"{nothing}.cc", "-o", str(nothing)], capture_output=True)
    if built.returncode or subprocess.run([nothing], capture_output=True).returncode:
        pytest.skip(f"-fsanitize={sanitizer} does not work here, even for an empty program")
    subprocess.run([*command, str(STRESS), str(SOURCES / "team.cc"), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
