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
    for work in arguments.work:
        command = [BATCHED_BENCH, "-m", arguments.model, "-t", threads, "-tb", threads, "--output-format", "jsonl"]
        command += ["-npp", work.prompt_tokens, "-ntg", work.new_tokens, "-npl", work.streams]
        command += ["-c", work.streams * (work.prompt_tokens + work.new_tokens)]
        bench = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True)
        if bench.returncode:
            raise SystemExit(f"llama-batched-bench ended with {bench.returncode}")
        (line,) = (line for line in bench.stdout.splitlines() if line.startswith("{"))
        cell = json.loads(line)
        decode = cell["speed_tg"] if work.new_tokens > 1 else None
        workload.report("llama.cpp", work, work.streams * work.prompt_tokens / cell["speed_pp"], decode)


if __name__ == "__main__":
    main()
