"""Compile a step for an H100 that need not be there, and say what the program is made of, as JSON.

`python -m tests.gpu.compile_step CONFIG.json KIND SIZE VARIANT DIRECTORY [--tp N] [--dp N]`, with the CUDA plugin of
PJRT on PYTHONPATH; XLA leaves its account of the program in DIRECTORY. `make check-gpu` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from tests.gpu import sparse
from tests.gpu.hlo import Program
from tests.gpu.ptx import DUMP, taken_by_kernels
from tests.gpu.targets import mesh_of

Q4_K_M = "q4_k_m"
MEMORY = 80 * 10**9
PAGES = 8 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("kind", choices=("decode", "verify", "backbone"))
    parser.add_argument("size", type=int)
    parser.add_argument("variant", choices=("plain", "sampled"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1, help="batches side by side, whose devices share the experts")
    parser.add_argument("--isq", help="quantize the weights")
    parser.add_argument("--packing", help=f"of a checkpoint of a Llama: {Q4_K_M} or one of sparse.PACKINGS")
    parser.add_argument("--host-experts", type=int, default=0, help="of each layer, in the memory of the host")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--defaults", action="store_true", help="leave the compiler's options as XLA has them")
    parser.add_argument(
        "--defect", choices=("copy", "transpose", "spill", "expand"), help="bring in what a check must see"
    )
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(compiled(given)))


def compiled(given: argparse.Namespace) -> dict[str, Any]:
    import jax

    from jaxllm.config import EngineConfig
    from jaxllm.config.parts import SpeculativeConfig
    from jaxllm.engine.core.executables import COMPILER_OPTIONS
    from jaxllm.engine.core.keys import PLAIN, SAMPLED, Key
    from jaxllm.engine.start.blueprint import make_blueprint
    from jaxllm.engine.start.plan import step_functions
    from jaxllm.engine.start.platform import Platform
    from jaxllm.weights import open_checkpoint
    from tests.gpu import sparse_gguf

    folder, load_format = given.config.parent, "dummy"
    if given.packing == Q4_K_M:
        folder, load_format = folder / "model.gguf", "auto"
        sparse_gguf.write(json.loads(given.config.read_text()), folder)
    elif given.packing:
        folder, load_format = folder / given.packing, "auto"
        sparse.write(json.loads(given.config.read_text()), given.packing, folder)
    config = EngineConfig(
        model=str(folder), load_format=load_format, tensor_parallel_size=given.tp,
        data_parallel_size=given.dp, enable_dp_attention=given.dp > 1, enable_expert_parallel=given.dp > 1,
        max_model_len=given.max_model_len, kv_cache_memory=PAGES, isq=given.isq,
        num_experts_offload_per_rank=given.host_experts,
        speculative_config=SpeculativeConfig(num_speculative_tokens=3) if given.kind == "verify" else None,
    )  # fmt: skip
    checkpoint = open_checkpoint(folder, load_format)
    blueprint = make_blueprint(config, checkpoint, Platform("gpu", given.tp * given.dp, MEMORY, 0))
    key = Key(given.kind, given.size, SAMPLED if given.variant == "sampled" else PLAIN)
    mesh = mesh_of(tp=given.tp, dp=given.dp)

    def lower(mesh: Any) -> Any:
        functions = step_functions(blueprint, mesh)
        function, arguments = functions.step(key)
        if given.defect:
            function = with_defect(function, given.defect)
        return functions, arguments, function.trace(*arguments).lower(lowering_platforms=("cuda",))

    functions, arguments, lowered = lower(mesh)
    if given.host_experts:  # GPUs that are not there have no host; what no device is asked of knows of its memory
        lowered._lowering._hlo = lower(mesh.abstract_mesh)[2]._lowering._hlo
    options = {} if given.defaults else COMPILER_OPTIONS[functions.platform]
    began = time.process_time()
    program = lowered.compile(compiler_options=options | {"xla_dump_to": str(given.directory), **DUMP})
    seconds = time.process_time() - began
    memory, text = program.memory_analysis(), program.as_text()
    buffers = jax.tree.leaves(functions.state.abstract()["caches"])
    taken = taken_by_kernels(given.directory)
    return {
        "seconds": seconds,
        "layers": blueprint.spec.config.num_layers,
        "weights": blueprint.plan.weight_bytes,
        "gathered": sorted(set(re.findall(r"= \(?(\w+)\[[\d,]*\]\S* all-gather(?:-start)?\(", text))),
        "sent": arguments[-1].size * arguments[-1].dtype.itemsize,
        "temporaries": memory.temp_size_in_bytes,
        "on_host": memory.host_argument_size_in_bytes,
        "host_weights": blueprint.plan.host_weight_bytes,
        "planned": blueprint.plan.workspace_bytes,
        "aliased": memory.alias_size_in_bytes,
        "pages": sum(buffer.size * buffer.dtype.itemsize for buffer in buffers) // (given.tp * given.dp),
        "copies": Program(text).copies(),
        "reduced": sorted(set(re.findall(r"= \(?(\w+)\[[\d,]*\]\S* all-reduce(?:-start)?\(", text))),
        "spilled": {name: kernel.spilled for name, kernel in taken.items() if kernel.spilled},
        **graphs(given.directory),
    }


def with_defect(function: Any, defect: str) -> Any:
    """A step as it must not be: pages that it may not change, or that it turns over; a kernel with too few threads;
    weights that are expanded in memory."""
    import jax
    import jax.numpy as jnp

    from jaxllm.pallas_kernels.gpu import flash
    from jaxllm.pallas_kernels.matrices import PackedFormat

    if defect == "copy":
        return jax.jit(function.__wrapped__)
    if defect == "expand":
        PackedFormat.expanded_from = property(lambda format: 1)  # type: ignore[assignment]
        return function
    if defect == "spill":
        flash._warps = lambda tile_rows, spec: 2
        return function

    def step(weights: Any, caches: Any, *rest: Any) -> Any:
        caches, *others = function.__wrapped__(weights, caches, *rest)
        turned = jax.tree.map(lambda buffer: jnp.swapaxes(buffer, 0, 2), caches)
        return (turned, *others)

    return jax.jit(step, donate_argnums=(1, 2))


def graphs(directory: Path) -> dict[str, Any]:
    """What the host starts, one after the other: a CUDA graph is one thing. And the kernels, wherever they are."""
    (path,) = directory.glob("*thunk_sequence_after_thunk_passes.txt")
    lines = path.read_text().splitlines()
    top = [line.split()[1] for line in lines if re.match(r"\d+: k", line)]
    kernels = sum(bool(re.match(r"\s*\d+: k(CustomKernel|Kernel|Copy|Gemm|CublasLt\w*) ", line)) for line in lines)
    return {"launches": top, "kernels": kernels}


if __name__ == "__main__":
    main()
