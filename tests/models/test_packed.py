"""Models whose weights stay packed: the same logits as from the expanded ones, in every shape that weights take."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.quantization.gguf_decode import FORMATS
from jaxllm.quantization.gguf_weight import GgufBlocks
from jaxllm.quantization.weight import Dense, Fused
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import dummy_parameters, load_parameters
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import write_checkpoint
from tests.reference.tiny_gguf import write_gguf

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "IQ4_NL", "NVFP4", "F16")
ROOMY = Platform("cpu", 1, None, 2**33)


def mixed(name: str) -> str:
    """A type of tensor, another for each name, so that neighbours in a fused product differ."""
    return TYPES[zlib.crc32(name.encode()) % len(TYPES)]


def chooser(path: Path, **options) -> KindChooser:
    checkpoint = open_checkpoint(path)
    return KindChooser(checkpoint, model_spec(checkpoint).names, **options)


def logits(name: str, path: Path, **options) -> np.ndarray:
    ids = load_golden(name).prompt_token_ids
    return Harness(path, kinds=chooser(path, **options)).run([ids], [Chunk(0, 0, len(ids))])[0]


@pytest.mark.parametrize(
    "name",
    ["llama_gqa", "llama_bias", "phi3", "qwen3", "gemma3_small", "mixtral", "qwen2_moe", "stablelm_qk_layernorm"],
)
def test_a_packed_gguf_gives_the_logits_of_its_expansion(name, tmp_path):
    path = write_gguf(name, tmp_path / "model.gguf", types=mixed)
    packed, expanded = logits(name, path), logits(name, path, packed=False)
    np.testing.assert_allclose(packed, expanded, atol=1e-4 * np.abs(expanded).max())


def weights(path: Path, **options) -> Mapping[str, object]:
    checkpoint = open_checkpoint(path)
    config = EngineConfig(model=str(path), dtype="float32", **({"dequantize": False} | options))
    blueprint = make_blueprint(config, checkpoint, ROOMY)
    return {param.path: param.abstract() for param in blueprint.params}


def test_each_segment_has_the_type_of_its_tensor(tmp_path):
    types = {"attn_q": "Q5_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "Q4_1"}
    path = write_gguf("llama_gqa", tmp_path / "m.gguf", types=lambda name: types.get(name.split(".")[-2], "F16"))
    found = weights(path)
    qkv, gate_up = found["layers.0.attention.qkv.weight"], found["layers.0.mlp.gate_up.weight"]
    assert isinstance(qkv, Fused) and [part.type for part in qkv.parts] == ["Q5_0", "Q8_0"]
    assert isinstance(gate_up, GgufBlocks) and gate_up.type == "Q4_1"
    assert isinstance(found["embed.weight"], Dense)
    assert isinstance(weights(path, dequantize=True)["layers.0.attention.qkv.weight"], Dense)


def test_the_plan_counts_packed_bytes(tmp_path):
    path = write_gguf("llama_gqa", tmp_path / "m.gguf", types=lambda name: "Q4_0")
    plans = [
        make_blueprint(
            EngineConfig(model=str(path), dtype="float32", dequantize=wide), open_checkpoint(path), ROOMY
        ).plan
        for wide in (False, True)
    ]
    packed, expanded = plans
    assert packed.num_parameters == expanded.num_parameters
    assert packed.weight_bytes < expanded.weight_bytes * 4.5 / 32 * 1.1


def test_other_types_become_the_nearest_kept_kind(tmp_path, monkeypatch):
    """The gguf package writes no other type for rows this short, so one of ours is made another."""
    monkeypatch.delitem(FORMATS, "MXFP4")
    path = write_gguf("llama_gqa", tmp_path / "m.gguf", types=lambda name: "MXFP4" if "ffn" in name else "F32")
    packed, expanded = logits("llama_gqa", path), logits("llama_gqa", path, packed=False)
    assert 0 < np.abs(packed - expanded).max() / np.abs(expanded).max() < 0.03
    assert weights(path)["layers.0.mlp.down.weight"].type == "Q8_0"


@pytest.mark.parametrize("scheme", ["q4_0", "q5_1", "q8_0", "int8", "int4", "fp8"])
def test_weights_quantized_in_situ_are_near_those_of_the_checkpoint(scheme, tmp_path):
    """Every weight by itself: that products of them are right is shown in tests/quantization."""
    path = write_checkpoint("qwen2_moe", tmp_path)
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint)
    loaded = []
    for isq in (None, scheme):
        kinds = KindChooser(checkpoint, spec.names, isq=isq)
        _, params = abstract_model(spec, BuildOptions(jnp.float32), kinds)
        loaded.append(load_parameters(checkpoint, params, spec.names, build_meshes(1)[0], ignored=spec.ignored))
    for param, plain, found in zip(params, *loaded, strict=True):
        if not isinstance(plain, Dense) or isinstance(found, Dense):
            continue
        values, error = plain.array, jax.jit(lambda w: w.dequantize())(found) - plain.array
        assert 0 < jnp.sqrt((error**2).mean() / (values**2).mean()) < LARGEST_ERROR[scheme], param.path


LARGEST_ERROR = {"q4_0": 0.11, "q5_1": 0.05, "q8_0": 0.01, "int8": 0.02, "int4": 0.1, "fp8": 0.04}
"""Root mean square, relative to the weights'."""


