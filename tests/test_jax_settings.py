"""An engine gives the same tokens whatever the program around it, or its environment, has told JAX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.compat import OWN_SETTINGS
from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs

CHANGED = {
    "jax_check_tracer_leaks": True,
    "jax_debug_infs": True,
    "jax_debug_key_reuse": True,
    "jax_debug_nans": True,
    "jax_default_matmul_precision": "bfloat16",
    "jax_default_prng_impl": "rbg",
    "jax_disable_jit": True,
    "jax_enable_checks": True,
    "jax_enable_custom_prng": True,
    "jax_enable_x64": True,
    "jax_no_tracing": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_random_seed_offset": 7,
    "jax_softmax_custom_jvp": True,
    "jax_threefry_partitionable": False,
    "jax_transfer_guard_device_to_device": "disallow",
    "jax_transfer_guard_device_to_host": "disallow",
    "jax_transfer_guard_host_to_device": "disallow",
}
PROGRAM = """
import json, sys
import jax
model, told = sys.argv[1], json.loads(sys.argv[2])
kind = told.pop("mesh", None)
for name, value in told.items():
    jax.config.update(name, value)
if kind is not None:
    jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType[kind],)))
from jaxllm import LLM, SamplingParams
fields = dict(
    skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16,
    kv_cache_memory=2**20, compile_cache_dir=None, dtype="float32", isq="int8",
)
with LLM(model, **fields) as llm:
    params = [SamplingParams(temperature=0, max_tokens=5), SamplingParams(seed=3, max_tokens=5, logprobs=1, top_p=0.9)]
    outputs = llm.generate([[5, 6, 7, 8], [9, 10, 11]], params, use_tqdm=False)
    vectors = llm.embed([[5, 6, 7]])
vector = list(map(float, vectors[0].outputs.embedding[:4]))
print(json.dumps([[output.outputs[0].token_ids for output in outputs], vector]))
"""


def said(model: Path, told: dict[str, object], **variables: str) -> object:
    command = [sys.executable, "-c", PROGRAM, str(model), json.dumps(told)]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_program_that_has_told_jax_otherwise_gets_the_same_tokens(tmp_path: Path) -> None:
    assert CHANGED.keys() | {"jax_default_device"} == OWN_SETTINGS.keys()
    model = write_checkpoint("llama_gqa", tmp_path)
    plain = said(model, {})
    assert said(model, CHANGED) == plain
    assert said(model, {}, JAX_ENABLE_X64="1", JAX_NUMPY_RANK_PROMOTION="raise") == plain
    assert said(model, {"mesh": "Explicit"}) == said(model, {"mesh": "Auto"}) == plain
