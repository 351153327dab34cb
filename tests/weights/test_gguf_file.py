from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxllm.errors import CheckpointError
from jaxllm.quantization.schemes import coded_kind
from jaxllm.weights import open_checkpoint
from jaxllm.weights.checkpoint import TensorInfo
from jaxllm.weights.gguf_file import GGUFCheckpoint, read_header
from tests.reference.tiny_gguf import nvfp4
from tests.weights.models import real_model


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)


@pytest.fixture
def small(tmp_path, values):
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(0.5)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.0, 1.0])
    writer.add_array("general.languages", ["en", "de"])
    writer.add_array("rope.sections", [1, 2, 3])
    writer.add_tensor("plain", values)
    writer.add_tensor("half", values.astype(np.float16))
    writer.add_tensor("brain", values.astype(ml_dtypes.bfloat16).view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    for kind in ("Q4_0", "Q8_0"):
        packed = gguf.quants.quantize(values, GGMLQuantizationType[kind])
        writer.add_tensor(kind, packed, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sampling_gguf(path, **values):
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_the_sampling_that_a_file_recommends(tmp_path):
    given = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05, "penalty_last_n": 64}
    path = sampling_gguf(tmp_path / "x.gguf", **given, mirostat=0)
    recommended = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05, "repeat_last_n": 64,
    }  # fmt: skip
    assert open_checkpoint(path).generation_config == recommended
    (tmp_path / "x.generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": 5}')
    assert open_checkpoint(path).generation_config == recommended | {"temperature": 0.2, "eos_token_id": 5}


def test_a_recommended_value_that_cannot_be_used_is_refused(tmp_path):
    path = sampling_gguf(tmp_path / "x.gguf", top_p=7.0)
    with pytest.raises(CheckpointError, match=r"x\.gguf: general\.sampling\.top_p is 7\.0; accepted is a number from"):
        open_checkpoint(path)


def test_metadata_are_plain_values_without_the_vocabulary(small):
    config = open_checkpoint(small).config
    assert config["general.architecture"] == "llama"
    assert config["llama.block_count"] == 2 and type(config["llama.block_count"]) is int
    assert config["llama.attention.layer_norm_rms_epsilon"] == 0.5
    assert config["general.languages"] == ["en", "de"]
    assert config["rope.sections"] == [1, 2, 3]
    assert not any("tokenizer.ggml" in key for key in config)


def test_tensors_come_in_numpy_order_and_their_own_type(small, values):
    checkpoint = open_checkpoint(small)
    assert checkpoint.tensors["Q4_0"] == TensorInfo((6, 64), "Q4_0")
    np.testing.assert_array_equal(checkpoint.read("plain").expand(), values)
    np.testing.assert_array_equal(checkpoint.read("half").expand(), values.astype(np.float16), strict=True)
    np.testing.assert_array_equal(checkpoint.read("brain").expand(), values.astype(ml_dtypes.bfloat16), strict=True)
    np.testing.assert_allclose(checkpoint.read("Q8_0").expand(), values, atol=0.02)
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
        checkpoint.read("nope")
    kept = checkpoint.read("plain").expand()
    checkpoint.close()
    np.testing.assert_array_equal(kept, values)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("plain").expand()


def test_a_directory_with_one_gguf_opens_and_two_are_refused(small):
    assert open_checkpoint(small.parent).format == "gguf"
    (small.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"exactly one \.gguf file; it holds other.gguf, small.gguf"):
        open_checkpoint(small.parent)


def test_load_format_is_honoured(small):
    assert open_checkpoint(small, "dummy").config["llama.block_count"] == 2
    with pytest.raises(CheckpointError, match="load_format is 'safetensors'"):
        open_checkpoint(small, "safetensors")


def test_every_truncation_is_reported_in_one_line(small, tmp_path):
    data = small.read_bytes()
    short = tmp_path / "cut" / "short.gguf"
    short.parent.mkdir()
    for length in {0, 3, 4, 10, 24, 30, *range(40, len(data), 97), len(data) - 9}:
        short.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(short)
        assert str(short) in str(caught.value) and "\n" not in str(caught.value)


