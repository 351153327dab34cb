"""model.safetensors and its index: opened, and every tensor read."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.errors import CheckpointError
from jaxllm.weights import open_checkpoint
from tests.fuzz.harness import COUNTS, check_message, fuzz
from tests.fuzz.mutants import json_bytes, mutate_bytes, mutate_json, pick

INDEX = "model.safetensors.index.json"


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "wide": rng.normal(size=(3, 4)).astype(np.float32), "half": rng.normal(size=(2, 3, 2)).astype(np.float16),
        "whole": rng.integers(-9, 9, 5, dtype=np.int32), "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }  # fmt: skip


def split(data: bytes) -> tuple[dict, bytes]:
    """A safetensors file's header and what follows it."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: bytes, rest: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + rest


def read_all(checkpoint) -> None:
    """Every tensor is what its entry says, and is backed by the file's bytes or no more than four times as many."""
    stored = sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
    total = 0
    for name, info in checkpoint.tensors.items():
        array = checkpoint.read(name).expand()
        assert array.shape == info.shape
        total += array.nbytes
    assert total <= 4 * stored


@COUNTS
def test_a_safetensors_file_is_read_or_refused(count, tmp_path, arrays):
    file = tmp_path / "model.safetensors"
    save_file(arrays, file, metadata={"format": "np"})
    (tmp_path / "config.json").write_text("{}")
    valid = file.read_bytes()
    header, rest = split(valid)

    def attempt(rng: np.random.Generator) -> None:
        match rng.choice(["header", "header", "bytes", "length", "header of bytes"]):
            case "header":
                data = joined(json_bytes(rng, mutate_json(rng, header)), rest)
            case "bytes":
                data = mutate_bytes(rng, valid)
            case "length":
                data = joined(json.dumps(header).encode(), rest, pick(rng, 0, 1, 2**31, 2**60, 2**63 - 1))
            case _:
                data = joined(mutate_bytes(rng, json.dumps(header).encode()), rest)
        file.write_bytes(data)
        checkpoint = open_checkpoint(tmp_path)
        read_all(checkpoint)
        checkpoint.close()

    refused = fuzz(count, attempt)
    assert count / 4 < refused < count


@COUNTS
def test_fp8_with_scales_is_read_or_refused(count, tmp_path):
    file = tmp_path / "model.safetensors"
    scales = np.ones((3, 2), np.float32).tobytes()
    header = {
        "w": {"dtype": "F8_E4M3", "shape": [5, 4], "data_offsets": [0, 20]},
        "w_scale_inv": {"dtype": "F32", "shape": [3, 2], "data_offsets": [20, 44]},
    }
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}

    def attempt(rng: np.random.Generator) -> None:
        of_config = bool(rng.integers(2))
        (tmp_path / "config.json").write_bytes(json_bytes(rng, mutate_json(rng, config) if of_config else config))
        data = json_bytes(rng, header if of_config else mutate_json(rng, header))
        file.write_bytes(joined(data, bytes(20) + scales))
        checkpoint = open_checkpoint(tmp_path)
        for name in checkpoint.tensors:
            checkpoint.read(name).expand()
        checkpoint.close()

    assert 0 < fuzz(count, attempt) < count


@COUNTS
def test_an_index_is_followed_or_refused(count, tmp_path, arrays):
    (tmp_path / "config.json").write_text("{}")
    weight_map = {}
    for number, names in enumerate((["wide", "half"], ["whole", "scalar", "empty"]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: arrays[name] for name in names}, tmp_path / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 100}, "weight_map": weight_map}

    def attempt(rng: np.random.Generator) -> None:
        (tmp_path / INDEX).write_bytes(json_bytes(rng, mutate_json(rng, index)))
        checkpoint = open_checkpoint(tmp_path)
        read_all(checkpoint)
        checkpoint.close()

    assert 0 < fuzz(count, attempt) < count


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "x" * 5000])
def test_an_index_that_points_elsewhere(name, tmp_path, arrays):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(arrays, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(arrays, name)}))
    with pytest.raises(CheckpointError, match="accepted are names of files beside it") as caught:
        open_checkpoint(folder)
    check_message(str(caught.value))


def entries(**fields):
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | fields}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (entries() | {"b": entries()["a"]}, "tensors 'a' and 'b' share bytes"),
        (entries(shape=[2**60]), "shape is [1152921504606846976]"),
        (entries(shape=[0, 2**40, 2**40], data_offsets=[0, 0]), "0 bytes are no F32 of shape"),
        (entries(shape=[1] * 65), "a list of up to 8 entries"),
        (entries(shape=[True, 4]), "shape is [True, 4]"),
        (entries(dtype=["F32"]), "dtype is ['F32']; accepted is one of F64, F32"),
        (entries(data_offsets=[0, 2**60]), "data_offsets is [0, 1152921504606846976]"),
        (entries(data_offsets=[16]), "data_offsets is [16]; accepted is a list of 2 entries"),
        ({"a": 5}, "tensor 'a'"),
        ({"a\nb": 5}, r"tensor 'a\nb'"),
    ],
)
def test_lies_of_a_header(header, says, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(joined(json.dumps(header).encode(), bytes(16)))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    check_message(str(caught.value))
    assert says in str(caught.value)


# Links and pickles


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_refused_and_one_within_is_followed(name, tmp_path, arrays):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    save_file(arrays, folder / "model.safetensors")
    (folder / "..data").mkdir()  # as Kubernetes mounts files
    shutil.move(folder / name, folder / "..data" / name)
    (folder / name).symlink_to(f"..data/{name}")
    open_checkpoint(folder).close()
    shutil.move(folder / "..data" / name, tmp_path / name)
    (folder / name).unlink()
    (folder / name).symlink_to(f"../{name}")
    with pytest.raises(CheckpointError, match=f"'{name}' leads out of the model's folder"):
        open_checkpoint(folder)


def test_the_hubs_cache_is_read_through_its_links(tmp_path, arrays):
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs" / "c0").write_text('{"model_type": "llama"}')
    save_file(arrays, repository / "blobs" / "f1")
    (snapshot / "config.json").symlink_to("../../blobs/c0")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f1")
    checkpoint = open_checkpoint(snapshot)
    np.testing.assert_array_equal(checkpoint.read("wide").expand(), arrays["wide"])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_a_folder_of_pickles_is_refused_by_name(name, tmp_path):
    says = f"{name}: pickle files can run code and are not read; convert it to safetensors"
    (tmp_path / name).write_bytes(b"\x80\x02.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=says):
            open_checkpoint(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)
