"""What is said where a GPU is here and JAX does not run on it: what JAX raises is JAX's, the GPU is made up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxllm import compat
from jaxllm.config import EngineConfig
from jaxllm.engine.start import build
from jaxllm.errors import ConfigError
from jaxllm.sharding import devices, nvidia
from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs

GIB = 2**30

A_GPU_IS_HERE = """
import os, os.path
exists = os.path.exists
os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
"""
"""As `sitecustomize`, in every process: what JAX asks for is there."""

PLUGIN = """
import os
def initialize():
    open({share!r}, "w").write(os.environ.get("XLA_CLIENT_MEM_FRACTION", "none"))
    raise RuntimeError({error!r})
"""
"""JAX calls it when its backends start; it leaves behind how much of the memory JAX would have taken then."""

SMI = """#!/bin/sh
case "$1" in
  *compute-apps*) echo "4711, /usr/bin/python3, 70000" ;;
  *driver_version*) echo "{driver}" ;;
  *) echo "NVIDIA H100 80GB HBM3, 81559, {free}" ;;
esac
"""

INSUFFICIENT = "jaxlib/cuda/versions_helpers.cc:113: operation cuInit(0) failed: CUDA driver version is insufficient"
FULL = "INTERNAL: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory"


def make_gpu(
    folder: Path, driver: str = "580.65.06", free: int = 81000, cuda: int | None = 13, error: str = ""
) -> Path:
    """A folder for PYTHONPATH and PATH: `nvidia-smi`, and a plugin whose start fails with `error`."""
    smi = folder / "nvidia-smi"
    smi.write_text(SMI.format(driver=driver, free=free))
    smi.chmod(0o755)
    (folder / "sitecustomize.py").write_text(A_GPU_IS_HERE)
    if cuda is not None:
        plugin = folder / "jax_plugins" / f"xla_cuda{cuda}"
        plugin.mkdir(parents=True)
        (plugin / "__init__.py").write_text(PLUGIN.format(error=error, share=str(folder / "share")))
    return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make this process believe in a GPU: `machine(driver=…, cuda=…)`."""

    def make(**facts: object) -> None:
        folder = make_gpu(tmp_path, **facts)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(compat, "nvidia_gpu_is_here", lambda: True)
        monkeypatch.setattr(compat, "chosen_platforms", lambda: "")
        monkeypatch.setattr(nvidia, "DRIVER_FILE", tmp_path / "version")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    return make


@pytest.mark.parametrize(
    ("facts", "said", "expected"),
    [
        ({"cuda": None}, "", "JAX has no CUDA plugin: pip install '.[cuda13]', or set JAX_PLATFORMS=cpu"),
        ({"cuda": None, "driver": "535.129.03"}, "", "no CUDA plugin: pip install '.[cuda12]'"),
        ({"cuda": None, "driver": "470.82.01"}, "", "its driver is too old: install 525 or newer"),
        ({"driver": "535.129.03"}, INSUFFICIENT, "needs driver 580 or newer: install that, pip install '.[cuda12]'"),
        ({"driver": "580.65.06"}, INSUFFICIENT, "CUDA 13 needs driver 580 or newer"),
        ({}, FULL, "it has no memory left: python3 (process 4711, 68.36 GiB); end what runs on it"),
        ({}, "INTERNAL: no supported devices found for platform CUDA", "it has no memory left"),
        ({}, "CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized", "JAX could not start it: CUDA_ERROR_SYSTEM"),
    ],
)  # fmt: skip
def test_each_reason_is_one_line_that_says_what_helps(machine, facts: dict, said: str, expected: str) -> None:
    machine(**facts)
    line = devices.why_unused([f"Jax plugin configuration error\nTraceback (most recent call last):\n  x\n{said}"])
    assert expected in line and "\n" not in line and "Traceback" not in line
    assert "NVIDIA H100 80GB HBM3" in line and facts.get("driver", "580.65.06") in line


