"""Tiny checkpoints in every published packing, each beside the checkpoint of the numbers it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference import load_golden, packings
from tests.reference.packings import Packing
from tests.reference.tiny import draw_weights, tiny_config

LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
PACKINGS: dict[str, Packing] = {
    "gptq": packings.gptq(4, 32, symmetric=True),
    "gptq_v2": packings.gptq(4, 64, symmetric=False, v2=True),
    "gptq_128": packings.gptq(4, 128, symmetric=False),
    "gptq_rows": packings.gptq(4, -1, symmetric=True),
    "gptq_sorted": packings.gptq(4, 32, symmetric=False, act_order=True),
    "gptq_sorted_each": packings.gptq(4, 32, symmetric=True, act_order=True, each=True),
    "gptq_8bit": packings.gptq(8, 64, symmetric=True),
    "gptq_8bit_rows": packings.gptq(8, -1, symmetric=True),
    "gptq_2bit": packings.gptq(2, 32, symmetric=False),
    "gptq_marlin": packings.marlin(64, of_awq=False),
    "awq": packings.awq(64),
    "awq_marlin": packings.marlin(64, of_awq=True),
    "compressed_w4": packings.compressed_packed(4, 128, symmetric=True),
    "compressed_w4_zeros": packings.compressed_packed(4, 32, symmetric=False),
    "compressed_w4_sorted": packings.compressed_packed(4, 64, symmetric=True, act_order=True),
    "compressed_w8": packings.compressed_packed(8, -1, symmetric=True),
    "compressed_w8a16": packings.compressed_int8(rounds_inputs=False),
    "compressed_w8a8": packings.compressed_int8(rounds_inputs=True),
    "compressed_fp8": packings.compressed_fp8(),
    "fp8": packings.fp8_tensors(),
    "fp8_blocks": packings.fp8_blocks(128, 128),
    "compressed_w8a16_ends": replace(packings.compressed_int8(rounds_inputs=False), names=lambda name: True),
    "fp8_blocks_ends": replace(packings.fp8_blocks(64, 64), names=lambda name: True),
    "gptq_ends": replace(
        packings.gptq(4, 128, symmetric=False), names=lambda name: "_proj" in name or "lm_head" in name
    ),
    "auto_round": packings.auto_round(64),
    "auto_round_awq": packings.auto_round(64, of_awq=True),
    "modelopt_nvfp4": packings.nvfp4("modelopt"),
    "compressed_nvfp4": packings.nvfp4("compressed-tensors"),
    "quark_mxfp4": packings.mxfp4_modules("quark"),
    "modelopt_mxfp8": packings.mxfp8("modelopt"),
    "mxfp8": packings.mxfp8("mxfp8"),
    "torchao": packings.torchao("intx"),
    "bitsandbytes_nf4": packings.bitsandbytes_nf4(),
    "bitsandbytes_int8": packings.bitsandbytes_int8(),
}
"""Of a Llama whose sizes every one of them divides; `ends` are embedding and head."""

OTHERS: dict[str, tuple[str, Mapping[int, int], Packing]] = {
    "phi3:gptq_sorted": ("phi3", {84: 96, 168: 192}, packings.gptq(4, 32, symmetric=True, act_order=True)),
    "phi3:fp8_blocks": ("phi3", {}, packings.fp8_blocks(48, 32)),
    "mixtral:gptq_sorted": ("mixtral", {}, packings.gptq(4, 8, symmetric=False, act_order=True)),
    "mixtral:gptq_sorted_each": ("mixtral", {}, packings.gptq(4, 8, symmetric=True, act_order=True, each=True)),
    "mixtral:compressed_w8a8": ("mixtral", {}, packings.compressed_int8(rounds_inputs=True)),
    "mixtral:awq": ("mixtral", {}, packings.awq(8)),
    "mixtral:nvfp4": ("mixtral", {80: 64, 104: 96}, packings.nvfp4("modelopt")),
    "phi3:nvfp4": ("phi3", {84: 96, 168: 192}, packings.nvfp4("compressed-tensors")),
    "mixtral:bitsandbytes_nf4": ("mixtral", {}, packings.bitsandbytes_nf4()),
    "mixtral:mxfp4": ("mixtral", {80: 64, 104: 96}, packings.mxfp4()),
    "gpt_oss:mxfp4": ("gpt_oss", {72: 64, 44: 32, 88: 64}, packings.mxfp4(transposed=True)),
    "deepseek_v3:fp8_blocks": ("deepseek_v3", {}, packings.fp8_blocks(32, 32)),
    "deepseek_v3:compressed_w8a16": ("deepseek_v3", {}, packings.compressed_int8(rounds_inputs=False)),
}
"""Fused projections, experts, latent attention; and which sizes become others, so that groups divide them."""

CASES = (*(f"llama:{name}" for name in PACKINGS), *OTHERS)


def write(case: str, folder: Path) -> tuple[Path, Path]:
    """The packed checkpoint and the plain one."""
    if case in OTHERS:
        model, sizes, packing = OTHERS[case]
        config = {
            key: sizes.get(value, value) if type(value) is int else value for key, value in tiny_config(model).items()
        }
    else:
        model, packing = "llama_gqa", PACKINGS[case.split(":")[1]]
        config, sizes = tiny_config(model) | LLAMA, {64: 128, 96: 256}
    if case.endswith("gptq_ends"):
        config, sizes = config | {"vocab_size": 256}, {**sizes, 257: 256}
    shapes = {
        name: tuple(sizes.get(size, size) for size in shape)
        for name, shape in load_golden(model).tensor_shapes.items()
        if "layers.2." not in name or config["num_hidden_layers"] > 2
    }
    if case not in OTHERS:
        shapes = {name: _llama_shape(name, shape) for name, shape in shapes.items()}
    weights = draw_weights(model, shapes)
    if case == "mixtral:mxfp4":
        weights = _stacked(weights, config["num_local_experts"])
    return packings.write(packing, config, weights, folder)


def prompt() -> list[int]:
    """Token ids that every one of the models knows."""
    return np.random.default_rng(7).integers(130, size=20).tolist()


def _llama_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Keys and values have 64 rows, which are no hidden size."""
    return (64, shape[1]) if "k_proj" in name or "v_proj" in name else shape


def _stacked(weights: dict[str, np.ndarray], experts: int) -> dict[str, Any]:
    """Experts in one tensor, gate above up, as transformers keeps them in memory."""
    found = {name: array for name, array in weights.items() if ".experts." not in name}
    for name in list(weights):
        if name.endswith(".experts.0.w1.weight"):
            block = name.removesuffix(".0.w1.weight")
            w1, w2, w3 = (
                np.stack([weights[f"{block}.{x}.{w}.weight"] for x in range(experts)]) for w in ("w1", "w2", "w3")
            )
            found |= {f"{block}.gate_up_proj": np.concatenate([w1, w3], axis=1), f"{block}.down_proj": w2}
    return found
