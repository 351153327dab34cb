"""llama.cpp under the common workload, done by its own llama-batched-bench. The model is a GGUF file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import workload

BATCHED_BENCH = Path(sys.prefix) / "build" / "bin" / "llama-batched-bench"


def main() -> None:
    arguments = workload.parse_arguments()
    threads = len(os.sched_getaffinity(0))
    command = [BATCHED_BENCH, "-m", arguments.model, "-t", threads, "-tb", threads, "--output-format", "jsonl"]
    command += ["-npp", arguments.prompt_tokens, "-ntg", arguments.new_tokens]
    command += ["-npl", ",".join(map(str, arguments.streams))]
    command += ["-c", max(arguments.streams) * (arguments.prompt_tokens + arguments.new_tokens)]
    bench = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    if bench.returncode:
        raise SystemExit(f"llama-batched-bench ended with {bench.returncode}")
    for line in bench.stdout.splitlines():
        if line.startswith("{"):
            cell = json.loads(line)
            workload.report("llama.cpp", cell["pl"], prefill_tok_s=cell["speed_pp"], decode_tok_s=cell["speed_tg"])


if __name__ == "__main__":
    main()
