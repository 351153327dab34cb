"""This checkout beside another one, in turns on one machine: did a change cost speed?

git worktree add ../before COMMIT
python benchmarks/before_after.py ../before [--rounds 5] [--num-streams 1 16] [-- --dtype float32 …]

With `.` and `--before-python OTHER/bin/python` it is this checkout under two interpreters: what does another JAX cost?

Each round runs `jaxllm bench throughput` in a process of its own, before, after, before, after …, so that a machine
whose speed drifts is unfair to neither. The table has the medians, and the median of the ratios round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FIGURES = ("prefill_tokens_per_s", "decode_tokens_per_s")
Measured = dict[tuple[int, str], float]
"""(streams, figure) -> tokens a second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--before-python", default=sys.executable, help="an interpreter with other libraries")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-streams", nargs="+", default=["1", "16"])
    parser.add_argument("--output-len", default="64")
    parser.add_argument("flags", nargs="*", help="further flags of `jaxllm bench throughput`")
    given = parser.parse_args()
    command = [
        "-m", "jaxllm.cli.main", "bench", "throughput", given.model, "--output-len", given.output_len,
        "--num-iters", "2", "--num-streams", *given.num_streams, *given.flags,
    ]  # fmt: skip
    sides = {
        "before": ([given.before_python, *command], given.before),
        "after": ([sys.executable, *command], Path(__file__).parents[1]),
    }
    rounds: list[dict[str, Measured]] = []
    for number in range(given.rounds):
        rounds.append({name: measure(command, path.resolve()) for name, (command, path) in sides.items()})
        print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
    print("| streams | | before | after | after / before |")
    print("|---|---|---:|---:|---:|")
    for streams, figure in rounds[0]["before"]:
        before, after = ([r[name][streams, figure] for r in rounds] for name in sides)
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        cells = (
            streams,
            figure.split("_")[0],
            *(f"{statistics.median(x):,.1f}" for x in (before, after)),
            f"{ratio:.3f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |")


def measure(command: list[str], checkout: Path) -> Measured:
    """One process in one checkout."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [*command, "--json", file.name],
            check=True,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.DEVNULL,
        )
        results = json.loads(Path(file.name).read_text())["results"]
    return {(r["num_prompts"], figure): r[figure] for r in results for figure in FIGURES}


if __name__ == "__main__":
    main()