@pytest.mark.parametrize("chosen", ["cuda", "gpu", "rocm"])
def test_a_platform_that_is_not_here_is_one_line(chosen: str) -> None:
    """JAX gives up "cuda" by an assertion."""
    program = "from jaxllm.sharding.devices import find_devices; find_devices()"
    environment = os.environ | {"JAX_PLATFORMS": chosen, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert f"\njaxllm.errors.ConfigError: JAX cannot start JAX_PLATFORMS={chosen}: " in done.stderr
    assert "AssertionError" not in done.stderr


def test_the_driver_is_read_of_its_own_file_first(machine, tmp_path: Path) -> None:
    """Both kinds of it; containers often have that alone."""
    machine(driver="1.1")
    for kind in ("UNIX x86_64 Kernel Module  535.129.03 ", "UNIX Open Kernel Module for x86_64  580.65.06  Release"):
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA {kind} Thu Oct 19\nGCC version: gcc 12.2.0\n")
        assert nvidia.driver_version() in ("535.129.03", "580.65.06")
    (tmp_path / "version").unlink()
    assert nvidia.driver_version() == "1.1"


def test_memory_that_others_have_is_refused_before_anything_starts(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(free=11000)
    monkeypatch.setattr(compat, "backends_run", lambda: False)
    with pytest.raises(ConfigError) as refused:
        devices.check_free_memory(1, 0.9)
    for part in ("gpu_memory_utilization is 0.9", "10.74 GiB are free", "python3 (process 4711", "accept 0.13"):
        assert part in str(refused.value)
    devices.check_free_memory(1, 0.13)
    monkeypatch.setattr(compat, "backends_run", lambda: True)
    devices.check_free_memory(1, 0.9)  # what is taken may be this process's own


def test_the_device_is_named_and_memory_that_it_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16106127360 bytes."
        )

    monkeypatch.setattr(build, "_load", refuse)
    monkeypatch.setattr(compat, "device_memory", lambda device: (8 * GIB, 8 * GIB))
    caplog.set_level("INFO")
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    config = EngineConfig(
        model=str(model), skip_tokenizer_init=True, kv_cache_memory=2**20, enforce_eager=True, compile_cache_dir=None
    )
    with pytest.raises(ConfigError, match=r"the device refused memory: .* planned with gpu_memory_utilization"):
        build.build_core(config)
    (line,) = [record.message for record in caplog.records if record.message.endswith("planned")]
    assert line.startswith("1 cpu of 8 GiB: ")


COMMANDS = {
    "plan": ("plan",),
    "in process": ("bench", "throughput", "--skip-tokenizer-init"),
    "engine process": ("serve", "--skip-tokenizer-init", "--port", "0"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_end_with_one_line(command: str, tmp_path: Path) -> None:
    """JAX itself logs a traceback and runs on the CPU; and its memory is asked for before it starts."""
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    gpu = make_gpu(tmp_path, driver="535.129.03", error=INSUFFICIENT)
    here = str(Path(__file__).parents[2])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "CUDA_"))}
    environment |= {"PATH": f"{gpu}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": f"{gpu}{os.pathsep}{here}"}
    first, *rest = COMMANDS[command]
    program = [sys.executable, "-m", "jaxllm.cli.main", first, *rest, "--model", str(model)]
    program += ["--dtype", "float32", "--gpu-memory-utilization", "0.8"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if " INFO " not in line and not line.startswith("INFO")]
    assert len(errors) == 1 and "CUDA 13 needs driver 580" in errors[0], done.stderr
    assert (tmp_path / "share").read_text() == "0.85"


def test_cpus_are_found_where_nothing_is_wrong(machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor where a GPU is hidden, or its file is all that there is of it."""
    assert devices.find_devices() == jax.devices()
    machine(cuda=None)
    assert devices.find_devices() == jax.devices()
    (line,) = caplog.messages
    assert line.startswith("running on the CPU: an NVIDIA GPU is here") and "no CUDA plugin" in line
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert devices.find_devices() == jax.devices()
    (tmp_path / "nvidia-smi").unlink()
    assert devices.find_devices() == jax.devices()
