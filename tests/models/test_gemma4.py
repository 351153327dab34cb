"""What Gemma 4's config.json files say of single layers, and tensors that its checkpoints have too many of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights
from tests.reference.tiny_gguf import GGUF_MODELS, write_gguf


def read(directory: Path, name: str, *absent: str, **changes: Any) -> DecoderConfig:
    config = {key: value for key, value in tiny_config(name).items() if key not in absent} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return model_spec(open_checkpoint(directory, "dummy")).config


def test_the_last_layers_attend_to_the_last_of_their_kind_before_them(tmp_path: Path) -> None:
    layers = read(tmp_path, "gemma4").layers
    assert [layer.shares_kv_of for layer in layers] == [None, None, None, 2, 1]
    assert [layer.intermediate_size for layer in layers] == [48, 48, 48, 96, 96]
    assert [layer.head_dim for layer in layers] == [16, 24, 16, 16, 24]


@pytest.mark.parametrize(("name", "full"), [("gemma4", {"head_dim": 24}), ("gemma4_moe", {"num_key_value_heads": 2})])
def test_newer_files_list_what_single_layers_have(name: str, full: dict[str, int], tmp_path: Path) -> None:
    old = read(tmp_path, name)
    full = {"head_dim": 24} | full
    listed = {str(index): full for index, layer in enumerate(old.layers) if layer.window is None}
    assert read(tmp_path, name, "global_head_dim", "num_global_key_value_heads", per_layer_config=listed) == old


def test_the_last_layer_has_no_window_whatever_the_file_says(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", *["sliding_attention"] * 3]
    assert read(tmp_path, "gemma4", layer_types=kinds) == read(tmp_path, "gemma4")


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (
            "gemma4",
            {"per_layer_config": {"5": {"head_dim": 8}}},
            "per_layer_config.'5' is .*accepted is, for a layer's",
        ),
        ("gemma4", {"per_layer_config": {"x": {}}}, "per_layer_config.'x' is {}; accepted is"),
        (
            "gemma4",
            {"per_layer_config": {"1": {"sliding_window": 8}}},
            "an object with head_dim and num_key_value_heads and inter",
        ),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5; accepted are fewer than 5 layers"),
        (
            "gemma4",
            {"num_kv_shared_layers": 4},
            "the last 4 layers share keys and values, but .* has no window, as some",
        ),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters.full_attention.rope_type is 'yarn'; accepted are default and proportional",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; accepted is null or"),
        ("gemma4_moe", {"top_k_experts": None}, "enable_moe_block is true, but top_k_experts is null"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path, name, **changes)


def test_tensors_that_layers_do_not_use_are_passed_over(tmp_path: Path) -> None:
    """Published files have keys and values of layers that share those of others, and what makes vectors of sounds."""
    weights = tiny_weights("gemma4")
    for index, dim in ((3, 16), (4, 24)):
        for part in ("k_proj", "v_proj"):
            weights[f"model.layers.{index}.self_attn.{part}.weight"] = np.ones((dim, 56), np.float32)
        weights[f"model.layers.{index}.self_attn.k_norm.weight"] = np.ones(dim, np.float32)
    weights = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    for name in ("audio_tower.layers.0.linear", "embed_audio.embedding_projection", "vision_embedder.patch_dense"):
        weights[f"model.{name}.weight"] = np.ones((2, 2), np.float32)
    wrapper = {"model_type": "gemma4", "text_config": tiny_config("gemma4")}
    model = Harness(save_checkpoint(wrapper, weights, tmp_path))
    golden = load_golden("gemma4")
    ids = golden.prompt_token_ids
    (logits,) = model.run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden.logits).max() <= 1e-4


def test_rotary_factors_of_a_gguf_file_are_one_or_huge(tmp_path: Path) -> None:
    path = write_gguf("gemma4", tmp_path / "model.gguf")
    data = path.read_bytes()
    ones = np.array([1.0] * 6 + [1e30] * 6, np.float32).tobytes()
    assert data.count(ones) == 1
    path.write_bytes(data.replace(ones, np.array([2.0] * 6 + [1e30] * 6, np.float32).tobytes()))
    with pytest.raises(CheckpointError, match=r"'rope_freqs.weight' has factors that are neither 1 nor huge"):
        model_spec(open_checkpoint(path))


@pytest.mark.parametrize(("stated", "cap"), [({}, 30.0), ({"final_logit_softcapping": 20.0}, 20.0)])
def test_a_gguf_file_that_states_no_cap_has_llama_cpps(
    stated: dict[str, Any], cap: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GGUF_MODELS, "gemma4_moe", stated)
    path = write_gguf("gemma4_moe", tmp_path / "model.gguf")
    assert model_spec(open_checkpoint(path)).config.logit_softcap == cap
