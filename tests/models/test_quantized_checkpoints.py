"""Quantized checkpoints stay packed, and compute what the numbers they stand for do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import cpu_kernels
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.pallas_kernels.kernels import CPU
from jaxllm.quantization.coded import CodedKind
from jaxllm.quantization.schemes import coded_kind
from jaxllm.quantization.stored import Codes, Coding, Stored
from jaxllm.quantization.tiles import tiled
from jaxllm.quantization.weight import Dense, DenseKind, Fused, Weight
from jaxllm.sharding.mesh import TENSOR, build_meshes
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import ParamSpec, load_parameters
from jaxllm.weights.packings.module import unpack
from tests.models.harness import Chunk, Harness
from tests.models.packed_models import CASES, prompt, write
from tests.reference import packings
from tests.support.devices import over_devices

W8A8 = "llama:compressed_w8a8"
"""Rounds inputs as well, so that logits are others."""


def chooser(path: Path, **options) -> KindChooser:
    checkpoint = open_checkpoint(path)
    return KindChooser(checkpoint, model_spec(checkpoint).names, **options)


def logits(case: str, path: Path, **options) -> np.ndarray:
    ids = prompt()
    return Harness(path, kinds=chooser(path, **options)).run([ids], [Chunk(0, 0, len(ids))])[0]


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("w8a8")])
def test_a_packed_checkpoint_gives_the_logits_of_its_numbers(case, tmp_path):
    packed, plain = write(case, tmp_path)
    expected = logits(case, plain)
    np.testing.assert_allclose(logits(case, packed), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_inputs_are_rounded_where_a_checkpoint_is_made_for_it(tmp_path):
    packed, plain = write(W8A8, tmp_path)
    found, expected = logits(W8A8, packed), logits(W8A8, plain)
    assert 1e-3 < np.sqrt(((found - expected) ** 2).mean()) / expected.std() < 0.1


TILED = {
    "llama:gptq": "q4_0", "llama:gptq_sorted": "u4", "llama:awq": "u4", "llama:compressed_w4": "q4_0",
    "llama:gptq_8bit": "q8_0", W8A8: "i8", "mixtral:mxfp4": "mxfp4",
    "gpt_oss:mxfp4": "mxfp4", "llama:auto_round": "q4_0", "llama:quark_mxfp4": "mxfp4", "llama:mxfp8": "e4m3",
    "llama:compressed_nvfp4": "nvfp4", "mixtral:nvfp4": "nvfp4",
}  # fmt: skip


@pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")
@pytest.mark.parametrize("case", TILED)
def test_the_cpu_kernels_take_what_their_tiles_hold(case, tmp_path):
    packed, plain = write(case, tmp_path)
    ids = prompt()
    native, expected = (
        Harness(path, dtype=jnp.bfloat16, kernels=CPU, kinds=chooser(path, tiles=True)).run(
            [ids], [Chunk(0, 0, len(ids))]
        )[0]
        for path in (packed, plain)
    )
    assert np.sqrt(((native - expected) ** 2).mean()) < 0.1 * expected.std()
    for path, value in loaded(packed, tiles=True).items():
        if path.endswith("down.weight"):
            assert getattr(value, "weight", value).format == TILED[case]  # type: ignore[attr-defined]


@pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")
def test_tiles_of_eight_bits_hold_the_lowest_code(tmp_path):
    """-128, which no encoder of ours writes."""
    coding = Coding(8, (1, 64), np.dtype(np.float16))
    codes = Codes(coding, np.full((16, 1), 0.5, np.float16))
    tensor = Stored(np.zeros((16, 64), np.uint8), "int8", (16, 64), codes=codes)
    kind = tiled(coded_kind(coding, np.dtype(jnp.bfloat16), [16], 64, blocks=True), [16], 64, stack=False)
    x = np.random.default_rng(0).integers(-127, 128, (3, 64)).astype(np.float32)
    x[:, ::32] = 127  # so that inputs are whole numbers of their scale, which is 1
    weight = jax.tree.map(jnp.asarray, kind.pack([tensor], None))
    np.testing.assert_allclose(jax.jit(lambda w, x: w.matmul(x))(weight, x), x @ np.full((64, 16), -64.0), rtol=1e-6)


def test_over_several_devices(tmp_path):
    """Rows, inputs and experts divided: shards inside of groups and blocks, and groups that lie across devices."""
    folders = {case: write(case, tmp_path / case.replace(":", "-"))[0] for case in SHARDED}
    runs = [f"{folder}:{tp}:{ep}" for case, folder in folders.items() for tp, ep in ((1, ""), *SHARDED[case])]
    found = over_devices(4, "tests.models.run_packed", tmp_path / "logits.npz", *runs)
    for case, folder in folders.items():
        alone = found[f"{folder}:1:"]
        for tp, ep in SHARDED[case]:
            largest = np.abs(found[f"{folder}:{tp}:{ep}"] - alone).max() / np.abs(alone).max()
            assert largest < 1e-4, (case, tp, ep)


SHARDED: dict[str, tuple[tuple[int, str], ...]] = {
    "llama:gptq_128": ((2, ""), (4, "")),
    "llama:gptq_rows": ((4, ""),),
    "llama:gptq_sorted": ((2, ""), (4, "")),
    "llama:gptq_sorted_each": ((4, ""),),
    "llama:awq": ((4, ""),),
    "llama:fp8": ((2, ""),),
    "llama:fp8_blocks": ((4, ""),),
    "llama:bitsandbytes_nf4": ((4, ""),),
    "llama:modelopt_nvfp4": ((4, ""),),
    "llama:modelopt_mxfp8": ((4, ""),),
    "mixtral:nvfp4": ((2, ""), (4, "ep")),
    "mixtral:gptq_sorted": ((2, ""), (4, "ep")),
    "mixtral:mxfp4": ((2, ""), (4, "ep")),
    "gpt_oss:mxfp4": ((2, ""), (4, "ep")),
    "deepseek_v3:fp8_blocks": ((2, ""), (4, "ep")),
}


def test_a_shard_inside_what_is_stored_together_is_refused(tmp_path):
    """Seven inputs a device of groups of four: no group is whole bytes."""
    spec = ParamSpec("w", (8, 28), np.dtype(np.float32), (None, TENSOR), None, (DenseKind(np.dtype(np.float32)),))
    kind = coded_kind(Coding(4, (1, 4), np.dtype(np.float16)), spec.dtype, [8], 28, devices=4)
    with pytest.raises(CheckpointError, match=r"^w: 28 inputs on 4 devices part a block of 4; accepted is"):
        replace(spec, kinds=(kind,)).check_shards(4)


def test_rows_of_gate_and_up_by_turns_stay_packed(tmp_path):
    """gpt-oss's, which the layer has apart: rows are moved with their scales, and none is encoded anew."""
    packed, _ = write("gpt_oss:mxfp4", tmp_path)
    kinds = chooser(packed)
    _, params = abstract_model(model_spec(open_checkpoint(packed)), BuildOptions(jnp.float32), kinds)
    experts = [param for param in params if ".experts." in param.path and param.path.endswith("weight")]
    assert len(experts) == 2 * 3 and all(isinstance(param.kinds[0], CodedKind) for param in experts)
    assert kinds.notes == []


