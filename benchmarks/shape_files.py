"""GGUF files of real models' shapes with random weights, as llama.cpp would name and quantize them.

Speed depends on shapes and kinds alone, so nothing has to be downloaded. Names of tensors are those of the `gguf`
package; the kind of each is that of llama.cpp's quantization program (src/llama-quant.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

KINDS = {
    "q4_k_m": (Type.Q4_K, Type.Q6_K),
    "q8_0": (Type.Q8_0,) * 2,
    "bf16": (Type.BF16,) * 2,
    "mxfp4": (Type.Q8_0,) * 2,
}
"""What most matrices are kept as, and those that llama.cpp gives more bits; experts of `mxfp4` are MXFP4."""
FILE_TYPES = {"q4_k_m": 15, "q8_0": 7, "bf16": 32, "mxfp4": 38}
WITHOUT_BLOCKS_OF_256 = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
CHUNK = 2**26
"""Bytes that are made at once."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes.

    Attributes:
        layers: as many as the file has; `of` is the model's own number where it has more.
        attending: the layers that attend, where others convolve or have a recurrence.
        experts: in each layer, of which a token uses `top`.
    """

    arch: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    theta: float
    tied: bool = True
    of: int | None = None
    attending: frozenset[int] | None = None
    experts: int = 0
    top: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """gpt-oss has been published in MXFP4 alone."""
        return ("mxfp4",) if self.arch == "gpt-oss" else ("q4_k_m", "q8_0", "bf16")


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 1e6),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, 5e5),
    "gemma-3-1b": Shape("gemma3", 1152, 6912, 26, 4, 1, 256, 262144, 1e6),
    "lfm2-1.2b": Shape("lfm2", 2048, 8192, 16, 32, 8, 64, 65536, 1e6, attending=frozenset({2, 5, 8, 10, 12, 14})),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 1e6),
    "qwen3.5-4b": Shape("qwen35", 2560, 9216, 32, 16, 4, 256, 248320, 1e7, attending=frozenset(range(3, 32, 4))),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5, tied=False),
    "qwen3-30b-a3b": Shape("qwen3moe", 2048, 768, 12, 32, 4, 128, 151936, 1e6, tied=False, of=48, experts=128, top=8),
    "gpt-oss-20b": Shape("gpt-oss", 2880, 2880, 8, 64, 8, 64, 201088, 1.5e5, tied=False, of=24, experts=32, top=4),
}
KEY_HEADS, VALUE_HEADS, STATE, TAPS = 16, 32, 128, 4
"""Of Qwen3.5-4B's linear attention."""


class Tensor(NamedTuple):
    """A tensor's name, its dimensions from the outermost on, and how it is kept."""

    name: str
    dims: tuple[int, ...]
    type: Type

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.dims) // block * size


def tensors(shape: Shape, kind: str) -> Iterator[Tensor]:
    """All tensors of a file."""
    most, more = KINDS[kind]
    hidden = shape.hidden

    def matrix(name: str, *dims: int, type: Type = most) -> Tensor:
        return Tensor(f"{name}.weight", dims, WITHOUT_BLOCKS_OF_256.get(type, type) if dims[-1] % 256 else type)

    def floats(name: str, *dims: int) -> Tensor:
        return Tensor(name, dims, Type.F32)

    yield matrix("token_embd", shape.vocab, hidden, type=more if shape.tied else most)
    yield floats("token_embd_norm.weight" if shape.arch == "lfm2" else "output_norm.weight", hidden)
    if not shape.tied:
        yield matrix("output", shape.vocab, hidden, type=more)
    attending = sorted(range(shape.layers) if shape.attending is None else shape.attending)
    for layer in range(shape.layers):
        at, down = f"blk.{layer}", more if _more_bits(layer, shape.layers) else most
        after = "post_attention_norm" if shape.arch in ("gpt-oss", "qwen35") else "ffn_norm"
        yield from (floats(f"{at}.{name}.weight", hidden) for name in ("attn_norm", after))
        if layer in attending:
            number = layer if shape.arch == "qwen35" else attending.index(layer)  # attn_qkv counts there as well
            values = more if _more_bits(number, shape.layers if shape.arch == "qwen35" else len(attending)) else most
            q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            yield matrix(f"{at}.attn_q", q * (2 if shape.arch == "qwen35" else 1), hidden)  # its gate as well
            yield matrix(f"{at}.attn_k", kv, hidden)
            yield matrix(f"{at}.attn_v", kv, hidden, type=values)
            yield matrix(f"{at}.attn_output", hidden, q)
            if shape.arch not in ("llama", "gpt-oss"):
                yield from (floats(f"{at}.attn_{part}_norm.weight", shape.head_dim) for part in "qk")
            if shape.arch == "gpt-oss":
                yield floats(f"{at}.attn_sinks.weight", shape.heads)
                sizes = {"q": q, "k": kv, "v": kv, "output": hidden}
                yield from (floats(f"{at}.attn_{part}.bias", size) for part, size in sizes.items())
        elif shape.arch == "lfm2":
            yield matrix(f"{at}.shortconv.in_proj", 3 * hidden, hidden)
            yield matrix(f"{at}.shortconv.out_proj", hidden, hidden)
            yield floats(f"{at}.shortconv.conv.weight", hidden, 3)
        else:
            values = VALUE_HEADS * STATE
            yield matrix(f"{at}.attn_qkv", 2 * KEY_HEADS * STATE + values, hidden, type=down)
            yield matrix(f"{at}.attn_gate", values, hidden)
            yield matrix(f"{at}.ssm_beta", VALUE_HEADS, hidden)
            yield matrix(f"{at}.ssm_alpha", VALUE_HEADS, hidden)
            yield matrix(f"{at}.ssm_out", hidden, values)
            yield floats(f"{at}.ssm_conv1d.weight", 2 * KEY_HEADS * STATE + values, TAPS)
            yield from (floats(f"{at}.{name}", VALUE_HEADS) for name in ("ssm_a", "ssm_dt.bias"))
            yield floats(f"{at}.ssm_norm.weight", STATE)
        if shape.arch == "gemma3":
            yield from (floats(f"{at}.{name}.weight", hidden) for name in ("post_attention_norm", "post_ffw_norm"))
        stack, suffix = ((shape.experts,), "_exps") if shape.experts else ((), "")
        types = {"gate": most, "up": most, "down": down}
        if kind == "mxfp4":
            types = dict.fromkeys(types, Type.MXFP4)
        for part, type in types.items():
            rows, columns = (hidden, shape.mlp) if part == "down" else (shape.mlp, hidden)
            yield matrix(f"{at}.ffn_{part}{suffix}", *stack, rows, columns, type=type)
            if shape.arch == "gpt-oss":
                yield floats(f"{at}.ffn_{part}_exps.bias", shape.experts, rows)
        if shape.experts:
            yield floats(f"{at}.ffn_gate_inp.weight", shape.experts, hidden)
        if shape.arch == "gpt-oss":
            yield floats(f"{at}.ffn_gate_inp.bias", shape.experts)


