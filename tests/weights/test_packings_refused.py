"""Quantized checkpoints that make no sense, or are of a variant that is not read: one line that says what and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.weights import open_checkpoint
from tests.fuzz.harness import check_message
from tests.reference import packings
from tests.reference.packings import Packing

MODULE = "a.up_proj"
GPTQ = packings.gptq(4, 32, symmetric=True)
AWQ = packings.awq(32)
W4 = packings.compressed_packed(4, 32, symmetric=False)
FP8_BLOCKS = packings.fp8_blocks(32, 32)
NF4 = packings.bitsandbytes_nf4()
AUTO_ROUND = packings.auto_round(32)
NVFP4 = packings.nvfp4("modelopt")

Tensors = dict[str, np.ndarray]


def folder_of(packing: Packing, folder: Path, change: Callable[[Tensors], Any] | None = None, **config: Any) -> Path:
    """A checkpoint of one matrix, with parts changed."""
    values = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    shape = (2, 64, 96) if packing.config["quant_method"] == "mxfp4" else (64, 96)
    tensors, _ = packing.pack(np.broadcast_to(values, shape))
    if change is not None:
        change(tensors)
    stored = {MODULE + name: array for name, array in tensors.items()}
    packings.save({"quantization_config": packing.config | config}, stored, folder)
    return folder


def refused(folder: Path) -> str:
    """What is said of it, when it is opened or when its matrix is read."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    message = str(caught.value)
    check_message(message)
    assert message.startswith(str(folder))
    return message.removeprefix(str(folder))


