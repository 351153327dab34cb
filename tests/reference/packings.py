"""Tiny quantized checkpoints: what the published packings do, transcribed to NumPy from their side, the packing.

Each packer takes a float matrix `[o, i]` and gives the tensors of one module, by what their names add to its own, and
the float32 matrix that those stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BF16, FP8, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int64": "I64", "int32": "I32",
    "int8": "I8", "uint8": "U8", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip

Module = tuple[dict[str, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Packing:
    """A way to write a checkpoint: its quantization_config, and what each matrix becomes."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray], Module]
    names: Callable[[str], bool] = field(default=lambda name: "_proj" in name or ".w" in name)
    """Which modules are packed."""


def grid(
    values: np.ndarray, bits: int, group: int, symmetric: bool, order: np.ndarray | None = None, dtype: Any = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes `[o, i]`, zero points and scales `[o, i / group]`, and what they stand for; `order` sorts inputs first."""
    outputs, inputs = values.shape
    order = np.arange(inputs) if order is None else order
    groups = values[:, order].reshape(outputs, -1, group)
    largest = (1 << bits) - 1
    if symmetric:
        scale = (2 * np.abs(groups).max(-1) / largest).astype(dtype).astype(np.float32)
        zero = np.full(scale.shape, 1 << (bits - 1))
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = ((high - low) / largest).astype(dtype).astype(np.float32)
        zero = np.clip(np.rint(-low / scale), 1, largest).astype(int)
    codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, largest)
    meant = ((codes - zero[..., None]) * scale[..., None]).reshape(outputs, inputs)
    natural = np.argsort(order)
    return (
        codes.reshape(outputs, inputs)[:, natural].astype(np.uint32),
        zero,
        scale,
        meant[:, natural].astype(np.float32),
    )


def words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes `[n, m]` as int32 `[n, m * bits / 32]`; `places[k]` is which of a word's codes its `k`-th bits hold."""
    count = 32 // bits
    packed = np.zeros((codes.shape[0], codes.shape[1] // count), np.uint32)
    for place, source in enumerate(places or range(count)):
        packed |= codes[:, source::count].astype(np.uint32) << np.uint32(bits * place)
    return packed.view(np.int32)


def gptq(
    bits: int, group: int, *, symmetric: bool, v2: bool = False, act_order: bool = False, each: bool = False
) -> Packing:
    """AutoGPTQ's and GPTQModel's; with `each` every matrix has an order of its own, even those of the same inputs."""

    def pack(values: np.ndarray) -> Module:
        inputs = values.shape[1]
        size = inputs if group == -1 else group
        seed = (inputs, *values[0, :1].view(np.uint32)) if each else inputs
        order = np.random.default_rng(seed).permutation(inputs) if act_order else None
        codes, zero, scale, meant = grid(values, bits, size, symmetric, order)
        group_of = np.arange(inputs) // size
        g_idx = np.empty(inputs, np.int32)
        g_idx[np.arange(inputs) if order is None else order] = group_of
        tensors = {
            ".qweight": words(codes, bits).T,  # neighbouring inputs share a word
            ".qzeros": words((zero - (0 if v2 else 1)).T, bits),
            ".scales": scale.T.astype(np.float16),
            ".g_idx": g_idx,
        }
        return tensors, meant

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}
    return Packing(config | ({"checkpoint_format": "gptq_v2"} if v2 else {}), pack)


def awq(group: int) -> Packing:
    """AutoAWQ's GEMM."""
    evens_first = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(values: np.ndarray) -> Module:
        codes, zero, scale, meant = grid(values, 4, group, False)
        tensors = {
            ".qweight": words(codes.T, 4, evens_first),
            ".qzeros": words(zero.T, 4, evens_first),
            ".scales": scale.T.astype(np.float16),
        }
        return tensors, meant

    return Packing({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, pack)


def marlin_order(array: np.ndarray) -> np.ndarray:
    """A 16 x 64 tile's 1,024 codes as a warp's lanes take them: four 16 x 16 parts, eight codes each."""
    taken = []
    for lane in range(32):
        for part in range(4):
            eight = [
                array[2 * (lane % 4) + row, 16 * part + lane // 4 + column] for column in (0, 8) for row in (0, 1, 8, 9)
            ]
            taken += [eight[place] for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    return np.array(taken)


def marlin(group: int, *, of_awq: bool) -> Packing:
    """Symmetric four bits in Marlin's order."""

    def pack(values: np.ndarray) -> Module:
        codes, _, scale, meant = grid(values, 4, group, True)
        outputs, inputs = values.shape
        tiles = [
            [marlin_order(codes.T[i : i + 16, o : o + 64]) for o in range(0, outputs, 64)] for i in range(0, inputs, 16)
        ]
        scales = scale.T.reshape(-1, 8, 8).swapaxes(1, 2).reshape(-1, outputs).astype(np.float16)
        names = (".qweight", ".scales") if of_awq else (".B", ".s")
        flat = np.array(tiles).reshape(inputs // 16, -1)
        return {names[0]: words(flat, 4), names[1]: scales, ".workspace": np.zeros(16, np.int32)}, meant

    if of_awq:
        return Packing({"quant_method": "awq", "bits": 4, "group_size": group, "version": "marlin"}, pack)
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "is_marlin_format": True}
    return Packing(config | {"checkpoint_format": "marlin"}, pack)


def _compressed(form: str, weights: dict[str, Any], pack: Callable[[np.ndarray], Module], **group: Any) -> Packing:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights} | group}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return Packing(config, pack)


def compressed_packed(bits: int, group: int, *, symmetric: bool, act_order: bool = False) -> Packing:
    """compressed-tensors' pack-quantized; scales in bfloat16."""

    def pack(values: np.ndarray) -> Module:
        inputs = values.shape[1]
        order = np.random.default_rng(inputs).permutation(inputs) if act_order else None
        size = inputs if group == -1 else group
        codes, zero, scale, meant = grid(values, bits, size, symmetric, order, BF16)
        tensors = {
            ".weight_packed": words(codes, bits),
            ".weight_scale": scale.astype(BF16),
            ".weight_shape": np.array(values.shape, np.int64),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = words(zero.T, bits).T
        if act_order:
            g_idx = np.empty(inputs, np.int32)
            g_idx[order] = np.arange(inputs) // size
            tensors[".weight_g_idx"] = g_idx
        return tensors, meant

    return _compressed("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": symmetric}, pack)


def compressed_int8(*, rounds_inputs: bool) -> Packing:
    """compressed-tensors' int-quantized, a scale a row."""

    def pack(values: np.ndarray) -> Module:
        scale = (np.abs(values).max(1, keepdims=True) / 127).astype(BF16)
        codes = np.clip(np.rint(values / scale.astype(np.float32)), -128, 127).astype(np.int8)
        return {".weight": codes, ".weight_scale": scale}, codes * scale.astype(np.float32)

    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"} if rounds_inputs else None
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return _compressed("int-quantized", weights, pack, input_activations=inputs)


def compressed_fp8() -> Packing:
    """compressed-tensors' float-quantized, a scale a row, and one for inputs that is not used."""

    def pack(values: np.ndarray) -> Module:
        scale = (np.abs(values).max(1, keepdims=True) / 448).astype(np.float32)
        codes = (values / scale).astype(FP8)
        tensors = {".weight": codes, ".weight_scale": scale, ".input_scale": np.ones(1, np.float32)}
        return tensors, codes.astype(np.float32) * scale

    return _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, pack)


def fp8_tensors() -> Packing:
    """Mistral's: a scale a tensor, and one for inputs that is not used."""

    def pack(values: np.ndarray) -> Module:
        scale = (np.abs(values).max() / 448).astype(BF16)
        codes = (values / np.float32(scale)).astype(FP8)
        tensors = {".weight": codes, ".weight_scale_inv": np.array(scale), ".activation_scale": np.array(0.5, BF16)}
        return tensors, codes.astype(np.float32) * np.float32(scale)

    return Packing({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, pack)


def fp8_blocks(rows: int, columns: int) -> Packing:
    """DeepSeek's; blocks at the edges are smaller."""

    def pack(values: np.ndarray) -> Module:
        outputs, inputs = values.shape
        scale = np.empty((-(-outputs // rows), -(-inputs // columns)), np.float32)
        codes, meant = np.empty(values.shape, FP8), np.empty(values.shape, np.float32)
        for r, c in np.ndindex(scale.shape):
            block = np.s_[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
            scale[r, c] = np.abs(values[block]).max() / 448
            codes[block] = (values[block] / scale[r, c]).astype(FP8)
            meant[block] = codes[block].astype(np.float32) * scale[r, c]
        return {".weight": codes, ".weight_scale_inv": scale}, meant

    return Packing({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}, pack)


def bitsandbytes_int8() -> Packing:
    """LLM.int8's."""

    def pack(values: np.ndarray) -> Module:
        largest = np.abs(values).max(1)
        codes = np.rint(values * (127 / largest)[:, None]).astype(np.int8)
        tensors = {".weight": codes, ".SCB": largest, ".weight_format": np.array(0, np.uint8)}
        return tensors, (codes * (largest / 127)[:, None]).astype(np.float32)

    return Packing({"quant_method": "bitsandbytes", "load_in_8bit": True}, pack)


NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""The quantiles of a normal distribution (QLoRA, appendix E)."""


def bitsandbytes_nf4(block: int = 64) -> Packing:
    """Blocks of the flattened matrix, higher bits first."""

    def pack(values: np.ndarray) -> Module:
        flat = values.reshape(-1, block)
        largest = np.abs(flat).max(1)
        codes = np.abs((flat / largest[:, None])[..., None] - NF4).argmin(-1).astype(np.uint8).reshape(-1)
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(values.shape)}
        tensors = {
            ".weight": (codes[::2] << 4 | codes[1::2])[:, None],
            ".weight.absmax": largest,
            ".weight.quant_map": NF4,
            ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        }
        return tensors, (NF4[codes].reshape(flat.shape) * largest[:, None]).reshape(values.shape)

    return Packing({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, pack)


def auto_round(group: int, *, of_awq: bool = False) -> Packing:
    """AutoRound's, packed as GPTQ's or AWQ's."""

    def pack(values: np.ndarray) -> Module:
        return (awq(group) if of_awq else gptq(4, group, symmetric=True)).pack(values)

    form = "auto_round:auto_awq" if of_awq else "auto_round:auto_gptq"
    config = {"quant_method": "auto-round", "data_type": "int", "bits": 4, "group_size": group, "packing_format": form}
    return Packing(config | {"sym": not of_awq, "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}, pack)


def torchao(kind: str) -> Packing:
    """Tensors as torchao's safetensors support flattens them: int8 or e4m3 a row, or four bits in int8 with zeros."""

    def pack(values: np.ndarray) -> Module:
        if kind == "intx":
            codes, zero, scale, meant = grid(values, 4, 32, False, dtype=BF16)
            tensors = {"qdata": codes.astype(np.int8) - np.int8(8), "zero_point": (zero - 8).astype(np.int8)}
            tensors["scale"] = scale.astype(BF16)
        else:
            inner, meant = (compressed_int8(rounds_inputs=False) if kind == "int8" else compressed_fp8()).pack(values)
            tensors = {"qdata": inner[".weight"], "scale": inner[".weight_scale"]}
        return {f"._weight_{name}": array for name, array in tensors.items()}, meant

    return Packing({"quant_method": "torchao", "quant_type": {"default": {}}}, pack)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def nearest_e2m1(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and what they stand for."""
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1).astype(np.uint8) | (scaled < 0).astype(np.uint8) << 3
    return codes, np.where(codes & 8, -1, 1) * E2M1[codes & 7]


def powers_of(groups: np.ndarray, largest: float) -> np.ndarray:
    return np.ceil(np.log2(np.abs(groups).max(-1) / largest)).astype(int)


def nvfp4(maker: str) -> Packing:
    """ModelOpt's, Quark's, or compressed-tensors', which has the inverse of the matrix's scale."""
    compressed = maker == "compressed-tensors"

    def pack(values: np.ndarray) -> Module:
        whole = np.float32(np.abs(values).max() / (6 * 448))
        whole = np.float32(1) / (np.float32(1) / whole) if compressed else whole
        groups = values.reshape(len(values), -1, 16)
        scale = (np.abs(groups).max(-1) / 6 / whole).astype(FP8)
        meant = scale.astype(np.float64) * np.float64(whole)
        codes, numbers = nearest_e2m1(groups / np.maximum(meant, 1e-30)[..., None])
        codes = codes.reshape(values.shape)
        tensors = {
            ".weight_packed" if compressed else ".weight": codes[:, ::2] | codes[:, 1::2] << 4,
            ".weight_scale": scale,
        }
        if compressed:
            tensors |= {".weight_global_scale": np.array([1 / whole]), ".input_global_scale": np.ones(1, np.float32)}
        else:
            tensors |= {".weight_scale_2": np.array(whole), ".input_scale": np.array(1, np.float32)}
        return tensors, (numbers * meant[..., None]).reshape(values.shape).astype(np.float32)

    if compressed:
        return _compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}, pack)
    if maker == "quark":
        weight = [{"dtype": "fp4", "group_size": 16}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}]
        return Packing({"quant_method": "quark", "global_quant_config": {"weight": weight}}, pack)
    return Packing({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, pack)


def mxfp4_modules(maker: str) -> Packing:
    """Quark's or compressed-tensors': a matrix at a time."""
    compressed = maker == "compressed-tensors"

    def pack(values: np.ndarray) -> Module:
        tensors, meant = mxfp4().pack(values)
        name = ".weight_packed" if compressed else ".weight"
        return {name: tensors["_blocks"].reshape(len(values), -1), ".weight_scale": tensors["_scales"]}, meant

    if compressed:
        return _compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}, pack)
    weight = {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}
    return Packing({"quant_method": "quark", "global_quant_config": {"weight": weight}}, pack)


def mxfp8(maker: str) -> Packing:
    """ModelOpt's and compressed-tensors', whose exponents are bytes; or of a block of one row and 32 columns."""

    def pack(values: np.ndarray) -> Module:
        groups = values.reshape(len(values), -1, 32)
        exponent = powers_of(groups, 448)
        codes = (groups / 2.0 ** exponent[..., None]).astype(FP8)
        meant = codes.astype(np.float64) * 2.0 ** exponent[..., None]
        scales = (exponent + 127).astype(np.uint8)
        if maker == "mxfp8":
            return {".weight": codes.reshape(values.shape), ".weight_scale_inv": scales.view(E8M0)}, meant.reshape(
                values.shape
            ).astype(np.float32)
        return {".weight": codes.reshape(values.shape), ".weight_scale": scales}, meant.reshape(values.shape).astype(
            np.float32
        )

    if maker == "compressed-tensors":
        return _compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32}, pack)
    if maker == "mxfp8":
        return Packing({"quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}, pack)
    return Packing({"quant_method": "modelopt", "quant_algo": "MXFP8"}, pack)


def modelopt_fp8(algorithm: str) -> Packing:
    """A scale a tensor, a row, or a block of 128 by 128 with axes of one between."""
    inner = {"FP8": fp8_tensors(), "FP8_PER_CHANNEL_PER_TOKEN": compressed_fp8(), "FP8_PB_WO": fp8_blocks(128, 128)}

    def pack(values: np.ndarray) -> Module:
        tensors, meant = inner[algorithm].pack(values)
        scale = np.asarray(tensors.get(".weight_scale", tensors.get(".weight_scale_inv"))).astype(np.float32)
        if algorithm == "FP8_PB_WO":
            scale = scale[:, None, :, None]
        return {".weight": tensors[".weight"], ".weight_scale": scale, ".input_scale": np.ones((), np.float32)}, meant

    return Packing({"quant_method": "modelopt", "quant_algo": algorithm}, pack)


def quark_fp8() -> Packing:
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
    return Packing({"quant_method": "quark", "global_quant_config": {"weight": weight}}, compressed_fp8().pack)


def mxfp4(*, transposed: bool = False) -> Packing:
    """gpt-oss's; a stack of matrices at a time, whose name stands for itself; `transposed` is the plain checkpoint."""

    def pack(values: np.ndarray) -> Module:
        values = values.swapaxes(-1, -2) if transposed else values
        groups = values.reshape(*values.shape[:-1], -1, 32)
        exponent = powers_of(groups, 6)
        codes, numbers = nearest_e2m1(groups / 2.0 ** exponent[..., None])
        meant = numbers * 2.0 ** exponent[..., None]
        tensors = {"_blocks": codes[..., ::2] | codes[..., 1::2] << 4, "_scales": (exponent + 127).astype(np.uint8)}
        meant = meant.reshape(values.shape).astype(np.float32)
        return tensors, meant.swapaxes(-1, -2) if transposed else meant

    return Packing(
        {"quant_method": "mxfp4"}, pack, lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    )


def write(
    packing: Packing, config: Mapping[str, Any], weights: Mapping[str, np.ndarray], folder: Path
) -> tuple[Path, Path]:
    """The checkpoint packed, and the one of the numbers it stands for, in two directories of `folder`."""
    packed, plain = {}, {}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if values.ndim < 2 or not packing.names(module):
            packed[name] = plain[name] = values
            continue
        tensors, plain[name] = packing.pack(values)
        packed |= {module + suffix: tensor for suffix, tensor in tensors.items()}
    paths = folder / "packed", folder / "plain"
    save(dict(config) | {"quantization_config": packing.config}, packed, paths[0])
    save(config, plain, paths[1])
    return paths


def save(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], folder: Path) -> None:
    """A directory of config.json and model.safetensors; safetensors' own writer knows no FP8 of NumPy's."""
    folder.mkdir(parents=True, exist_ok=True)
    header, data = {}, b""
    for name, array in tensors.items():
        stored = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(stored)],
        }
        data += stored
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))
