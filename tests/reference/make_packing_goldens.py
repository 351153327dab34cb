"""Compute goldens/packings/CASE.safetensors: matrices that the published packages packed; see README.md.

python -m tests.reference.make_packing_goldens SOURCES

SOURCES holds the unpacked packages auto_gptq (0.7.1) and awq (0.2.9): their packing needs no GPU, importing them does.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.reference import GOLDENS

OUT, IN = 64, 128
"""Of every matrix: a tile of Marlin's, and two groups of 64."""
NAME = "model.layers.0.mlp.up_proj"

Case = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]
"""quantization_config, tensors, and the float32 matrix that they stand for."""


def module_of(path: Path) -> Any:
    """A Python file by itself, without the package around it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(bits: int, group: int, seed: int, *, symmetric: bool) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A linear layer whose weights lie on a grid, its scales and zero points `[OUT, IN / group]`."""
    rng = torch.Generator().manual_seed(seed)
    groups, levels = IN // group, 1 << bits
    codes = torch.randint(0, levels, (OUT, IN), generator=rng).float()
    zeros = (
        torch.full((OUT, groups), levels / 2) if symmetric else torch.randint(1, levels, (OUT, groups), generator=rng)
    )
    scales = (torch.rand(OUT, groups, generator=rng) * 0.01 + 0.005).half().float()
    linear = nn.Linear(IN, OUT, bias=False)
    spread = (t.float().repeat_interleave(group, dim=1) for t in (zeros, scales))
    zero, scale = spread
    linear.weight.data = (codes - zero) * scale
    return linear, scales, zeros.float()


def gptq(sources: Path, bits: int, group: int, *, symmetric: bool) -> Case:
    """AutoGPTQ's v1."""
    qlinear = module_of(sources / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py").QuantLinear
    linear, scales, zeros = drawn(bits, group, bits, symmetric=symmetric)
    layer = qlinear(bits, group, IN, OUT, bias=False, use_cuda_fp16=False)
    layer.pack(linear, scales.clone(), zeros.clone(), None)
    tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "g_idx")} | {"scales": layer.scales.half()}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return config, tensors, linear.weight.data


def gptq_marlin(sources: Path, group: int) -> Case:
    """AutoGPTQ's."""
    qlinear = module_of(sources / "auto_gptq/nn_modules/qlinear/qlinear_marlin.py").QuantLinear
    size = IN if group == -1 else group
    linear, scales, _ = drawn(4, size, 11, symmetric=True)
    layer = types.SimpleNamespace(infeatures=IN, outfeatures=OUT, group_size=size, bias=None)
    layer.B, layer.s = torch.empty(IN // 16, OUT * 2, dtype=torch.int), torch.empty(IN // size, OUT, dtype=torch.half)
    expected = linear.weight.data
    qlinear.pack(layer, linear.half(), scales.half())
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "checkpoint_format": "marlin"}
    return config, {"B": layer.B, "s": layer.s}, expected.float()


