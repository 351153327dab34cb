"""A second start with the same model and settings compiles nothing, and says the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reference.tiny import write_checkpoint

PROGRAM = """
import json, sys, time
from jaxllm import LLM, SamplingParams
with LLM(sys.argv[1], compile_cache_dir=sys.argv[2] or None, **json.loads(sys.argv[3])) as llm:
    said = [
        llm.generate([[5, 6, 7, 8, 9, 10]] * 3, SamplingParams(max_tokens=6, **params), use_tqdm=False)
        for params in ({"temperature": 0}, {"seed": 1, "logprobs": 2, "top_k": 9})
    ]
    while llm.stats().compiles_pending:
        time.sleep(0.05)
    stats = llm.stats()
tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in said]
print(json.dumps([tokens, stats.compile_seconds, stats.compiles_unforeseen]))
"""
FIELDS = {
    "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16,
    "kv_cache_memory": 2**20,
}  # fmt: skip


def start(model: Path, cache: Path | None, **fields: Any) -> tuple[Any, float]:
    """Tokens, and seconds spent compiling, of a process of its own that keeps what it compiles in `cache`."""
    environment = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    arguments = [sys.executable, "-c", PROGRAM, str(model), str(cache or ""), json.dumps(FIELDS | fields)]
    done = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True, timeout=300)
    tokens, seconds, unforeseen = json.loads(done.stdout)
    assert unforeseen == 0
    return tokens, seconds


@pytest.mark.every_version
@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_the_second_start_compiles_nothing(tmp_path, kernels):
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    first, compiling = start(model, tmp_path / "cache", cpu_kernels=kernels)
    second, loading = start(model, tmp_path / "cache", cpu_kernels=kernels)
    assert compiling > 0 and loading == 0
    assert second == first


@pytest.mark.every_version
def test_executables_that_are_made_ahead_start_an_engine_that_keeps_nothing(tmp_path):
    """From shapes alone: there are no weights where they are made."""
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    config = tmp_path / "model.yaml"
    config.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in FIELDS.items()))
    made = tmp_path / "made"
    command = [sys.executable, "-m", "jaxllm", "compile", str(model), "--config", str(config), "--output", str(made)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert f"start with --executables {made}" in said
    expected, _ = start(model, tmp_path / "cache")
    made.chmod(0o500)
    tokens, compiling = start(model, None, executables=str(made))
    assert (tokens, compiling) == (expected, 0)