def test_the_map_goes_before_the_scheme_and_ends_take_more_bits(tmp_path):
    path = write_checkpoint("llama_gqa", tmp_path)
    found = weights(path, isq="q4_0", isq_map="*.0.mlp.down_proj.weight=fp8,*.v_proj.weight=none")
    assert found["layers.0.mlp.down.weight"].codes.dtype.name == "float8_e4m3fn"
    assert found["layers.1.mlp.down.weight"].type == "Q4_0"
    assert isinstance(found["layers.0.attention.qkv.weight"].parts[1], Dense)
    assert found["embed.weight"].type == "Q8_0"  # Q6_K, were the rows whole blocks of 256
    assert isinstance(weights(path, isq_map={"lm_head.weight": "int8"})["embed.weight"], Dense)


def test_routers_are_never_quantized(tmp_path):
    found = weights(write_checkpoint("qwen2_moe", tmp_path), isq="int8")
    kept = [path for path, value in found.items() if isinstance(value, Dense)]
    assert kept and all("router" in path or "shared_gate" in path for path in kept)


def test_quantizing_twice_must_be_asked_for(tmp_path):
    path = write_gguf("llama_gqa", tmp_path / "m.gguf", types=lambda name: "Q8_0")
    with pytest.raises(ConfigError, match=r"^isq is set, but .*m\.gguf is quantized already \(Q8_0\); accepted with"):
        weights(path, isq="q4_0")
    assert weights(path, isq="q4_0", dequantize=True)["layers.0.mlp.down.weight"].type == "Q4_0"


def test_a_pattern_that_no_tensor_has_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"isq_map has '\*\.ffn_dwn\.weight', which no tensor of .* is named like"):
        weights(write_checkpoint("llama_gqa", tmp_path), isq_map={"*.ffn_dwn.weight": "q4_0"})


def test_a_shard_inside_a_block_is_refused(tmp_path):
    path = write_gguf("llama_gqa", tmp_path / "m.gguf", types=lambda name: "Q8_0")
    with pytest.raises(
        CheckpointError, match=r"^layers\.0\.\S+: 96 inputs on 2 devices part a block of 32; accepted is"
    ):
        weights(path, tensor_parallel_size=2)


def test_dummy_weights_are_quantized_too(tmp_path):
    write_checkpoint("llama_gqa", tmp_path)
    config = EngineConfig(model=str(tmp_path), load_format="dummy", isq="q4_0", dtype="float32")
    blueprint = make_blueprint(config, open_checkpoint(tmp_path, "dummy"), ROOMY)
    drawn = dummy_parameters(blueprint.params, build_meshes(1)[0], 0)
    for spec, value in zip(blueprint.params, drawn, strict=True):
        expected = jax.tree.map(lambda a: (a.shape, a.dtype), spec.abstract())
        assert jax.tree.map(lambda a: (a.shape, a.dtype), value) == expected
        if isinstance(value, GgufBlocks):
            assert np.isfinite(value.dequantize()).all() and np.std(value.dequantize()) > 0.01
