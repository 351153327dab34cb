"""Which kind a weight is kept as, where a checkpoint's tensor is not simply kept."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families.qwen_delta import tiled_gguf_names
from jaxllm.models.layers.recurrent import DeltaConfig
from jaxllm.models.names import GGUF_NAMES
from jaxllm.quantization.gguf_encode import encode
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.stored import Stored
from jaxllm.quantization.weight import DenseKind
from jaxllm.sharding.mesh import TENSOR, build_meshes, split_rows
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import ParamSpec, load_parameters
from jaxllm.weights.names import expand
from tests.quantization.blocks import gguf_dequantize

BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


class PackedCheckpoint(Checkpoint):
    """Blocks in memory, as a GGUF file would hold them."""

    format = "gguf"
    path = Path("packed.gguf")

    def __init__(self, arrays: dict[str, np.ndarray], dtype: str):
        self.config: dict = {}
        self.generation_config: dict = {}
        self.tensors = {name: TensorInfo(array.shape, dtype) for name, array in arrays.items()}
        self.blocks = {name: encode(array, dtype) for name, array in arrays.items()}

    def read(self, name: str) -> Stored:
        shape, dtype, _ = self.tensors[name]
        return Stored(self.blocks[name].reshape(-1), dtype, shape, packed=True)

    def close(self) -> None:
        pass


def test_what_is_transposed_on_the_way_is_encoded_anew_and_said():
    """Latent attention's keys lie transposed in the file, so that their blocks run across its rows."""
    rng = np.random.default_rng(0)
    heads, latent, nope, value = 3, 64, 32, 8
    arrays = {
        "blk.0.attn_k_b.weight": rng.normal(size=(heads, latent, nope)).astype(np.float32),
        "blk.0.attn_v_b.weight": rng.normal(size=(heads, value, latent)).astype(np.float32),
    }
    checkpoint, names, path = PackedCheckpoint(arrays, "Q4_0"), expand(GGUF_NAMES, 1), "layers.0.attention.kv_b.weight"
    layout = split_rows(heads * (nope + value), 1)
    declared = ParamSpec(path, (layout.rows, latent), FLOAT32, (TENSOR, None), layout, (DenseKind(FLOAT32),))
    kinds = KindChooser(checkpoint, names)
    chosen = kinds(declared)
    assert chosen == (GgufKind("Q8_0", FLOAT32),)
    assert kinds.notes == ["1 weights stored as Q4_0 are kept as Q8_0: quantized once more at load"]
    spec = ParamSpec(path, declared.shape, FLOAT32, declared.axes, layout, chosen)
    (weight,) = load_parameters(checkpoint, [spec], names, build_meshes(1)[0])
    k_b, v_b = (gguf_dequantize(checkpoint.blocks[name], "Q4_0") for name in arrays)
    expected = np.concatenate([k_b.swapaxes(1, 2), v_b], axis=1).reshape(-1, latent)
    np.testing.assert_allclose(jax.jit(lambda w: w.dequantize())(weight), expected, atol=0.02)

    # A GPU has it in 16-bit floats, which its kernels absorb: nothing is encoded anew, or expanded in a step.
    for_gpu = KindChooser(checkpoint, names, gpu_tiles=True)
    chosen = for_gpu(replace(declared, dtype=BFLOAT16, kinds=(DenseKind(BFLOAT16),)))
    assert chosen == (DenseKind(BFLOAT16),) and for_gpu.notes == []
    spec = ParamSpec(path, declared.shape, BFLOAT16, declared.axes, layout, chosen)
    (weight,) = load_parameters(checkpoint, [spec], names, build_meshes(1)[0])
    np.testing.assert_array_equal(weight.array, expected.astype(BFLOAT16))
    assert KindChooser(checkpoint, names, isq="q4k", packed=False, gpu_tiles=True)(spec) == (DenseKind(BFLOAT16),)


@pytest.mark.parametrize(("stored", "kept"), [("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_K", "Q8_0")])
@pytest.mark.parametrize("packed", [True, False])
def test_heads_whose_blocks_are_whole_are_moved_as_they_are(stored: str, kept: str, packed: bool):
    """Qwen3.5's value heads of 128 lie in turns: the first of each key head, then the second of each."""
    delta = DeltaConfig(key_heads=2, value_heads=4, key_dim=128, value_dim=128, kernel=4)
    config = DecoderConfig(
        vocab_size=8, hidden_size=6, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, norm_eps=1e-6,
        max_position_embeddings=8, layers=(LayerKind(None, mixer="delta"),), delta=delta,
    )  # fmt: skip
    matrix = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    checkpoint = PackedCheckpoint({"blk.0.ssm_out.weight": matrix}, stored)
    path, names = "layers.0.delta.output.weight", expand(tiled_gguf_names(config), 1)
    declared = ParamSpec(path, matrix.shape, FLOAT32, (None, TENSOR), None, (DenseKind(FLOAT32),))
    kinds = KindChooser(checkpoint, names, packed=packed)
    chosen = kinds(declared)
    assert chosen == ((GgufKind(kept, FLOAT32) if packed else DenseKind(FLOAT32)),)
    assert bool(kinds.notes) == (packed and stored != kept)
    (weight,) = load_parameters(checkpoint, [replace(declared, kinds=chosen)], names, build_meshes(1)[0])
    heads = gguf_dequantize(checkpoint.blocks["blk.0.ssm_out.weight"], stored).reshape(6, 4, 128)
    expected = heads[:, [0, 2, 1, 3]].reshape(6, 512)
    found = np.asarray(jax.jit(lambda w: w.dequantize())(weight))
    if kept == stored or not packed:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize("inputs", [256, 64, 20])
