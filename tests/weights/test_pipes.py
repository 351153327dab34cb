"""Pipes in the place of a model's files: read, they would be waited for without end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jaxllm.errors import CheckpointError, ModelNotFoundError
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.weights import open_checkpoint
from jaxllm.weights.gguf_file import read_imatrix
from jaxllm.weights.source import resolve_model

pytestmark = pytest.mark.timeout(20)
IS_NONE = "is a pipe, a socket or a device; it must be a file"


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", "shard.safetensors", "config.json"])
def test_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    if name == "shard.safetensors":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: {IS_NONE}"):
        open_checkpoint(tmp_path, "safetensors")


@pytest.mark.parametrize("name", ["model.gguf", "tokenizer.json"])
def test_of_a_tokenizer(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: {IS_NONE}"):
        load_tokenizer(tmp_path)


def test_of_an_importance_matrix(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "i.dat")
    with pytest.raises(CheckpointError, match=IS_NONE):
        read_imatrix(tmp_path / "i.dat")


def test_in_the_place_of_the_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFoundError, match=IS_NONE):
        resolve_model(str(tmp_path / "m.gguf"))
