"""Models on the kernels of NVIDIA GPUs, interpreted or on such a GPU: what transformers computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxllm.pallas_kernels.gpu.experts import add_norm, experts
from jaxllm.pallas_kernels.gpu.products import linear
from jaxllm.pallas_kernels.kernels import GPU
from tests.models.harness import Chunk, Harness
from tests.models.mla_layer import interpreted
from tests.reference import load_golden
from tests.reference.tiny import TINY_MODELS, write_checkpoint
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware

INTERPRETED = replace(
    GPU,
    attention=partial(GPU.attention, interpret=INTERPRET),
    latent_attention=interpreted,
    linear=partial(linear, interpret=INTERPRET),
    delta_rule=partial(GPU.delta_rule, interpret=INTERPRET),
    experts=partial(experts, interpret=INTERPRET),
    add_norm=partial(add_norm, interpret=INTERPRET),
    ssd=partial(GPU.ssd, interpret=INTERPRET),
)

FEW = (
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v2_lite",
    "deepseek_v3",
    "ernie4_5_moe",
    "mistral4",
    "qwen3_next",
    "nemotron_h_moe",
)
"""Those that the interpreter, which takes seconds for a layer, has time for."""


@pytest.mark.parametrize("name", FEW if INTERPRET else TINY_MODELS)
def test_float32_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    """Experts alone and with shared ones, behind a gate or not; latents of queries that have one of their own, or not.

    What layers leave to the next one to add is then a sum of experts, or in the dense ones not.
    """
    golden = load_golden(name)
    ids = golden.prompt_token_ids
    model = Harness(write_checkpoint(name, tmp_path), kernels=INTERPRETED)
    parts = [model.run([ids], [Chunk(0, a, b)])[0] for a, b in pairwise([0, 1, 17, len(ids) - 1])]
    parts.append(model.decode(ids[-1], len(ids) - 1)[None])
    assert np.abs(np.concatenate(parts) - golden.logits[: len(ids)]).max() <= 1e-4


@pytest.mark.parametrize(
    "name", ["olmo2", "cohere", "granite", "hunyuan", "gpt_oss", "gemma4", "gemma4_moe", "llama4", "falcon_h1"]
)
def test_what_kernels_do_not_do_is_not_left_to_them(name: str, tmp_path: Path) -> None:
    """No norm in front, one over all heads or after the rotation, parallel blocks, factors on residual sums; biases of
    experts and a clamped gate are added between kernels, and sinks are theirs. Keys and values of another layer,
    chunks, weights of experts on what they get."""
    golden = load_golden(name)
    ids = golden.prompt_token_ids
    model = Harness(write_checkpoint(name, tmp_path), kernels=INTERPRETED)
    logits = np.concatenate([model.run([ids], [Chunk(0, a, b)])[0] for a, b in pairwise([0, 21, len(ids)])])
    assert np.abs(logits - golden.logits).max() <= 1e-4
