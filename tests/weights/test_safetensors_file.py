import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.errors import CheckpointError
from jaxllm.weights import open_checkpoint
from jaxllm.weights.checkpoint import TensorInfo
from tests.reference.tiny import write_checkpoint


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(3, 4)).astype(np.float32)
    return {
        "f32": wide, "f16": wide.astype(np.float16), "bf16": wide.astype(ml_dtypes.bfloat16),
        "i32": rng.integers(-9, 9, (5,), dtype=np.int32), "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }  # fmt: skip


@pytest.fixture
def single(tmp_path, arrays):
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return tmp_path


@pytest.fixture
def sharded(single, arrays):
    (single / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((["f32", "f16"], ["bf16", "i32", "scalar", "empty"]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: arrays[name] for name in names}, single / file)
        weight_map |= dict.fromkeys(names, file)
    (single / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return single


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_reads_what_safetensors_wrote(layout, arrays, request):
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    assert checkpoint.format == "safetensors"
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.tensors["bf16"] == TensorInfo((3, 4), "BF16")
    assert set(checkpoint.tensors) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.read(name).expand(), array, strict=True)
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("f32").expand()


def test_fp8_is_read(tmp_path):
    values = np.array([[0.5, -1.0], [2.0, 448.0]], ml_dtypes.float8_e4m3fn)
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    (tmp_path / "config.json").write_text("{}")
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("w").expand(), values, strict=True)


def test_truncated_weights(single):
    file = single / "model.safetensors"
    data = file.read_bytes()
    for length in (0, 5, 8, 60, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            open_checkpoint(single)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "corrupt safetensors header"),
        (b"[1]", "corrupt safetensors header"),
        (b'{"w": {"dtype": "F32"}}', "corrupt safetensors header"),
        (b'{"w": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}', "dtype is 'F3'"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "are no F32 of shape"),
        (b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', r"shape is \[-1\]"),
    ],
)
def test_garbage_headers(tmp_path, header, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names shard model-00002-of-00002.safetensors, which is missing"):
        open_checkpoint(sharded)


def test_an_index_that_names_one_tensor_too_many_is_read(sharded):
    index = sharded / "model.safetensors.index.json"
    stated = json.loads(index.read_text())
    tensors = open_checkpoint(sharded).tensors
    stated["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(stated))
    assert open_checkpoint(sharded).tensors == tensors
    index.write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="weight_map is missing"):
        open_checkpoint(sharded)


def test_a_stale_index_beside_a_whole_file_is_left_alone(tmp_path):
    path = write_checkpoint("llama_gqa", tmp_path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"gone": "model-00001-of-00002.safetensors"}}')
    assert "gone" not in open_checkpoint(path).tensors


def test_a_name_in_the_metadata_is_another_of_the_tensor(tmp_path):
    """safetensors' own save_model writes one of two tensors that share their memory."""
    (tmp_path / "config.json").write_text("{}")
    stored = {"model.embed_tokens.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    metadata = {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"}
    save_file(stored, tmp_path / "model.safetensors", metadata=metadata)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight").data, stored["model.embed_tokens.weight"])


def test_dummy_needs_only_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert open_checkpoint(tmp_path, "dummy").tensors == {}
    for load_format in ("auto", "safetensors"):
        with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
            open_checkpoint(tmp_path, load_format)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        open_checkpoint(tmp_path, "dummy")


def test_an_empty_directory(tmp_path):
    with pytest.raises(CheckpointError, match="it holds none"):
        open_checkpoint(tmp_path)
