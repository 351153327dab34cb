"""Compile a step for an H100 that need not be there, and say what the program is made of, as JSON.

`python -m tests.gpu.compile_step CONFIG.json KIND SIZE VARIANT DIRECTORY [--tp N]`, with the CUDA plugin of PJRT on
PYTHONPATH; XLA leaves its account of the program in DIRECTORY. `make check-gpu` runs it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

MEMORY = 80 * 10**9
PAGES = 8 * 2**30
LIBRARY: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
"""Products of floats as cuBLAS does them: how XLA's own kernels would split one is a guess without a device."""
TARGET = Path(__file__).with_name("h100.txtpb")
"""What XLA must know of the device: printed by XLA on an H100 SXM."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("kind", choices=("decode", "backbone"))
    parser.add_argument("size", type=int)
    parser.add_argument("variant", choices=("plain", "sampled"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--isq", help="quantize the weights")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--defaults", action="store_true", help="leave the compiler's options as XLA has them")
    parser.add_argument(
        "--triton", action="store_true", help="products by XLA's kernels, which convert codes of 8 bits"
    )
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    dump = "--xla_dump_hlo_as_text --xla_dump_emitter_re=^ptx"
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={given.directory} {dump}"
    print(json.dumps(compiled(given)))


def compiled(given: argparse.Namespace) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    from jaxllm.config import EngineConfig
    from jaxllm.engine.device.executables import COMPILER_OPTIONS
    from jaxllm.engine.device.keys import PLAIN, SAMPLED
    from jaxllm.engine.device.step import StepFunctions
    from jaxllm.engine.start.plan import Platform, make_blueprint
    from jaxllm.sharding.mesh import DATA, TENSOR
    from jaxllm.weights import open_checkpoint

    devices = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{given.tp}"
    ).devices
    mesh = Mesh(np.array(devices).reshape(1, given.tp), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)
    config = EngineConfig(
        model=str(given.config.parent), load_format="dummy", tensor_parallel_size=given.tp,
        max_model_len=given.max_model_len, kv_cache_memory=PAGES, isq=given.isq,
    )  # fmt: skip
    checkpoint = open_checkpoint(given.config.parent, "dummy")
    blueprint = make_blueprint(config, checkpoint, Platform("gpu", given.tp, MEMORY, 0))
    functions = StepFunctions(blueprint.model, blueprint.params, mesh, blueprint.sizes)
    if given.kind == "decode":
        function, arguments = functions.decode(given.size, SAMPLED if given.variant == "sampled" else PLAIN)
    else:
        function, arguments = functions.backbone(given.size)
    lowered = function.lower(*arguments)
    began = time.perf_counter()
    options = {} if given.defaults else COMPILER_OPTIONS[functions.platform]
    program = lowered.compile(compiler_options=options | ({} if given.triton else LIBRARY))
    seconds = time.perf_counter() - began
    memory = program.memory_analysis()
    buffers = jax.tree.leaves(functions.abstract_state().pages)
    return {
        "seconds": seconds,
        "layers": blueprint.spec.config.num_layers,
        "weights": blueprint.plan.weight_bytes,
        "sent": arguments[-1].size * arguments[-1].dtype.itemsize,
        "temporaries": memory.temp_size_in_bytes,
        "planned": blueprint.plan.workspace_bytes,
        "aliased": memory.alias_size_in_bytes,
        "pages": sum(buffer.size * buffer.dtype.itemsize for buffer in buffers) // given.tp,
        "large_copies": large_copies(
            program.as_text(), {leaf.size // given.tp for leaf in jax.tree.leaves(arguments[:2])}
        ),
        **graphs(given.directory),
        **registers(given.directory),
    }


def large_copies(text: str, buffers: set[int], least: int = 2**20) -> list[str]:
    """Copies and transposes of as many numbers as one of the weights' or pages' buffers has, but for the small ones."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?(\S+) = \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", line)
        if match:
            size = math.prod(map(int, match[2].split(",")))
            if size >= least and size in buffers:
                found.append(match[1])
    return found


def graphs(directory: Path) -> dict[str, Any]:
    """What the host starts, one after the other: a CUDA graph is one thing. And the kernels, wherever they are."""
    (path,) = directory.glob("*thunk_sequence_after_thunk_passes.txt")
    lines = path.read_text().splitlines()
    top = [line.split()[1] for line in lines if re.match(r"\d+: k", line)]
    kernels = sum(bool(re.match(r"\s*\d+: k(CustomKernel|Kernel|Copy|Gemm|CublasLt\w*) ", line)) for line in lines)
    return {"launches": top, "kernels": kernels}


def registers(directory: Path) -> dict[str, Any]:
    """The most registers that a kernel takes, and the bytes that each one spills that does."""
    most, spilled = 0, {}
    ptxas = next(path for root in os.environ["PYTHONPATH"].split(":") for path in Path(root).glob("nvidia/*/bin/ptxas"))
    for source in directory.glob("*.ptx"):
        if not source.stat().st_size:
            continue
        said = subprocess.run(
            [ptxas, "-v", "-arch=sm_90a", source, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr
        most = max([most, *map(int, re.findall(r"Used (\d+) registers", said))])
        pairs = re.findall(r"Function properties for (\S+)\n.* (\d+) bytes spill stores", said)
        spilled |= {name: int(count) for name, count in pairs if int(count)}
    return {"registers": most, "spilled": spilled}


if __name__ == "__main__":
    main()