def test_what_cannot_be_kept_is_said(tmp_path):
    packed, _ = write("mixtral:gptq_sorted", tmp_path)
    kinds = chooser(packed, tp=2)
    abstract_model(model_spec(open_checkpoint(packed)), BuildOptions(jnp.float32, 2), kinds)
    assert kinds.notes == ["3 weights stored as GPTQ 4-bit are kept as float32: quantized once more at load"]


def parts(weight: Weight) -> int:
    return len(weight.parts) if isinstance(weight, Fused) else 1


def test_segments_that_share_an_order_are_one_weight(tmp_path):
    """Whose inputs are then brought into that order once."""
    for case, expected in (("llama:gptq_sorted", 1), ("llama:gptq_sorted_each", 3), ("mixtral:gptq_sorted_each", 3)):
        found = loaded(write(case, tmp_path / case.replace(":", "-"))[0])
        (qkv,) = (value for path, value in found.items() if path.startswith("layers.0.") and "qkv" in path)
        assert parts(qkv) == expected, case


def test_experts_may_be_sorted_or_not(tmp_path):
    """One of a stack's matrices has its inputs in their own order."""
    packed, plain = write("mixtral:gptq_sorted", tmp_path)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.block_sparse_moe.experts.1.w2"
    order = np.argsort(tensors[f"{name}.g_idx"], kind="stable")
    codes = unpack(tensors[f"{name}.qweight"].T, 4)[:, order]  # of other inputs now, as those of the plain one
    tensors[f"{name}.qweight"] = np.ascontiguousarray(packings.words(codes, 4).T)
    tensors[f"{name}.g_idx"] = np.sort(tensors[f"{name}.g_idx"])
    save_file(tensors, file)
    floats = load_file(plain / "model.safetensors")
    floats[f"{name}.weight"] = np.ascontiguousarray(floats[f"{name}.weight"][:, order])
    save_file(floats, plain / "model.safetensors")
    case = "mixtral:gptq_sorted"
    expected = logits(case, plain)
    np.testing.assert_allclose(logits(case, packed), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_biases_of_zeros_that_a_model_has_not_are_passed_over(tmp_path):
    """AutoGPTQ writes them for every layer; others than zeros would be missed."""
    packed, _ = write("llama:gptq", tmp_path)
    file, name = packed / "model.safetensors", "model.layers.1.mlp.down_proj.bias"
    tensors = load_file(file)
    for bias in (np.zeros(128, np.float16), np.ones(128, np.float16)):
        save_file(tensors | {name: bias}, file)
        if bias.any():
            with pytest.raises(CheckpointError, match=f"tensor '{name}' is stored there, but this model does not use"):
                loaded(packed)
        else:
            assert "layers.1.mlp.down.weight" in loaded(packed)


def test_dummy_weights_are_said_to_be_floats(tmp_path):
    packed, _ = write("llama:awq", tmp_path)
    (packed / "model.safetensors").unlink()
    checkpoint = open_checkpoint(packed, "dummy")
    assert KindChooser(checkpoint, {}).notes == [
        "dummy weights are not quantized as quantization_config says; isq quantizes them"
    ]


def test_quantizing_twice_must_be_asked_for(tmp_path):
    packed, _ = write("llama:awq", tmp_path)
    with pytest.raises(ConfigError, match=r"^isq is set, but .* is quantized already \(AWQ 4-bit\); accepted with"):
        chooser(packed, isq="q4_0")
    assert loaded(packed, isq="int8", packed=False)["layers.0.mlp.down.weight"].codes.dtype == jnp.int8


def loaded(path: Path, **options) -> dict[str, object]:
    checkpoint = open_checkpoint(path)
    spec, kinds = model_spec(checkpoint), chooser(path, **options)
    _, params = abstract_model(spec, BuildOptions(jnp.bfloat16), kinds)
    values = load_parameters(checkpoint, params, spec.names, build_meshes(1)[0], ignored=spec.ignored)
    return {param.path: value for param, value in zip(params, values, strict=True)}


@pytest.mark.parametrize("case", ["llama:awq", "mixtral:gptq_sorted"])
def test_dequantize_expands(case, tmp_path):
    packed, plain = write(case, tmp_path)
    found, expected = loaded(packed, packed=False), loaded(plain)
    assert all(isinstance(found[path], Dense) for path, value in expected.items() if isinstance(value, Dense))
    for path, value in expected.items():
        for a, b in zip(jax.tree.leaves(found[path]), jax.tree.leaves(value), strict=True):
            np.testing.assert_array_equal(a, b)