def test_a_scheme_whose_blocks_do_not_divide_gives_way(inputs):
    """Q4_K where rows are whole blocks of 256, Q5_1 where they are of 32, floats where they are neither."""
    checkpoint = PackedCheckpoint({}, "F32")
    spec = ParamSpec("layers.0.mlp.down.weight", (8, inputs), FLOAT32, (None, None), None, (DenseKind(FLOAT32),))
    (kind,) = KindChooser(checkpoint, {}, isq="q4k")(spec)
    assert kind == {256: GgufKind("Q4_K", FLOAT32), 64: GgufKind("Q5_1", FLOAT32), 20: DenseKind(FLOAT32)}[inputs]


@pytest.mark.parametrize(
    ("stored", "inputs", "kept"),
    [("Q5_0", 64, "Q5_0"), ("Q4_0", 64, "Q4_0"), ("Q8_0", 64, "Q5_1"), ("Q5_0", 256, "Q4_K"), ("Q5_1", 64, "Q5_1")],
)
def test_blocks_of_the_file_are_kept_before_others_that_stand_in(stored, inputs, kept):
    """They lose nothing and take no more."""
    weights = np.random.default_rng(0).normal(size=(8, inputs)).astype(np.float32)
    checkpoint = PackedCheckpoint({"blk.0.ffn_down.weight": weights}, stored)
    spec = ParamSpec("layers.0.mlp.down.weight", (8, inputs), FLOAT32, (None, None), None, (DenseKind(FLOAT32),))
    names = expand(GGUF_NAMES, 1)
    chosen = KindChooser(checkpoint, names, isq="q4k", packed=False)(spec)
    assert chosen == (GgufKind(kept, FLOAT32),)
    if kept == stored:
        (weight,) = load_parameters(checkpoint, [replace(spec, kinds=chosen)], names, build_meshes(1)[0])
        expected = gguf_dequantize(checkpoint.blocks["blk.0.ffn_down.weight"], stored)
        np.testing.assert_array_equal(weight.dequantize(), expected)


def test_a_scheme_fits_each_devices_part_of_the_inputs():
    spec = ParamSpec("layers.0.mlp.down.weight", (8, 512), FLOAT32, (None, TENSOR), None, (DenseKind(FLOAT32),))
    kinds = [KindChooser(PackedCheckpoint({}, "F32"), {}, tp=tp, isq="q6k")(spec) for tp in (2, 4)]
    assert kinds == [(GgufKind("Q6_K", FLOAT32),), (GgufKind("Q8_0", FLOAT32),)]


class LazyCheckpoint(Checkpoint):
    """Float matrices that are made when they are read."""

    format = "safetensors"
    path = Path("lazy")

    def __init__(self, count: int, shape: tuple[int, int]):
        self.config: dict = {}
        self.generation_config: dict = {}
        self.tensors = {f"w{i}": TensorInfo(shape, "F32") for i in range(count)}

    def read(self, name: str) -> Stored:
        shape, dtype, _ = self.tensors[name]
        return Stored(np.random.default_rng(0).standard_normal(shape, np.float32), dtype, shape)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("scheme", ["q8_0", "q4k", "int4", "fp8"])
def test_quantizing_while_loading_never_holds_the_float_model(scheme):
    count, shape = 32, (256, 512)
    checkpoint, plain = LazyCheckpoint(count, shape), (DenseKind(FLOAT32),)
    declared = [ParamSpec(name, shape, FLOAT32, (None, None), None, plain) for name in checkpoint.tensors]
    names = expand({name: name for name in checkpoint.tensors}, 1)
    chosen = KindChooser(checkpoint, names, isq=scheme)
    specs = [replace(spec, kinds=chosen(spec)) for spec in declared]
    mesh = build_meshes(1)[0]
    load_parameters(checkpoint, specs[:1], names, mesh, ignored=("w*",))  # compiles the encoder
    tracemalloc.start()
    loaded = load_parameters(checkpoint, specs, names, mesh)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tensor = 4 * shape[0] * shape[1]
    quantized = sum(array.nbytes for array in jax.tree.leaves(loaded))
    assert quantized < 0.3 * count * tensor
    assert peak < quantized + 16 * tensor  # two are read ahead, and encoders need a few times their size