def awq(sources: Path, group: int) -> Case:
    """AutoAWQ's GEMM."""
    packages = {name: types.ModuleType(name) for name in ("awq", "awq.utils", "awq.utils.module", "awq.utils.utils")}
    packages["awq.utils.module"].try_import = lambda name: (None, "not here")  # type: ignore[attr-defined]
    packages["awq.utils.utils"].get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    packages["awq.utils.packing_utils"] = module_of(sources / "awq/utils/packing_utils.py")
    sys.modules |= packages
    linear, scales, zeros = drawn(4, group, 21, symmetric=False)
    layer = module_of(sources / "awq/modules/linear/gemm.py").WQLinear_GEMM.from_linear(
        linear, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return config, {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}, linear.weight.data


def compressed(form: str, bits: int, strategy: str, group: int | None, *, symmetric: bool, kind: str = "int") -> Case:
    """compressed-tensors' own compressors, and what they decompress to."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, group_size=group, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    size = group or IN
    linear, scales, zeros = drawn(bits, size, 31, symmetric=symmetric)
    state = {"weight": linear.weight.data, "weight_scale": scales}
    if not symmetric:
        state["weight_zero_point"] = (zeros - (1 << (bits - 1))).to(torch.int8)
    if kind == "float":
        rows = OUT if strategy == "tensor" else 1
        state["weight_scale"] = linear.weight.data.reshape(OUT // rows, -1).abs().amax(1, keepdim=True) / 448
        if strategy == "tensor":
            state["weight_scale"] = state["weight_scale"].reshape(1)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(tensors), scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme.model_dump()}}
    return json.loads(json.dumps(config, default=str)), tensors, expected


def bitsandbytes(kind: str, *, nested: bool) -> Case:
    """NF4 and FP4, as transformers saves them; the absolute maxima quantized too, or not."""
    from bitsandbytes import functional

    weight = drawn(4, 64, 41, symmetric=True)[0].weight.data + 0.001 * torch.randn(OUT, IN)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {"weight": packed} | {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return config, tensors, functional.dequantize_4bit(packed, state)


def bitsandbytes_int8() -> Case:
    """LLM.int8's rows."""
    weight = drawn(8, IN, 42, symmetric=True)[0].weight.data
    largest = weight.abs().amax(1)
    codes = torch.round(weight * (127 / largest[:, None])).to(torch.int8)
    from bitsandbytes import functional

    expected = functional.int8_vectorwise_dequant(codes, largest)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, expected


def fp8_blocks() -> Case:
    """DeepSeek's, of ragged blocks, as transformers expands them."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(51)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(52)) + 0.1
    expected = _dequantize_fp8_weight(weight, scale, [48, 48], torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    return config, {"weight": weight, "weight_scale_inv": scale}, expected


def mxfp4() -> Case:
    """gpt-oss's experts, as transformers expands them (and transposes; that is undone)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = torch.Generator().manual_seed(61)
    blocks = torch.randint(0, 256, (2, 8, IN // 32, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 8, IN // 32), generator=rng, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"quant_method": "mxfp4"}, {"blocks": blocks, "scales": scales}, expected.transpose(1, 2)


def cases(sources: Path) -> dict[str, Callable[[], Case]]:
    """By name."""
    return {
        "gptq_2bit": lambda: gptq(sources, 2, 32, symmetric=False),
        "gptq_3bit": lambda: gptq(sources, 3, 64, symmetric=False),
        "gptq_4bit": lambda: gptq(sources, 4, 32, symmetric=False),
        "gptq_4bit_symmetric": lambda: gptq(sources, 4, 64, symmetric=True),
        "gptq_8bit": lambda: gptq(sources, 8, 64, symmetric=False),
        "gptq_marlin": lambda: gptq_marlin(sources, 64),
        "gptq_marlin_rows": lambda: gptq_marlin(sources, -1),
        "awq_gemm": lambda: awq(sources, 32),
        "compressed_w4": lambda: compressed("pack-quantized", 4, "group", 32, symmetric=False),
        "compressed_w4_symmetric": lambda: compressed("pack-quantized", 4, "group", 64, symmetric=True),
        "compressed_w3": lambda: compressed("pack-quantized", 3, "group", 32, symmetric=False),
        "compressed_w8": lambda: compressed("pack-quantized", 8, "channel", None, symmetric=True),
        "compressed_int8": lambda: compressed("int-quantized", 8, "channel", None, symmetric=True),
        "compressed_fp8_rows": lambda: compressed("float-quantized", 8, "channel", None, symmetric=True, kind="float"),
        "compressed_fp8": lambda: compressed("float-quantized", 8, "tensor", None, symmetric=True, kind="float"),
        "bitsandbytes_nf4": lambda: bitsandbytes("nf4", nested=False),
        "bitsandbytes_nf4_nested": lambda: bitsandbytes("nf4", nested=True),
        "bitsandbytes_fp4": lambda: bitsandbytes("fp4", nested=False),
        "bitsandbytes_int8": bitsandbytes_int8,
        "fp8_blocks": fp8_blocks,
        "mxfp4": mxfp4,
    }


def main(sources: str) -> None:
    folder = GOLDENS / "packings"
    folder.mkdir(exist_ok=True)
    for name, make in cases(Path(sources)).items():
        config, tensors, expected = make()
        separator = "_" if config["quant_method"] == "mxfp4" else "."
        stored = {f"{NAME}{separator}{part}": tensor.contiguous() for part, tensor in tensors.items()}
        stored["expected"] = expected.float().contiguous()
        save_file(stored, folder / f"{name}.safetensors", metadata={"quantization_config": json.dumps(config)})


if __name__ == "__main__":
    main(*sys.argv[1:])
