"""Folders that PEFT saved: what is read of them, and what is refused by its name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.weights.adapters import open_adapter
from tests.reference.peft_adapters import ADAPTERS, adapter_tensors, load_adapter_golden, save_adapter, write_adapter

Q = "model.layers.0.self_attn.q_proj"
STORED = f"base_model.model.{Q}"


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_tensor_has_a_place(name: str, tmp_path: Path) -> None:
    adapter, stored = open_adapter(write_adapter(name, tmp_path)), load_adapter_golden(name).tensor_shapes
    parts = sum(2 + (update.magnitude is not None) for update in adapter.updates.values())
    unchanged = sum(tensor.endswith(".base_layer.weight") for tensor in stored)
    assert (adapter.format, parts + len(adapter.replaced) + unchanged) == ("peft", len(stored))
    assert adapter.base_model == ADAPTERS[name].base
    assert adapter.rank == max(update.a.shape[0] for update in adapter.updates.values())


def test_what_is_added_is_the_product_of_the_matrices_times_alpha_over_r(tmp_path: Path) -> None:
    adapter, stored = open_adapter(write_adapter("plain", tmp_path)), adapter_tensors("plain")
    a, b = (stored[f"{STORED}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    weight = np.random.default_rng(0).standard_normal((b.shape[0], a.shape[1])).astype(np.float32)
    update = adapter.updates[f"{Q}.weight"]
    assert update.shape == weight.shape
    np.testing.assert_allclose(update.added_to(weight), weight + 8 / 4 * b @ a, atol=1e-5)
    np.testing.assert_allclose(update.added_to(weight, 0.5), weight + 4 / 4 * b @ a, atol=1e-5)


def test_dora_scales_rows_to_their_magnitude(tmp_path: Path) -> None:
    update = open_adapter(write_adapter("dora", tmp_path)).updates[f"{Q}.weight"]
    weight = np.random.default_rng(0).standard_normal(update.shape).astype(np.float32)
    assert update.magnitude is not None
    np.testing.assert_allclose(np.linalg.norm(update.added_to(weight), axis=1), update.magnitude, rtol=1e-5)


def test_ranks_and_scales_are_those_of_the_patterns(tmp_path: Path) -> None:
    updates = open_adapter(write_adapter("patterns", tmp_path)).updates
    found = {name: (len(update.a), update.scale) for name, update in updates.items() if ".layers.1." in name}
    layer = "model.layers.1"
    assert found == {
        f"{layer}.self_attn.q_proj.weight": (2, 8 / 2),
        f"{layer}.self_attn.k_proj.weight": (4, 3 / 4),
        f"{layer}.self_attn.v_proj.weight": (4, 8 / 4),
        f"{layer}.self_attn.o_proj.weight": (4, 8 / 4),
        f"{layer}.mlp.gate_proj.weight": (4, 8 / 4),
        f"{layer}.mlp.up_proj.weight": (6, 8 / 6),
        f"{layer}.mlp.down_proj.weight": (4, 20 / 4),
    }


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    adapter = open_adapter(write_adapter("all_linear_rslora", tmp_path))
    assert {update.scale for update in adapter.updates.values()} == {8 / math.sqrt(4)}


@pytest.mark.parametrize(
    ("name", "replaced"),
    [
        ("head", {"lm_head.weight"}),
        ("embedding_and_head", set()),  # what it holds of both are the model's own
        ("qwen2_biases", {f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(3) for p in "qkv"}),
    ],
)
def test_whole_tensors_have_the_names_of_the_models(name: str, replaced: set[str], tmp_path: Path) -> None:
    assert open_adapter(write_adapter(name, tmp_path)).replaced.keys() == replaced


def test_a_language_model_among_others_is_named_as_if_it_were_alone(tmp_path: Path) -> None:
    updates = open_adapter(write_adapter("gemma3_conditional", tmp_path)).updates
    assert f"{Q}.weight" in updates
    assert all(name.startswith("model.layers.") for name in updates)


@pytest.mark.parametrize("name", ["gpt2", "tied_embedding"])
def test_matrices_that_are_stored_inputs_first_are_told(name: str, tmp_path: Path) -> None:
    flipped = {key for key, update in open_adapter(write_adapter(name, tmp_path)).updates.items() if update.transposed}
    assert flipped
    assert all(".c_" in key or "embed_tokens" in key for key in flipped)


def plain(**changes: Any) -> dict[str, Any]:
    return load_adapter_golden("plain").settings | changes


@pytest.mark.parametrize("name", [".default", ".sql"])
def test_older_files_have_the_adapters_name_in_those_of_tensors(name: str, tmp_path: Path) -> None:
    tensors = adapter_tensors("dora")
    older = {
        key.replace(".weight", f"{name}.weight") if key.endswith(".weight") else f"{key}{name}": value
        for key, value in tensors.items()
    }
    settings = load_adapter_golden("dora").settings
    found = open_adapter(save_adapter(settings, older, tmp_path / "older"))
    expected = open_adapter(save_adapter(settings, tensors, tmp_path / "newer"))
    assert found.updates.keys() == expected.updates.keys()
    for key, update in found.updates.items():
        np.testing.assert_array_equal(update.b, expected.updates[key].b)


def test_numbers_stay_in_their_type_and_outlive_the_file(tmp_path: Path) -> None:
    tensors = {key: value.astype(ml_dtypes.bfloat16) for key, value in adapter_tensors("plain").items()}
    adapter = open_adapter(save_adapter(plain(), tensors, tmp_path))
    with open(tmp_path / "adapter_model.safetensors", "r+b") as file:
        file.write(bytes(file.seek(0, 2)))
    update = adapter.updates[f"{Q}.weight"]
    assert update.a.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(update.a, tensors[f"{STORED}.lora_A.weight"])


MERGE = "merge it into its base model"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; accepted is 'LORA'"),
        ({"r": 0}, "r is 0; accepted is an integer from 1"),
        ({"r": 8}, r"are \(4, 64\) and \(128, 4\); accepted are \(8, inputs\) and \(outputs, 8\)"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; accepted is a number"),
        ({"bias": "some"}, "bias is 'some'; accepted is one of none, all, lora_only"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern is .*; accepted is an object whose values are an integer"),
        ({"rank_pattern": {"q_proj(": 4}}, r"'q_proj\(' is no regular expression"),
        ({"target_modules": "(.*"}, r"'\(\.\*' is no regular expression"),
        ({"target_modules": ["v_proj"]}, "has matrices of '.*q_proj', which target_modules does not name"),
        ({"exclude_modules": ["q_proj"]}, "has matrices of '.*q_proj', but exclude_modules is"),
        ({"layers_to_transform": [1]}, "has matrices of '.*layers.0.*', but layers_to_transform is"),
        ({"use_dora": True}, "lora_magnitude_vector of '.*' is missing, but use_dora is true"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true, but no layer is one of GPT-2's"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4': .*path_initial_model"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"target_parameters": ["mlp.experts.up_proj"]}, f"target_parameters is .*{MERGE}"),
        ({"trainable_token_indices": [1, 2]}, f"trainable_token_indices is .*{MERGE}"),
        ({"lora_bias": True}, f"lora_bias is True: .*{MERGE}"),
        ({"layer_replication": [[0, 4]]}, "layer_replication is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"use_new_thing": True}, "'use_new_thing' is True, a setting that is not known here"),
    ],
)
def test_what_the_settings_ask_for_is_honoured_or_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = save_adapter(plain(**changes), adapter_tensors("plain"), tmp_path)
    with pytest.raises(CheckpointError, match=said) as error:
        open_adapter(folder)
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


def test_settings_of_the_future_that_say_nothing_are_no_hindrance(tmp_path: Path) -> None:
    settings = plain(use_new_thing=False, new_config=None, init_lora_weights="eva", peft_version="9.9")
    assert open_adapter(save_adapter(settings, adapter_tensors("plain"), tmp_path)).updates


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(f"{STORED}.lora_B.weight"), f"lora_B of '{Q}' is missing"),
        (lambda t: t.update({f"{STORED}.lora_B.bias": np.zeros(64)}), "a bias beside B is not supported"),
        (lambda t: t.update({f"{STORED}.lora_magnitude_vector": np.ones(64)}), "is there, but use_dora is false"),
        (lambda t: t.update({f"{STORED}.lora_A.other.weight": np.zeros((4, 64))}), "under the names of two adapters"),
        (lambda t: t.update({f"{STORED}.lora_C.weight": np.zeros(4)}), "lora_C.weight' is not known; accepted are"),
        (lambda t: t.update({f"{STORED}.lora_A.weight": np.zeros((4, 64), np.int32)}), "int32; accepted are floats"),
        (lambda t: t.update({f"{STORED}.lora_A.weight": np.zeros((4, 64, 3))}), r"are \(4, 64, 3\) and"),
        (lambda t: t.update({"model.layers.0.mlp.experts.lora_A.weight": np.zeros((4, 4))}), "stored as one stack"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)  # fmt: skip
def test_tensors_are_whole_and_known(edit: Any, said: str, tmp_path: Path) -> None:
    tensors = adapter_tensors("plain")
    edit(tensors)
    with pytest.raises(CheckpointError, match=said):
        open_adapter(save_adapter(plain(), tensors, tmp_path))


def test_a_folder_without_an_adapter_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist; an adapter is a folder with adapter_config\.json"):
        open_adapter(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no adapter_config\.json"):
        open_adapter(tmp_path)
    folder = write_adapter("plain", tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no adapter_model\.safetensors"):
        open_adapter(folder)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        CheckpointError, match=r"adapter_model\.bin: pickle files can run code.*safe_serialization=True"
    ):
        open_adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        open_adapter(folder)
