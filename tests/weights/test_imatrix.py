"""llama.cpp's importance matrices, in both of its forms, and what they do on the way into an engine."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxllm.cli.convert.conversion import convert_model
from jaxllm.config import EngineConfig
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.registry import model_spec, with_importance
from jaxllm.quantization.gguf_encode import encode
from jaxllm.weights import open_checkpoint
from jaxllm.weights.gguf_file import read_imatrix
from tests.reference.tiny import tiny_weights, write_checkpoint
from tests.reference.tiny_gguf import write_gguf

Sums = dict[str, tuple[np.ndarray, np.ndarray]]
"""Sums of squares `[matrices, i]`, and how many tokens each is of."""


def write_dat(path: Path, sums: Sums, *, calls: int = 3) -> Path:
    """As `save_imatrix_legacy` of llama.cpp: means times the number of calls, then the text's name."""
    data = struct.pack("<i", len(sums))
    for name, (total, count) in sums.items():
        values = (total / count[:, None] * calls).astype("<f4").ravel()
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size) + values.tobytes()
    path.write_bytes(data + struct.pack("<ii", 10, 4) + b"text")
    return path


def write_gguf_form(path: Path, sums: Sums) -> Path:
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    for name, (total, count) in sums.items():
        writer.add_tensor(f"{name}.in_sum2", total.astype(np.float32))
        writer.add_tensor(f"{name}.counts", count.astype(np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FORMS = {"dat": write_dat, "gguf": write_gguf_form}


def random_sums(sizes: dict[str, int], matrices: int = 1) -> Sums:
    rng = np.random.default_rng(0)
    return {
        name: (np.exp(rng.normal(3, 2, (matrices, size))).astype(np.float32), np.full(matrices, 40))
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_means_of_squares_are_read(form, tmp_path):
    sums = random_sums({"blk.0.attn_q.weight": 96, "blk.1.ffn_down.weight": 64})
    found = read_imatrix(FORMS[form](tmp_path / "imatrix", sums))
    assert found.keys() == sums.keys()
    for name, (total, _) in sums.items():
        np.testing.assert_allclose(found[name], total[0] / 40, rtol=1e-6)


def test_experts_that_saw_no_token_count_alike(tmp_path):
    sums = {"blk.0.ffn_up_exps.weight": (np.array([[2.0, 4.0], [0.0, 0.0]]), np.array([2, 0]))}
    (found,) = read_imatrix(write_gguf_form(tmp_path / "m", sums)).values()
    np.testing.assert_array_equal(found, [[1, 2], [1, 1]])


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_is_refused(form, tmp_path):
    file = FORMS[form](tmp_path / "imatrix", random_sums({"blk.0.attn_q.weight": 96}))
    whole = file.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:6], b"", b"\x00" * 64, b"\xff" * 64):
        file.write_bytes(data)
        with pytest.raises(CheckpointError) as refused:
            read_imatrix(file)
        assert str(file) in str(refused.value) and "\n" not in str(refused.value)
    sums = {"blk.0.attn_q.weight": (np.full((1, 4), -1.0), np.ones(1))}
    with pytest.raises(CheckpointError, match="has numbers that are no mean squares"):
        read_imatrix(FORMS[form](file, sums))
    with pytest.raises(CheckpointError, match=r"imatrix .*nowhere: No such file"):
        read_imatrix(tmp_path / "nowhere")


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_weights_are_encoded_by_it_whatever_their_names(source, tmp_path):
    """An entry for one matrix: that one is what the encoder makes of it with its importance, others are as without."""
    folder = write_checkpoint("llama_gqa", tmp_path / "folder")
    path = folder if source == "folder" else write_gguf("llama_gqa", tmp_path / "m.gguf")
    values = tiny_weights("llama_gqa")["model.layers.1.mlp.down_proj.weight"]
    sums = random_sums({"blk.1.ffn_down.weight": values.shape[1]})
    imatrix = write_dat(tmp_path / "imatrix.dat", sums)
    saved = {}
    for name, given in (("without", None), ("with", imatrix)):
        config = EngineConfig(model=str(path), dtype="float32", skip_tokenizer_init=True, isq="q4_0", imatrix=given)
        convert_model(config, tmp_path / name, "orbax")
        saved[name] = open_checkpoint(tmp_path / name)
    changed = [n for n in saved["with"].tensors if not np.array_equal(*(s.read(n).data for s in saved.values()))]
    assert changed == ["layers.1.mlp.down.weight"]
    expected = encode(values, "Q4_0", sums["blk.1.ffn_down.weight"][0][0] / 40)
    np.testing.assert_array_equal(saved["with"].read(changed[0]).data, expected)


def test_experts_that_lie_stacked_take_theirs(tmp_path):
    path = write_gguf("mixtral", tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    count, _, inputs = checkpoint.tensors["blk.0.ffn_up_exps.weight"].shape
    imatrix = write_gguf_form(tmp_path / "imatrix", random_sums({"blk.0.ffn_up_exps.weight": inputs}, count))
    stored = with_importance(checkpoint, model_spec(checkpoint), imatrix).read("blk.0.ffn_up_exps.weight")
    assert stored.importance.shape == (count, inputs)


def test_what_does_not_fit_is_refused(tmp_path):
    path = write_gguf("llama_gqa", tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint)
    other = write_dat(tmp_path / "other.dat", random_sums({"blk.9.attn_q.weight": 64}))
    with pytest.raises(ConfigError, match="none of whose 1 entries is a weight of"):
        with_importance(checkpoint, spec, other)
    narrow = write_dat(tmp_path / "narrow.dat", random_sums({"blk.0.attn_q.weight": 8}))
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.attn_q\.weight': the imatrix has 8 values for it"):
        with_importance(checkpoint, spec, narrow).read("blk.0.attn_q.weight")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({}, "no weight is quantized to a kind it counts for"),
        ({"isq": "int8", "isq_map": {"*": "q8_0"}}, "no weight is quantized to a kind it counts for"),
        ({"isq": "q4_0", "load_format": "dummy"}, "weights are random"),
    ],
)
def test_it_is_never_ignored(fields, what, tmp_path):
    path = write_checkpoint("llama_gqa", tmp_path)
    config = EngineConfig(model=str(path), imatrix=tmp_path / "i.dat", **fields)
    with pytest.raises(
        ConfigError, match=f"imatrix is .*, but {what}; accepted with isq or isq_map of q4_0, q4_1, q5_0"
    ):
        plan_engine(config)
