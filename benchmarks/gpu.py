"""How near a GPU comes to what its memory and its tensor cores allow. Dummy weights made there; no files.

    python benchmarks/gpu.py                              # Llama-3.1-8B: every slice, one after the other
    python benchmarks/gpu.py --slice attention decode     # two of them; what they have measured already is kept
    python benchmarks/gpu.py --config DIR --isq int4      # another model's config.json, other weights
    python benchmarks/gpu.py --tiny                       # sizes for a CPU

Each slice is a process that takes at most ten minutes, and has a file in --out with the device's name. Measurements are
written as they come: a slice that ran out of time goes on where it was when it is called again. Each line has its share
of a floor: bytes that must be read at the copy bandwidth that the same process measured, or operations at its matmul
rate. At the end each bar stands beside what was measured, in `gpu.json` too, and the cells that bars rest on have a
profile.

Needs jax, flax, transformers and NumPy; `serve` needs what the server needs. What XLA tuned is kept in --out/autotune,
but not with --tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STANDINS = Path(__file__).parent / "standins"
SECONDS = 600
"""What a slice may take in all."""
UNFINISHED = 3
"""Exit code of a slice that has more to measure."""

SLICES = {
    "peaks": "copy bandwidth and matmul rate",
    "attention": "attention alone",
    "decode": "greedy decode steps",
    "sampled": "sampled decode steps",
    "prefill": "prompts, and decodes beside one",
    "int4": "decode steps of a model in groups of four bits",
    "q4_0": "likewise in GGUF's Q4_0",
    "q4k": "likewise in GGUF's Q4_K, with Q6_K at both ends",
    "q4_k_m": "likewise as llama.cpp's Q4_K_M has it: values and down in Q6_K in half of the layers",
    "gptq128": "likewise in groups of 128, as GPTQ and AWQ have them",
    "mxfp4": "likewise in MXFP4",
    "fp8": "likewise in fp8 with a scale a row",
    "torch": "the same shapes in torch",
    "engine": "end to end in process: nano-vllm's prompts, and the load of `serve`",
    "serve": "end to end through HTTP: `jaxllm bench serve`",
}

PROBE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.path.append({str(STANDINS)!r})
from jaxllm.sharding.devices import find_devices
print(find_devices()[0].platform, find_devices()[0].device_kind)
"""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = ", ".join(f"{name} ({what})" for name, what in SLICES.items())
    parser.add_argument("--slice", nargs="+", choices=SLICES, default=list(SLICES), metavar="NAME", help=shown)
    parser.add_argument("--config", type=Path, help="a folder with a config.json; Llama-3.1-8B's if not given")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--attention-rows", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    parser.add_argument("--attention-contexts", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--isq", help="quantize the weights")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU does in seconds")
    parser.add_argument("--seconds", type=float, default=480, help="a slice starts no measurement after so many")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="a folder, one for each device")
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--device", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    given = arguments().parse_args()
    if given.tiny:
        given.rows, given.contexts, given.prefill = [1, 16], [32], [16]
        given.attention_rows, given.attention_contexts = [1, 8], [32]
    prepare(given.out, keep_tuned=not given.tiny)
    if given.device is not None:
        return run_slice(given.slice[0], given)
    platform, found = probe()
    if platform == "cpu" and not given.tiny:
        sys.exit("JAX runs on the CPU here; --tiny has sizes for that")
    given.device = found
    print(f"device: {found}", flush=True)
    failed = [name for name in given.slice if not run_in_process(name, given)]
    from benchmarks.gpu_bars import verdicts

    rows = {path.stem: json.loads(path.read_text()) for name in SLICES if (path := given.out / f"{name}.json").exists()}
    rows = {name: kept for name, kept in rows.items() if kept["device"] == found}
    judged = verdicts([row for kept in rows.values() for row in kept["rows"]], found)
    summary = {"device": found, "bars": judged, "slices": rows}
    (given.out / "gpu.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\nbar".ljust(55), "wanted".rjust(10), "measured".rjust(10))
    for bar in judged:
        measured = "" if bar["measured"] is None else f"{bar['measured']:.4g}"
        line = f"{bar['bar']:54} {bar['wanted']:>10} {measured:>10}  {bar['verdict']}"
        print(line, *(f"({bar[key]})" for key in ("where", "profile") if bar.get(key)))
    if given.tiny or given.config or given.isq:
        print("The bars are for Llama-3.1-8B in bfloat16 on a GPU: here they say nothing.")
    if failed:
        sys.exit(f"not finished: {' '.join(failed)}; call again with --slice {' '.join(failed)}")
    return None


def run_slice(name: str, given: argparse.Namespace) -> None:
    """Measure what the slice lacks, and end the process with UNFINISHED where time ran out."""
    from benchmarks.gpu_slice import QUANTIZED, Slice

    run = Slice(name, given)
    if name in ("attention", "decode", "sampled", "prefill", *QUANTIZED):
        run.peaks()
        from benchmarks.gpu_model import measure_model

        measure_model(run)
    elif name == "torch":
        from benchmarks.gpu_torch import measure_torch

        measure_torch(run)
    elif name == "peaks":
        run.peaks()
    else:
        from benchmarks import gpu_end_to_end

        getattr(gpu_end_to_end, f"measure_{name}")(run)
    run.write(complete=not run.left)
    if run.left:
        print(f"{name}: no time for {run.left} more; call it again")
        sys.exit(UNFINISHED)


def prepare(out: Path, *, keep_tuned: bool) -> None:
    """Paths and XLA's flags, for this process and those that it starts."""
    sys.path[:0] = [str(ROOT)]
    sys.path += [str(STANDINS)]  # last: what is installed comes first
    out.mkdir(parents=True, exist_ok=True)
    if not keep_tuned:
        return
    tuned = (out / "autotune").resolve()
    tuned.mkdir(exist_ok=True)
    flag = f"--xla_gpu_per_fusion_autotune_cache_dir={tuned}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def probe() -> tuple[str, str]:
    """The device's platform and name, from a process that gives the device back."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit((done.stderr.strip().splitlines() or ["JAX finds no device and does not say why"])[-1])
    platform, _, kind = done.stdout.strip().splitlines()[-1].partition(" ")
    return platform, kind


def run_in_process(name: str, given: argparse.Namespace) -> bool:
    """Whether the slice has measured all that it should."""
    print(f"\n{name}: {SLICES[name]}", flush=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--slice", name, "--device", given.device]
    try:
        code = subprocess.run(command, timeout=SECONDS - 5).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {SECONDS} s; what it measured is kept")
        return False
    return code == 0


if __name__ == "__main__":
    main()
