"""A second start with the same model and settings compiles nothing, and says the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.cpu_kernels import runnable_isas
from jaxllm.engine.start import prepared
from tests.cpu_kernels.weights import needs_kernels
from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs

PROGRAM = """
import json, os, sys, time
from contextlib import nullcontext
from jaxllm import LLM, SamplingParams, cpu_kernels
from jaxllm.engine.core import saved
from jaxllm.engine.core.saved import SavedExecutables
from jaxllm.engine.start import prepared
prepared.LAYERS_WORTH_A_PROCESS = int(os.environ.get("LAYERS_WORTH_A_PROCESS", "99"))
load, loaded = SavedExecutables.load, []
def counted(*arguments):
    found = load(*arguments)
    loaded.extend([found] if found else [])
    return found
SavedExecutables.load = counted
saved.MODULE = os.environ.get("COMPILING_MODULE", saved.MODULE)
chosen = os.environ.get("CHOSEN_ISA")
with (
    cpu_kernels.forced(chosen) if chosen else nullcontext(),
    LLM(sys.argv[1], compile_cache_dir=sys.argv[2] or None, **json.loads(sys.argv[3])) as llm,
):
    said = [
        llm.generate([[5, 6, 7, 8, 9, 10]] * 3, SamplingParams(max_tokens=6, **params), use_tqdm=False)
        for params in ({"temperature": 0}, {"seed": 1, "logprobs": 2, "top_k": 9})
    ]
    while llm.stats().compiles_pending:
        time.sleep(0.05)
    stats = llm.stats()
tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in said]
assert stats.compiles_unforeseen == 0
print(json.dumps([tokens, stats.compile_seconds, len(loaded)]))
"""
FIELDS = {
    "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16,
    "kv_cache_memory": 2**20, "decode_buckets": [2], "prefill_buckets": [16],
}  # fmt: skip


QUICKLY = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}


class Started(NamedTuple):
    """What a process of its own says."""

    tokens: Any
    compiling: float
    """Seconds."""
    loaded: int
    """Executables."""


def start(model: Path, cache: Path | None, **fields: Any) -> Started:
    """An engine that keeps what it compiles in `cache`, and answers two requests."""
    environment = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name} | QUICKLY
    arguments = [sys.executable, "-c", PROGRAM, str(model), str(cache or ""), json.dumps(FIELDS | fields)]
    done = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True, timeout=300)
    return Started(*json.loads(done.stdout))


@pytest.mark.parametrize(("kernels", "devices"), [("off", 1), ("auto", 1), ("off", 2)])
def test_the_second_start_compiles_nothing(tmp_path, monkeypatch, kernels, devices):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(devices))
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    fields = {"cpu_kernels": kernels, "tensor_parallel_size": devices}
    first, second = (start(model, tmp_path / "cache", **fields) for _ in range(2))
    assert first.compiling > 0 and first.loaded == 0
    assert second.compiling == 0 and second.loaded > 5
    assert second.tokens == first.tokens


def test_executables_that_are_made_ahead_start_an_engine_that_keeps_nothing(tmp_path):
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    config = tmp_path / "model.yaml"
    config.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in FIELDS.items()))
    made = tmp_path / "made"
    command = [sys.executable, "-m", "jaxllm", "compile", str(model), "--config", str(config), "--output", str(made)]
    quickly = os.environ | QUICKLY
    done = subprocess.run(command, env=quickly, check=True, capture_output=True, text=True, timeout=300)
    assert f"start with --executables {made}" in done.stdout
    steps = re.findall(r"^compiling \S+, (\d+) of (\d+)$", done.stderr, re.MULTILINE)
    assert [int(number) for number, _ in steps] == [*range(1, int(steps[0][1]) + 1)], "without a terminal, a line each"
    made.chmod(0o500)
    shipped = start(model, None, executables=str(made))
    assert shipped.compiling == 0 and shipped.tokens == start(model, None).tokens


def test_a_process_beside_the_engine_compiles_what_nobody_waits_for(tmp_path, monkeypatch):
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    monkeypatch.setenv("LAYERS_WORTH_A_PROCESS", "1")
    beside = start(model, tmp_path / "cache", cpu_kernels="off")
    assert beside.compiling > 0 and beside.loaded > 0
    assert start(model, tmp_path / "cache", cpu_kernels="off")[:2] == (beside.tokens, 0)


@needs_kernels
def test_that_process_takes_the_engines_instruction_set(tmp_path, monkeypatch):
    """Its own choice would be the best there is."""
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    monkeypatch.setenv("LAYERS_WORTH_A_PROCESS", "1")
    monkeypatch.setenv("CHOSEN_ISA", "portable")
    assert start(model, tmp_path / "cache").loaded > 0


DIGEST = """
import json, sys
from pathlib import Path
from jaxllm import cpu_kernels
from jaxllm.config import EngineConfig
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.engine.start.prepared import step_manifest
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.core.saved import SavedExecutables
from jaxllm.sharding.mesh import build_meshes
config = EngineConfig(model=sys.argv[1], **json.loads(sys.argv[2]))
(mesh,) = build_meshes(1, 1, 1)
devices = mesh.devices.flatten().tolist()
blueprint = make_blueprint(config, open_model(config, Path(config.model)), Platform.of(devices[0]))
print(SavedExecutables(None, step_manifest(blueprint, mesh), devices).name, cpu_kernels.isa())
"""


def digests(model: Path, count: int) -> list[list[str]]:
    """What executables are saved under, and the instruction set, in each of some processes that start at once."""
    command = [sys.executable, "-c", DIGEST, str(model), json.dumps(FIELDS)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return [process.communicate(timeout=300)[0].split() for process in processes]


@needs_kernels
def test_processes_that_start_at_once_find_the_same_executables(tmp_path):
    """Beside each other on busy cores, each with the best instruction set that the processor has."""
    said = digests(write_checkpoint("llama_gqa", tmp_path / "model"), 4)
    assert len(said[0]) == 2 and said == said[:1] * 4
    assert said[0][1] == runnable_isas()[0]


def test_that_process_is_told_the_engines_settings_alone(tmp_path):
    """Those of a served model are more, and are refused where an engine's are read."""
    config = ModelConfig(model="m", served_model_name="a,b", tool_call_parser="none", max_model_len=64)
    plan = SimpleNamespace(platform="cpu", kv_bytes=5, state_cache_bytes=6)
    options = SimpleNamespace(kernels=SimpleNamespace(native=False))
    blueprint = SimpleNamespace(spec=SimpleNamespace(config=SimpleNamespace(num_layers=99)), plan=plan, options=options)
    helper = prepared._helper(config, blueprint, SimpleNamespace(root=tmp_path, name="set"))  # type: ignore[arg-type]
    assert helper is not None
    told = EngineConfig.model_validate_json(helper._command[-3])
    assert told == EngineConfig(model="m", max_model_len=64, kv_cache_memory=5, state_cache_memory=6)


def test_an_engine_compiles_itself_where_that_process_fails(tmp_path, monkeypatch):
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    monkeypatch.setenv("LAYERS_WORTH_A_PROCESS", "1")
    monkeypatch.setenv("COMPILING_MODULE", "jaxllm.no_such_module")
    alone = start(model, tmp_path / "cache", cpu_kernels="off")
    assert alone.compiling > 0 and alone.loaded == 0
    assert start(model, tmp_path / "cache", cpu_kernels="off")[:2] == (alone.tokens, 0)
