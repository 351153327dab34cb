"""How long a model takes to load beside reading its files, and from an Orbax directory beside its source.

    python benchmarks/load.py [gemma3-270m | FILE.gguf | FOLDER] [--rounds 5]
    python benchmarks/load.py --dummy-gb 1.5
    python benchmarks/load.py FOLDER --orbax [--isq q4k]

Each round runs fresh processes: with the files in the page cache and dropped from it, with the weights in the C++
kernels' tiles and as they are. Read is the files through a buffer of 1 MiB, `into memory` the same into memory of its
own, as weights need. Load is from the opening of the files to all arrays on the device, imports excluded: the header,
the plan, then the weights. Medians. `--dummy-gb` makes a file of random blocks that is shaped like Llama's in Q4_K_M;
`--orbax` converts the model first, and compares the two with their files in the cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIGURES = ("read", "into_memory", "open", "plan", "weights", "load")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gemma3-270m")
    parser.add_argument("--dummy-gb", type=float)
    parser.add_argument("--orbax", action="store_true")
    parser.add_argument("--isq")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", nargs=2, metavar=("KERNELS", "CACHE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(measure(given.model, given.isq, *given.once)))
        return
    isq = ["--isq", given.isq] if given.isq else []
    with tempfile.TemporaryDirectory() as folder:
        model, caches = given.model, ("warm", "cold")
        if given.dummy_gb:
            model = str(make_dummy(Path(folder) / "dummy.gguf", given.dummy_gb))
        sources = {"source": [model, *isq]}
        if given.orbax:
            saved, caches = f"{folder}/saved", ("warm",)
            subprocess.run([sys.executable, "-m", "jaxllm.cli.main", "convert", model, saved, *isq], check=True)
            sources["Orbax"] = [saved]
        rows = [(source, kernels, cache) for source in sources for cache in caches for kernels in ("auto", "off")]
        rounds: dict[tuple[str, ...], list[dict[str, float]]] = {row: [] for row in rows}
        for _ in range(given.rounds):
            for source, *how in rows:
                command = [sys.executable, __file__, *sources[source], "--once", *how]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                rounds[source, *how].append(json.loads(done.stdout))
    names = " | ".join(name.replace("_", " ") for name in FIGURES)
    print(f"| from | weights | cache | {names} | load / read | / memory |")
    print("|---|---|---|" + "---:|" * (len(FIGURES) + 2))
    for (source, kernels, cache), found in rounds.items():
        cells = [source, "in tiles" if kernels == "auto" else "as they are", cache]
        cells += [f"{statistics.median(one[name] for one in found):.3f}" for name in FIGURES]
        cells += [f"{statistics.median(one['load'] / one[of] for one in found):.1f}" for of in FIGURES[:2]]
        print("|", " | ".join(cells), "|")


def measure(model: str, isq: str | None, kernels: str, cache: str) -> dict[str, float]:
    """Seconds of one process."""
    import gguf.constants  # noqa: F401 - what is imported on the way
    import jax
    import numpy as np
    import orbax.checkpoint  # noqa: F401 - likewise

    from jaxllm import cpu_kernels
    from jaxllm.config import EngineConfig
    from jaxllm.engine.start.blueprint import make_blueprint
    from jaxllm.engine.start.platform import Platform
    from jaxllm.sharding.mesh import build_meshes
    from jaxllm.weights import open_checkpoint
    from jaxllm.weights.folder import reading_ahead
    from jaxllm.weights.loader import load_parameters
    from jaxllm.weights.source import resolve_model

    cpu_kernels.available()
    config = EngineConfig(model=model, isq=isq, cpu_kernels=kernels, dequantize=False)
    path, mesh = resolve_model(config.model), build_meshes(1)[0]
    platform = Platform.of(mesh.devices.flat[0])

    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    prepare = drop if cache == "cold" else read
    clock = time.perf_counter
    prepare(files)
    begin = clock()
    read(files)
    through_a_buffer = clock() - begin
    prepare(files)
    begin = clock()
    held = [np.fromfile(file, np.uint8) for file in files]
    into_memory = clock() - begin
    del held
    prepare(files)
    begin = clock()
    with reading_ahead(path):
        checkpoint = open_checkpoint(path, config.load_format)
        opened = clock()
        blueprint = make_blueprint(config, checkpoint, platform)
        planned = clock()
        spec = blueprint.spec
        weights = load_parameters(checkpoint, blueprint.params, spec.names, mesh, ignored=spec.ignored)
        jax.block_until_ready(weights)
    end = clock()
    values = (through_a_buffer, into_memory, opened - begin, planned - opened, end - planned, end - begin)
    return dict(zip(FIGURES, values, strict=True))


def read(files: list[Path]) -> None:
    """All bytes, through one small buffer."""
    buffer = bytearray(2**20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(files: list[Path]) -> None:
    """Files out of the page cache, and a look whether they are: dirty or mapped pages stay."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in filter(os.path.getsize, files):
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
                pages = (ctypes.c_ubyte * -(-len(data) // mmap.PAGESIZE))()
                start = ctypes.c_char.from_buffer(data)
                failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(data)), pages)
                del start
        left = sum(page & 1 for page in pages)
        if failed or left > len(pages) // 100:
            raise SystemExit(f"{left} of {len(pages)} pages of {path} are still cached")


def make_dummy(path: Path, gigabytes: float) -> Path:
    """A GGUF file of about that size: types and shapes of an 8B Llama's Q4_K_M, with fewer layers of half the width."""
    import gguf
    import numpy as np

    hidden, mlp, kv, vocabulary = 2048, 8192, 512, 128_256
    types = gguf.GGMLQuantizationType
    rng = np.random.default_rng(0)

    def blocks(rows: int, inputs: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        row = rng.integers(0, 128, (1024, inputs // elements * nbytes), np.uint8) & 0x3B  # no scale is infinite
        return np.resize(row, (rows, row.shape[1]))

    def layer(number: int) -> dict[str, tuple[int, int, gguf.GGMLQuantizationType]]:
        more = types.Q6_K if number % 2 else types.Q4_K
        return {
            "attn_q": (hidden, hidden, types.Q4_K), "attn_k": (kv, hidden, types.Q4_K), "attn_v": (kv, hidden, more),
            "attn_output": (hidden, hidden, types.Q4_K), "ffn_gate": (mlp, hidden, types.Q4_K),
            "ffn_up": (mlp, hidden, types.Q4_K), "ffn_down": (hidden, mlp, more),
        }  # fmt: skip

    def size(tensors: dict[str, tuple[int, int, gguf.GGMLQuantizationType]]) -> int:
        sizes = gguf.GGML_QUANT_SIZES
        return sum(rows * inputs // sizes[kind][0] * sizes[kind][1] for rows, inputs, kind in tensors.values())

    ends = {"token_embd": (vocabulary, hidden, types.Q4_K), "output": (vocabulary, hidden, types.Q6_K)}
    count = max(1, round((gigabytes * 1e9 - size(ends)) / (size(layer(0)) + size(layer(1))) * 2))
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_block_count(count)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(hidden // 64)
    writer.add_head_count_kv(kv // 64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    tensors = ends | {f"blk.{n}.{name}": shape for n in range(count) for name, shape in layer(n).items()}
    for name, (rows, inputs, kind) in tensors.items():
        writer.add_tensor(f"{name}.weight", blocks(rows, inputs, kind), raw_dtype=kind)
    norms = ["output_norm", *(f"blk.{n}.{name}" for n in range(count) for name in ("attn_norm", "ffn_norm"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    main()