def test_random_damage_to_the_header_never_escapes_as_another_error(small, tmp_path):
    data = small.read_bytes()
    rng = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(200):
        copy = bytearray(data)
        copy[rng.integers(4, 500)] = rng.integers(256)
        damaged.write_bytes(copy)
        try:
            open_checkpoint(damaged)
        except CheckpointError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [(b"GGUF\x03", b"GGML\x03", "not a GGUF file"), (b"GGUF\x03", b"GGUF\x09", "GGUF version 9"),
     (b"plain" + b"\x02\0\0\0" + (64).to_bytes(8, "little") + (6).to_bytes(8, "little") + b"\0",
      b"plain" + b"\x02\0\0\0" + (64).to_bytes(8, "little") + (6).to_bytes(8, "little") + b"\xc8",
      "'plain' has unknown GGML type 200")],
)  # fmt: skip
def test_wrong_magic_version_and_type(small, old, new, message):
    data = small.read_bytes()
    assert data.count(old) == 1
    small.write_bytes(data.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(small)


def test_a_missing_file():
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(real_model("smollm2-135m").with_name("nope"))


def test_smollm2_reads_as_gguf_reads_it():
    path = real_model("smollm2-135m")
    checkpoint = open_checkpoint(path)
    oracle = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {name: info.dtype for name, info in checkpoint.tensors.items()} == {
        name: tensor.tensor_type.name for name, tensor in oracle.items()
    }
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.ffn_down.weight", "blk.29.attn_q.weight"):
        tensor = oracle[name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        np.testing.assert_array_equal(checkpoint.read(name).expand(), expected, strict=True)


def test_every_tensor_of_gemma3_is_finite_and_of_its_shape():
    checkpoint = open_checkpoint(real_model("gemma3-270m"))
    assert checkpoint.tensors["token_embd.weight"].shape == (262144, 640)
    for name, info in checkpoint.tensors.items():
        array = checkpoint.read(name).expand()
        assert array.shape == info.shape and np.isfinite(array).all(), name
        assert array.std() > 0, name


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    (tmp_path / "x.gguf").touch()
    with pytest.raises(CheckpointError, match=r"x\.gguf: the file is empty$"):
        read_header(tmp_path / "x.gguf")


NVFP4_SCALES = {
    "attn_q": ((32, 64), [1.5]),
    "attn_k": ((16, 128), None),
    "ffn_down_exps": ((4, 32, 128), [0.5, 2, 1, 3]),
}


def write_nvfp4(path: Path, scales: dict[str, Any] = NVFP4_SCALES) -> dict[str, np.ndarray]:
    """A file of such matrices with their scales, and what they stand for."""
    writer, expected = gguf.GGUFWriter(path, "llama"), {}
    for name, (shape, scale) in scales.items():
        values = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
        kind, stored = gguf.GGMLQuantizationType.NVFP4, nvfp4(values)
        writer.add_tensor(f"blk.0.{name}.weight", stored, raw_dtype=kind)
        writer.add_tensor(f"blk.0.{name}.input_scale", np.ones(1, np.float32))
        if scale is not None:
            writer.add_tensor(f"blk.0.{name}.scale", np.array(scale, np.float32))
        factor = np.reshape(scale or 1, (-1, 1, 1)) if len(shape) > 2 else (scale or [1])[0]
        expected[f"blk.0.{name}.weight"] = gguf.quants.dequantize(stored, kind).astype(np.float64) * factor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_nvfp4_is_multiplied_by_the_scale_beside_it(tmp_path):
    """One of the matrix, or of each expert; those of inputs are not used."""
    expected = write_nvfp4(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert set(checkpoint.tensors) == set(expected)
    for name, values in expected.items():
        stored = checkpoint.read(name)
        np.testing.assert_allclose(stored.expand(), values, rtol=2e-7)
        kind = coded_kind(checkpoint.tensors[name].coding, np.dtype(np.float32), values.shape[-2:-1], values.shape[-1])
        weight = kind.pack([stored], None)
        np.testing.assert_array_equal(jax.tree.map(jnp.asarray, weight).dequantize(), stored.expand())
        assert sum(array.nbytes for array in jax.tree.leaves(weight)) <= values.size * (4.5 / 8 + 4 / 64)


def test_a_scale_of_another_shape_is_refused(tmp_path):
    write_nvfp4(tmp_path / "m.gguf", {"attn_q": ((32, 64), [1.5, 2])})
    with pytest.raises(
        CheckpointError, match=r"attn_q\.scale' is F32 of shape \(2,\); accepted is F32 of shape \(1,\)"
    ):
        GGUFCheckpoint(tmp_path / "m.gguf")
