"""What compiled steps depend on, in words: two starts with the same manifest run the same executables."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jaxlib
from jax.sharding import Mesh

from jaxllm import compat, cpu_kernels, machine
from jaxllm.engine.core.executables import COMPILER_OPTIONS
from jaxllm.engine.core.saved import fingerprint
from jaxllm.engine.start.plan import Blueprint

ROOT = Path(__file__).parents[2]
TRACED = ("compat.py", "engine", "models", "quantization", "pallas_kernels", "cpu_kernels", "sharding", "requests")
"""Where all is that a step is made of."""
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
CPU_INFO = Path("/proc/cpuinfo")


def step_manifest(blueprint: Blueprint, mesh: Mesh) -> dict[str, str]:
    """All that the executables of this plan on this mesh depend on."""
    devices = mesh.devices.flatten().tolist()
    device = devices[0]
    on_cpu = device.platform == "cpu"
    spec, sizes, kernels = blueprint.spec, blueprint.sizes, blueprint.options.kernels
    limits = ("max_num_seqs", "max_num_batched_tokens", "decode_steps", "max_model_len", "page_size", "num_pages")
    stated = ", ".join(f"{name} {getattr(sizes, name)}" for name in (*limits, "num_snapshots"))
    draft = blueprint.draft
    return {
        "jaxllm": f"sources {sources_digest()}",
        "jax": f"{jax.__version__}, jaxlib {jaxlib.__version__}{''.join(map(_plugin, PLUGINS))}",
        "python": platform.python_version(),
        "compiler": f"{compat.compile_options_digest(devices)}, {COMPILER_OPTIONS.get(device.platform, {})}",
        "devices": f"{device.platform}, {mesh.size} x {device.device_kind}",
        "process": f"{jax.process_index()} of {jax.process_count()}",
        "processor": _processor() if on_cpu else "any",
        "kernels": f"{kernels.name}, {cpu_kernels.isa()}" if kernels.native else kernels.name,
        "model": f"{spec.family.name}, {fingerprint(spec.config)}, {fingerprint(blueprint.params)}",
        "features": f"drafts {blueprint.drafts}, adapters {blueprint.adapters}",
        "draft": "none" if draft is None else f"{fingerprint(draft.spec.shape)}, {fingerprint(draft.params)}",
        "sizes": f"{stated}, caches {fingerprint((sizes.layers, sizes.hidden_size, sizes.vocab_size))}",
        "dtype": blueprint.plan.dtype,
        "expert_parallel": str(blueprint.options.expert_parallel),
        "experts in host memory": str(blueprint.options.host_experts),
        "batches side by side": str(blueprint.options.dp),
        "stage": str(blueprint.options.stage or "all layers"),
    }


@cache
def sources_digest() -> str:
    """Of the files that steps, layers and kernels are written in."""
    digest = hashlib.sha256()
    for name in TRACED:
        for file in sorted([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*")):
            if file.suffix in (".py", ".cc", ".h") and file.is_file():
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _plugin(package: str) -> str:
    try:
        return f", {package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """Its kind and features, and how many cores XLA parts a loop among."""
    features = ""
    if CPU_INFO.exists():
        lines = CPU_INFO.read_text(errors="replace").splitlines()
        told = ("model name", "flags", "Features", "CPU part")
        features = "\n".join(dict.fromkeys(line for line in lines if line.startswith(told)))
    cores = machine.allowed_cores()
    return f"{platform.machine()}, {fingerprint(features)}, {cores} cores, NPROC {os.environ.get('NPROC', '')}"