def _more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's use_more_bits."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def write_file(shape: Shape, kind: str, path: Path, name: str = "shape") -> None:
    """Write the file, one tensor after another; it has its name only when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, shape.arch)
    _add_metadata(writer, shape, kind, name)
    every = list(tensors(shape, kind))
    for tensor in every:
        dtype = np.dtype(np.float32 if tensor.type == Type.F32 else np.uint8)
        block, size = gguf.GGML_QUANT_SIZES[tensor.type]
        dims = tensor.dims if tensor.type == Type.F32 else (*tensor.dims[:-1], tensor.dims[-1] // block * size)
        writer.add_tensor_info(tensor.name, dims, dtype, tensor.nbytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    dice = np.random.default_rng(0)
    for tensor in every:
        writer.write_tensor_data(_floats(tensor, dice) if tensor.type == Type.F32 else _blocks(tensor, dice))
    writer.close()
    unfinished.rename(path)


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, kind: str, name: str) -> None:
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    kv_heads = [shape.kv_heads if layer in (shape.attending or ()) else 0 for layer in range(shape.layers)]
    writer.add_head_count_kv(kv_heads if shape.arch == "lfm2" else shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.theta)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.arch == "qwen35" else shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.top)
        writer.add_expert_feed_forward_length(shape.mlp)
    if shape.arch == "gemma3":
        writer.add_sliding_window(512)
    elif shape.arch == "lfm2":
        writer.add_shortconv_l_cache(3)
    elif shape.arch == "qwen35":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(TAPS)
        writer.add_ssm_inner_size(VALUE_HEADS * STATE)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(VALUE_HEADS)
        writer.add_ssm_group_count(KEY_HEADS)
    elif shape.arch == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    # GPT-2's letters for the 256 bytes, one merge, and names for the others: prompts are token ids. OpenVINO GenAI
    # needs special tokens.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = ["<unk>", "<s>", "</s>", *letters, "th"]
    unused = shape.vocab - len(tokens)
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.UNUSED] * unused
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"<unused_{i}>" for i in range(unused))])
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _floats(tensor: Tensor, dice: np.random.Generator) -> np.ndarray:
    """Norms about 1, decays below 0, everything else small."""
    values = dice.normal(0, 0.02, tensor.dims).astype(np.float32)
    if tensor.name.endswith("ssm_a"):
        return -np.abs(values)
    return values + 1 if tensor.name.endswith("_norm.weight") else values


def _blocks(tensor: Tensor, dice: np.random.Generator, deviation: float = 0.02) -> np.ndarray:
    """Random codes under constant scales, so that weights have about this deviation."""
    _, size = gguf.GGML_QUANT_SIZES[tensor.type]
    blocks = np.empty((tensor.nbytes // size, size), np.uint8)
    for first in range(0, len(blocks), CHUNK // size):
        part = blocks[first : first + CHUNK // size]
        part[:] = np.frombuffer(dice.bytes(part.size), np.uint8).reshape(part.shape)
    if tensor.type == Type.BF16:  # any sign and fraction, one exponent
        words = blocks.view(np.uint16)
        words &= 0x807F
        words |= 0x3C80
    elif tensor.type == Type.MXFP4:
        blocks[:, 0] = 127 - 8
    else:
        deviations = {Type.Q4_K: 31.5 * 4.6, Type.Q6_K: 18.5 * 64, Type.Q5_0: 9.2, Type.Q8_0: 74.0}
        scale = deviation / deviations[tensor.type]
        at = 208 if tensor.type == Type.Q6_K else 0
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        if tensor.type == Type.Q4_K:  # its least value, so that the mean is about 0
            blocks[:, 2:4] = np.frombuffer(np.float16(7.5 * scale).tobytes(), np.uint8)
    return blocks.reshape(*tensor.dims[:-1], -1)


def bytes_a_token(path: Path) -> int:
    """What decoding one token reads of a file's weights: of experts those that it uses, of an embedding one row."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    counts = [reader.fields.get(f"{arch}.{key}") for key in ("expert_used_count", "expert_count")]
    used, experts = (1, 1) if None in counts else (field.contents() for field in counts if field is not None)
    own_head = any(tensor.name == "output.weight" for tensor in reader.tensors)
    total = 0
    for tensor in reader.tensors:
        parts = experts // used if "_exps" in tensor.name else 1
        if tensor.name == "token_embd.weight" and own_head:
            parts = int(tensor.shape[1])
        total += tensor.n_bytes // parts
    return total
