"""Quantized checkpoints are read as the packages that wrote them meant it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxllm.quantization.schemes import coded_kind
from jaxllm.quantization.stored import Stored
from jaxllm.weights import open_checkpoint
from jaxllm.weights.checkpoint import Checkpoint
from tests.reference import GOLDENS, packings

CASES = sorted(file.stem for file in (GOLDENS / "packings").glob("*.safetensors"))
ROUNDED = {"bitsandbytes_nf4_nested": 2e-3}
"""Relative errors: float16 holds scales that were quantized themselves."""


def opened(case: str, folder: Path) -> tuple[Checkpoint, Stored, np.ndarray]:
    """The checkpoint of a golden, its matrix, and what that stands for."""
    file = GOLDENS / "packings" / f"{case}.safetensors"
    shutil.copy(file, folder / "model.safetensors")
    with safe_open(file, "np") as reader:
        config, expected = reader.metadata()["quantization_config"], reader.get_tensor("expected")
    (folder / "config.json").write_text(json.dumps({"quantization_config": json.loads(config)}))
    checkpoint = open_checkpoint(folder)
    (name,) = set(checkpoint.tensors) - {"expected"}
    return checkpoint, checkpoint.read(name), expected


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_package_that_packed_them(case, tmp_path):
    checkpoint, tensor, expected = opened(case, tmp_path)
    assert tensor.shape == expected.shape
    assert all(info.shape == expected.shape for info in checkpoint.tensors.values())
    np.testing.assert_allclose(tensor.expand(), expected, rtol=ROUNDED.get(case, 2e-6), atol=1e-7)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_kept_packed_they_are_the_same_numbers(case, blocks, tmp_path):
    _, tensor, _ = opened(case, tmp_path)
    coding = tensor.codes.coding
    kind = coded_kind(coding, np.dtype(np.float32), tensor.shape[-2:-1], tensor.shape[-1], blocks=blocks)
    weight = kind.pack([tensor], None)
    shapes = jax.tree.map(lambda array: (array.shape, array.dtype), (weight, kind.abstract(tensor.shape)))
    assert shapes[0] == shapes[1]
    found = jax.jit(lambda w: w.dequantize())(jax.tree.map(jnp.asarray, weight))
    np.testing.assert_allclose(found, tensor.expand(), rtol=2e-7)


def test_older_checkpoints_of_modelopt_say_so_in_a_file_of_their_own(tmp_path):
    values = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    tensors, meant = packings.nvfp4("modelopt").pack(values)
    packings.save({}, {f"a.up_proj{part}": array for part, array in tensors.items()}, tmp_path)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    np.testing.assert_allclose(open_checkpoint(tmp_path).read("a.up_proj.weight").expand(), meant, rtol=4e-7)


def test_modules_may_have_settings_of_their_own(tmp_path):
    """AutoRound's `extra_config`: more bits for some modules, none for others."""
    values = np.random.default_rng(0).normal(size=(2, 64, 128)).astype(np.float32)
    (few, few_meant), (many, many_meant) = (
        packings.gptq(bits, group, symmetric=True).pack(part)
        for bits, group, part in ((4, 32, values[0]), (8, 64, values[1]))
    )
    tensors = {f"a.{name}": array for module, parts in (("few", few), ("many", many)) for name, array in
               ((f"{module}{part}", array) for part, array in parts.items())}  # fmt: skip
    config = packings.auto_round(32).config | {"extra_config": {"a.many": {"bits": 8, "group_size": 64}}}
    packings.save({"quantization_config": config}, tensors | {"lm_head.weight": values[0]}, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {"a.few.weight", "a.many.weight", "lm_head.weight"}
    np.testing.assert_allclose(checkpoint.read("a.few.weight").expand(), few_meant, rtol=2e-7)
    np.testing.assert_allclose(checkpoint.read("a.many.weight").expand(), many_meant, rtol=2e-7)


PACKINGS = {
    "gptq": packings.gptq(4, 128, symmetric=True), "gptq_zeros": packings.gptq(4, 32, symmetric=False, act_order=True),
    "gptq_8bit": packings.gptq(8, 128, symmetric=False), "gptq_2bit": packings.gptq(2, 64, symmetric=True),
    "awq": packings.awq(128), "marlin": packings.marlin(128, of_awq=True),
    "compressed_w4": packings.compressed_packed(4, 128, symmetric=False),
    "compressed_w8a8": packings.compressed_int8(rounds_inputs=True), "compressed_fp8": packings.compressed_fp8(),
    "fp8": packings.fp8_tensors(), "fp8_blocks": packings.fp8_blocks(128, 128),
    "auto_round": packings.auto_round(128), "auto_round_awq": packings.auto_round(128, of_awq=True),
    "nvfp4": packings.nvfp4("modelopt"), "quark_nvfp4": packings.nvfp4("quark"),
    "compressed_nvfp4": packings.nvfp4("compressed-tensors"), "quark_mxfp4": packings.mxfp4_modules("quark"),
    "compressed_mxfp4": packings.mxfp4_modules("compressed-tensors"), "mxfp8": packings.mxfp8("mxfp8"),
    "modelopt_mxfp8": packings.mxfp8("modelopt"), "compressed_mxfp8": packings.mxfp8("compressed-tensors"),
    "modelopt_fp8": packings.modelopt_fp8("FP8"), "modelopt_rows": packings.modelopt_fp8("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt_blocks": packings.modelopt_fp8("FP8_PB_WO"), "quark_fp8": packings.quark_fp8(),
    "torchao_int8": packings.torchao("int8"), "torchao_intx": packings.torchao("intx"),
    "torchao_fp8": packings.torchao("fp8"),
    "bitsandbytes_nf4": packings.bitsandbytes_nf4(), "bitsandbytes_int8": packings.bitsandbytes_int8(),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKINGS)
def test_in_memory_a_matrix_takes_what_it_takes_in_its_file(case, tmp_path):
    """And what it is made of is hidden: the model sees one tensor."""
    values = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
    packed, plain = packings.write(PACKINGS[case], {}, {"a.up_proj.weight": values}, tmp_path)
    checkpoint = open_checkpoint(packed)
    ((name, info),) = checkpoint.tensors.items()
    assert (name, info.shape) == ("a.up_proj.weight", values.shape)
    kind = coded_kind(info.coding, np.dtype(np.float32), [256], 1024)
    weight = kind.pack([checkpoint.read(name)], None)
    meant = open_checkpoint(plain).read(name).data
    np.testing.assert_allclose(jax.tree.map(jnp.asarray, weight).dequantize(), meant, rtol=4e-7)
    np.testing.assert_allclose(checkpoint.read(name).expand(), meant, rtol=4e-7)
    held = sum(array.nbytes for array in jax.tree.leaves(weight))
    assert held <= 1.03 * (packed / "model.safetensors").stat().st_size
