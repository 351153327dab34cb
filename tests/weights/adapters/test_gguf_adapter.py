"""GGUF adapter files: what is read of them, and what is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.weights.adapters import open_adapter
from tests.reference.gguf_adapters import Tensors, gguf_adapter_tensors, write_gguf_adapter
from tests.reference.peft_adapters import write_adapter

V = "blk.0.attn_v.weight"


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    return gguf_adapter_tensors("plain", write_adapter("plain", tmp_path / "peft"))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0"])
def test_matrices_of_every_type_are_read(dtype: str, tensors: Tensors, tmp_path: Path) -> None:
    adapter = open_adapter(write_gguf_adapter(tmp_path / "a.gguf", tensors, dtype=dtype))
    update = adapter.updates[V]
    assert (adapter.format, adapter.rank, len(adapter.updates)) == ("gguf", 4, 6)
    np.testing.assert_allclose(update.a.astype(np.float32), tensors[f"{V}.lora_a"], atol=0.01)
    assert (update.scale, update.transposed) == (8 / 4, False)


def test_an_alpha_of_zero_adds_the_product_as_it_is(tensors: Tensors, tmp_path: Path) -> None:
    file = write_gguf_adapter(tmp_path / "a.gguf", tensors, keys={"adapter.lora.alpha": 0.0})
    assert open_adapter(file).updates[V].scale == 1


def test_norms_take_the_place_of_the_models(tensors: Tensors, tmp_path: Path) -> None:
    norm = np.arange(64, dtype=np.float32)
    adapter = open_adapter(write_gguf_adapter(tmp_path / "a.gguf", tensors | {"blk.0.attn_norm.weight": norm}))
    assert adapter.replaced.keys() == {"blk.0.attn_norm.weight"}
    np.testing.assert_array_equal(adapter.replaced["blk.0.attn_norm.weight"], norm)


@pytest.mark.parametrize(
    ("keys", "more", "said"),
    [
        ({"general.type": "model"}, {}, "general.type is 'model'; accepted is 'adapter'"),
        ({"adapter.type": None}, {}, "adapter.type is None; accepted is 'lora'"),
        ({"adapter.lora.alpha": "8"}, {}, "adapter.lora.alpha is '8'; accepted is a number"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, {}, "adapter.alora.invocation_tokens is set"),
        ({}, {"blk.1.ffn_up.weight.lora_a": np.zeros((4, 64))}, "'blk.1.ffn_up.weight.lora_b' is missing"),
        ({}, {"blk.1.ffn_up.weight.lora_b": np.zeros((64, 4))}, "'blk.1.ffn_up.weight.lora_a' is missing"),
        ({}, {f"{V}.lora_b": np.zeros((32, 5))}, r"are \(4, 64\) and \(32, 5\); accepted are \(rank, inputs\)"),
        ({}, {"blk.1.ffn_up.weight": np.zeros((64, 4))}, "'blk.1.ffn_up.weight' is not known; accepted are NAME"),
    ],
)  # fmt: skip
def test_files_are_whole_and_known(keys: Any, more: Tensors, said: str, tensors: Tensors, tmp_path: Path) -> None:
    file = write_gguf_adapter(tmp_path / "a.gguf", tensors | more, keys=keys)
    with pytest.raises(CheckpointError, match=said) as error:
        open_adapter(file)
    assert str(error.value).startswith(str(file))


def test_other_files_are_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not a file of this kind")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_adapter(tmp_path / "a.gguf")
    (tmp_path / "a.pt").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="pickle files can run code"):
        open_adapter(tmp_path / "a.pt")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CheckpointError, match="is a file; an adapter is a folder"):
        open_adapter(tmp_path / "a.txt")
