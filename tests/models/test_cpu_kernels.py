"""Models on the C++ kernels: what transformers computes, and what the reference computes with the same weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.pallas_kernels.kernels import CPU, REFERENCE
from jaxllm.pallas_kernels.products import linear
from jaxllm.quantization.schemes import fitting
from jaxllm.quantization.tiles import Tiled, TiledKind, tiled
from jaxllm.quantization.weight import WeightKind
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import ParamSpec
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")

SHAPES = (
    "llama_gqa", "llama_bias", "phi", "phi3_window", "qwen2_moe", "qwen3", "stablelm_parallel", "stablelm_qk_layernorm",
    "gemma2", "gemma3_small", "deepseek_v2_lite", "mixtral", "ministral3", "glm4",
    "olmo2", "cohere_qk_norm", "granite", "hunyuan", "ernie4_5_moe", "gpt_oss", "gemma4", "gemma4_moe",
    "llama4", "gpt2", "gpt_neox", "bloom", "mpt_scaled",
    "lfm2_bias", "qwen3_next", "qwen3_next_by_three", "qwen3_5", "mamba2", "granite4_moe", "falcon_h1_norm",
    "nemotron_h_moe", "olmo", "nanochat", "apertus",
)  # fmt: skip
"""One of each shape of layer: norms, activations, windows, caps, latents, experts, biases, parallel residuals,
states."""


@pytest.mark.parametrize("name", SHAPES)
def test_float32_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    ids = golden.prompt_token_ids
    model = Harness(write_checkpoint(name, tmp_path), kernels=CPU)
    bounds = [0, 1, 7, 8, 17, 40, len(ids) - 1]
    parts = [model.run([ids], [Chunk(0, a, b)])[0] for a, b in pairwise(bounds)]
    parts.append(model.decode(ids[-1], len(ids) - 1)[None])
    assert np.abs(np.concatenate(parts) - golden.logits[: len(ids)]).max() <= 1e-4


def in_tiles(scheme: str, spec: ParamSpec, *, native: bool) -> tuple[WeightKind, ...]:
    """Every weight quantized to `scheme`, for the kernels or for the reference; float32 in all else."""
    kind = fitting(scheme, spec.shape[-1], np.dtype(np.float32))
    return (TiledKind(kind) if native else kind,)  # type: ignore[arg-type]


def with_rounded_inputs(x: Any, weight: Any, norm: Any = None, residual: Any = None, dtype: Any = jnp.float32) -> Any:
    """The reference's product of what the kernels make of `x`: int8, with a scale for every 32 numbers."""
    x = (x if norm is None else norm(x)).astype(jnp.float32)
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scale = jnp.abs(groups).max(-1, keepdims=True) / 127
    x = (jnp.round(groups / jnp.where(scale > 0, scale, 1)) * scale).reshape(x.shape)
    return linear(x, weight, None, residual, dtype)


@pytest.mark.parametrize("scheme", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "int8", "int4", "fp8"])
def test_weights_in_tiles_are_the_references(scheme: str, tmp_path: Path) -> None:
    """The same weights, and activations rounded in the same way, but for those that lie between two roundings."""
    ids = load_golden("llama_gqa").prompt_token_ids
    path = write_checkpoint("llama_gqa", tmp_path)
    whole = [Chunk(0, 0, len(ids))]
    rounding = REFERENCE if scheme == "fp8" else replace(REFERENCE, linear=with_rounded_inputs)
    (reference,) = Harness(path, kernels=rounding, kinds=partial(in_tiles, scheme, native=False)).run([ids], whole)
    (native,) = Harness(path, kernels=CPU, kinds=partial(in_tiles, scheme, native=True)).run([ids], whole)
    assert np.sqrt(np.square(native - reference).mean()) < (1e-5 if scheme == "fp8" else 0.02) * reference.std()


def test_bfloat16_in_tiles_is_the_references(tmp_path: Path) -> None:
    """To what the rounding of activations to bfloat16 does, here and there."""
    ids = load_golden("llama_gqa").prompt_token_ids
    path = write_checkpoint("llama_gqa", tmp_path)
    whole = [Chunk(0, 0, len(ids))]
    (reference,) = Harness(path, dtype=jnp.bfloat16).run([ids], whole)
    (native,) = Harness(path, dtype=jnp.bfloat16, kernels=CPU, kinds=every_dense_weight_in_tiles).run([ids], whole)
    assert 0 < np.sqrt(np.square(native - reference).mean()) < 0.03 * reference.std()


def every_dense_weight_in_tiles(spec: ParamSpec) -> tuple[WeightKind, ...]:
    (kind,) = spec.kinds
    return (tiled(kind, [spec.shape[-2]], spec.shape[-1], stack=False),)


def test_segments_stay_apart_for_the_kernels(tmp_path: Path) -> None:
    spec = model_spec(open_checkpoint(write_checkpoint("llama_gqa", tmp_path)))
    _, params = abstract_model(spec, BuildOptions(jnp.bfloat16, kernels=CPU), partial(in_tiles, "q4_0", native=True))
    qkv = next(p for p in params if p.path == "layers.0.attention.qkv.weight").abstract()
    c = spec.config
    assert [part.shape[0] for part in qkv.parts] == [
        n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    ]
    assert all(isinstance(part, Tiled) for part in qkv.parts)