@pytest.mark.parametrize(
    ("packing", "config", "says"),
    [
        (GPTQ, {"quant_method": "hqq"}, "quantization_config.quant_method is 'hqq'; supported are gptq, awq"),
        (GPTQ, {"quant_method": None}, "quant_method is None; supported are"),
        (GPTQ, {"bits": 5}, "quantization_config.bits is 5, in GPTQ; accepted is 2, 3, 4 or 8"),
        (GPTQ, {"bits": "4"}, "quantization_config.bits is '4'; accepted is an integer"),
        (GPTQ, {"group_size": 0}, "quantization_config.group_size is 0; accepted is"),
        (GPTQ, {"group_size": 64}, "tensor 'a.up_proj.weight' has 96 inputs, which groups of 64 (group_size) do not"),
        (GPTQ, {"checkpoint_format": "bitblas"}, "checkpoint_format is 'bitblas', in GPTQ; accepted is gptq, gptq_v2"),
        (
            GPTQ,
            {"dynamic": {"up": {"bits": 8}}},
            "quantization_config.dynamic is {'up': {'bits': 8}}, in GPTQ; accepted",
        ),
        (GPTQ, {"bits": 8}, "tensor 'a.up_proj.weight' has 48 inputs, which groups of 32 (group_size) do not divide"),
        (AWQ, {"bits": 8}, "quantization_config.bits is 8, in AWQ; accepted is 4"),
        (AWQ, {"version": "gemv"}, "quantization_config.version is 'gemv', in AWQ; accepted is gemm or marlin"),
        (
            W4,
            {"format": "mixfp4-pack-quantized"},
            "format is 'mixfp4-pack-quantized', in compressed-tensors; accepted is",
        ),
        (W4, {"sparsity_config": {"format": "marlin-24"}}, "sparsity_config.format is 'marlin-24', in"),
        (W4, {"transform_config": {"config_groups": {}}}, "transform_config is"),
        (W4, {"config_groups": {"g": {"weights": {"num_bits": 6}}}}, "g.weights.num_bits is 6, in compressed-tensors"),
        (W4, {"config_groups": {"g": {"weights": {"num_bits": 2}}}}, "holds no (64, 96) (weight_shape) of 2 bits"),
        (W4, {"config_groups": [1]}, "quantization_config.config_groups is [1]; accepted is an object"),
        (
            FP8_BLOCKS,
            {"weight_block_size": [128]},
            "quantization_config.weight_block_size is [128]; accepted is a list",
        ),
        (
            FP8_BLOCKS,
            {"weight_block_size": [64, 64]},
            "tensor 'a.up_proj.weight_scale_inv' is of shape (2, 3); accepted",
        ),
        (
            AUTO_ROUND,
            {"packing_format": "auto_round"},
            "packing_format is 'auto_round', in AutoRound; accepted is auto_r",
        ),
        (AUTO_ROUND, {"data_type": "mx_fp"}, "quantization_config.data_type is 'mx_fp'; accepted is one of int"),
        (AUTO_ROUND, {"extra_config": [1]}, "quantization_config.extra_config is [1]; accepted is an object"),
        (
            AUTO_ROUND,
            {"extra_config": {MODULE: {"bits": 5}}},
            "quantization_config.extra_config.a.up_proj.bits is 5, in GPTQ; accepted is 2, 3, 4 or 8",
        ),
        (
            AUTO_ROUND,
            {"extra_config": {MODULE: {"group_size": 0}}},
            "quantization_config.extra_config.a.up_proj.group_size is 0; accepted is",
        ),
        (NVFP4, {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ', in ModelOpt; accepted is FP8, FP8_PER_CH"),
        (
            packings.quark_fp8(),
            {"global_quant_config": {"weight": {"dtype": "int4"}}},
            "quantization_config.global_quant_config.weight.dtype is 'int4', in Quark; accepted is fp8_e4m3 or fp4",
        ),
        (packings.quark_fp8(), {"global_quant_config": 1}, "global_quant_config is 1; accepted is an object"),
        (NF4, {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type is 'af4', in bitsandbytes; accepted is nf4 or fp4"),
    ],
)
def test_an_unsupported_variant_names_itself_and_what_would_do(packing, config, says, tmp_path):
    assert says in refused(folder_of(packing, tmp_path, **config))


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def with_nan(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flat[1] = np.nan
    return array


@pytest.mark.parametrize(
    ("packing", "change", "says"),
    [
        (GPTQ, drop(".scales"), "tensor 'a.up_proj.scales' is missing, which 'a.up_proj.weight' is made of"),
        (GPTQ, put(".qweight", lambda a: a[:8]), "tensor 'a.up_proj.scales' is F16 of shape (3, 64); accepted is"),
        (GPTQ, put(".qzeros", lambda a: a[:, :4]), "tensor 'a.up_proj.qzeros' is I32 of shape (3, 4); accepted is I32"),
        (GPTQ, put(".qzeros", np.zeros_like), "tensor 'a.up_proj.qzeros' holds others than 8; accepted with"),
        (GPTQ, put(".scales", with_nan), "tensor 'a.up_proj.weight': not all of its scales are finite"),
        (GPTQ, put(".g_idx", np.zeros_like), "tensor 'a.up_proj.g_idx' does not name each of 3 groups 32 times"),
        (GPTQ, put(".g_idx", lambda a: a - 2), "tensor 'a.up_proj.g_idx' does not name each"),
        (GPTQ, put(".qweight", lambda a: a.astype(np.float32)), "tensor 'a.up_proj.qweight' is F32 of shape"),
        (AWQ, put(".qzeros", lambda a: a[:1]), "tensor 'a.up_proj.qzeros' is I32 of shape (1, 8); accepted is I32 of"),
        (AWQ, put(".scales", with_nan), "not all of its scales are finite"),
        (W4, drop(".weight_shape"), "tensor 'a.up_proj.weight_shape' is missing"),
        (W4, put(".weight_packed", lambda a: a[:, :6]), "tensor 'a.up_proj.weight_packed' of shape (64, 6) holds no"),
        (W4, put(".weight_shape", lambda a: -a), "holds no (-64, -96) (weight_shape)"),
        (W4, put(".weight_scale", lambda a: a[:, :0]), "tensor 'a.up_proj.weight_scale' is of shape (64, 0)"),
        (
            W4,
            put(".weight_scale", lambda a: np.tile(a, 5)[:, :5]),
            "has 96 inputs, which 5 groups (weight_scale) do not",
        ),
        (FP8_BLOCKS, drop(".weight_scale_inv"), "is FP8, and 'a.up_proj.weight_scale_inv' or 'a.up_proj.weight_scale'"),
        (FP8_BLOCKS, put(".weight_scale_inv", with_nan), "not all of its scales are finite"),
        (
            packings.torchao("intx"),
            put("._weight_qdata", lambda a: a.reshape(2, 2, 16, 96)),
            "tensor 'a.up_proj.weight' is I8 of shape (2, 2, 16, 96); accepted is I8 with 2 axes",
        ),
        (packings.torchao("intx"), drop("._weight_scale"), "torchao; accepted is Int8Tensor, IntxUnpackedToInt8Tensor"),
        (NVFP4, drop(".weight_scale_2"), "tensor 'a.up_proj.weight_scale_2' is missing"),
        (
            NVFP4,
            put(".weight_scale_2", lambda a: np.tile(a, 2)),
            "'a.up_proj.weight_scale_2' is of shape (2,); accepted",
        ),
        (NVFP4, put(".weight_scale_2", lambda a: a * np.inf), "not all of its scales are finite"),
        (NVFP4, put(".weight_scale", with_nan), "not all of its scales are finite"),
        (
            NVFP4,
            put(".weight_scale", lambda a: a[:, 1:]),
            "weight_scale' is of shape (64, 5); accepted is [64, 96 / 16]",
        ),
        (packings.nvfp4("compressed-tensors"), put(".weight_global_scale", np.zeros_like), "not all of its scales are"),
        (packings.mxfp8("modelopt"), put(".weight_scale", lambda a: a | 255), "not all of its scales are finite"),
        (
            packings.mxfp8("modelopt"),
            put(".weight_scale", lambda a: a[:, 1:]),
            "weight_scale' is of shape (64, 2); accep",
        ),
        (NF4, put(".weight", lambda a: a[:-1]), "tensor 'a.up_proj.weight' has 3,071 bytes, which are no (64, 96) of"),
        (NF4, put(".weight.absmax", lambda a: a[1:]), "tensor 'a.up_proj.weight.absmax' is F32 of shape (95,)"),
        (NF4, put(".weight.absmax", with_nan), "not all of its scales are finite"),
        (NF4, put(".weight.quant_map", with_nan), "stands for numbers that are not finite"),
        (
            NF4,
            put(".weight.quant_state.bitsandbytes__nf4", lambda a: a[:-3]),
            "tensor 'a.up_proj.weight.quant_state.bitsandbytes__nf4' is not readable as JSON",
        ),
        (packings.mxfp4(), put("_scales", lambda a: a[:1]), "tensor 'a.up_proj_scales' is U8 of shape (1, 64, 3)"),
        (packings.mxfp4(), put("_scales", lambda a: a | 255), "not all of its scales are finite"),
        (packings.marlin(32, of_awq=True), put(".qweight", lambda a: a[:, :64]), "has 32 outputs, in Marlin's order"),
        (packings.bitsandbytes_int8(), put(".SCB", lambda a: a[1:]), "tensor 'a.up_proj.SCB' is F32 of shape (63,)"),
    ],
)
def test_what_does_not_fit_is_named(packing, change, says, tmp_path):
    assert says in refused(folder_of(packing, tmp_path, change))


def test_quantization_config_of_a_wrappers_text_model_counts(tmp_path):
    folder = folder_of(GPTQ, tmp_path)
    (folder / "config.json").write_text('{"text_config": {"quantization_config": {"quant_method": "gptqq"}}}')
    assert "quant_method is 'gptqq'; supported are gptq" in refused(folder)
