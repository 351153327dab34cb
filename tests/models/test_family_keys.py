"""Keys of config.json that one family has, or reads in a way of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.layers.attention import QueryScaling
from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights


def read(directory: Path, name: str, *absent: str, **changes: Any) -> DecoderConfig:
    config = {key: value for key, value in tiny_config(name).items() if key not in absent} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return model_spec(open_checkpoint(directory, "dummy")).config


def windows(config: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(4, [13, 13, 13, None]), (2, [13, None, 13, None]), ("LG", [13, None, 13, None]), ("L", [13, 13, 13, None])],
)
def test_exaone_says_its_windows_by_a_number_or_by_letters(pattern, expected, tmp_path):
    config = read(tmp_path, "exaone4", sliding_window_pattern=pattern)
    assert windows(config) == expected
    assert [layer.rope is None for layer in config.layers] == [window is None for window in expected]


def test_a_list_of_layers_comes_before_the_letters(tmp_path):
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = read(tmp_path, "exaone4", sliding_window_pattern="LLLG", layer_types=kinds)
    assert windows(config) == [None, 13, None, 13]


@pytest.mark.parametrize("pattern", ["", "LLXG", 0, True])
def test_other_patterns_of_windows_are_refused(pattern, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"sliding_window_pattern is .*; accepted is an integer .* L and G or null"
    ):
        read(tmp_path, "exaone4", sliding_window_pattern=pattern)


def test_olmo_3_scales_no_layer_with_a_window(tmp_path):
    config = read(tmp_path, "olmo3")
    assert [layer.rope.kind for layer in config.layers if layer.rope] == ["default", "default", "default", "yarn"]
    assert config.max_position_embeddings == 128, "the stated length is the scaled one"


def test_olmo_3_has_a_rope_for_each_kind_of_layer(tmp_path):
    flat = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}
    with pytest.raises(CheckpointError, match="accepted are entries full_attention and sliding_attention"):
        read(tmp_path, "olmo3", "rope_scaling", rope_parameters=flat)


def test_the_context_of_command_r_is_the_longer_one(tmp_path):
    assert read(tmp_path, "cohere", model_max_length=1000).max_position_embeddings == 1000
    assert read(tmp_path, "cohere", model_max_length=None).max_position_embeddings == 256


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [False, True, True]),
        ({"moe_layer_end_index": 1}, [False, True, False]),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 2}, [False, True, False]),
        ({"moe_layer_start_index": 2, "moe_layer_interval": 1}, [False, False, True]),
    ],
)
def test_which_layers_of_ernie_have_experts(changes, sparse, tmp_path):
    config = read(tmp_path, "ernie4_5_moe", **changes)
    assert [layer.sparse for layer in config.layers] == sparse


def test_ernie_has_no_biases_beside_experts(tmp_path):
    with pytest.raises(CheckpointError, match="use_bias is True; accepted is false in a model with experts"):
        read(tmp_path, "ernie4_5_moe", use_bias=True)


def test_kimi_k2_is_deepseek_v3_under_other_names(tmp_path):
    """By itself, and inside of a wrapper whose file names the text model as the hub's own code does."""
    plain = read(tmp_path, "deepseek_v3")
    assert read(tmp_path, "deepseek_v3", model_type="kimi_k2") == plain
    for kind in ("kimi_k2", "deepseek_v3"):
        text = tiny_config("deepseek_v3") | {"model_type": kind}
        wrapper = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(wrapper | {"tie_word_embeddings": False}))
        assert model_spec(open_checkpoint(tmp_path, "dummy")).config == plain


def test_the_language_model_of_kimi_k25_is_read_out_of_its_checkpoint(tmp_path):
    weights = {f"language_model.{name}": tensor for name, tensor in tiny_weights("deepseek_v3").items()}
    weights |= {"vision_tower.patch_embed.proj.weight": np.ones((2, 2), np.float32)}
    weights |= {"mm_projector.proj.0.weight": np.ones((2, 2), np.float32)}
    text = tiny_config("deepseek_v3") | {"model_type": "kimi_k2"}
    wrapper = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    save_checkpoint(wrapper | {"tie_word_embeddings": False}, weights, tmp_path)
    golden = load_golden("deepseek_v3")
    ids = golden.prompt_token_ids
    (logits,) = Harness(tmp_path).run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden.logits).max() <= 1e-4


@pytest.mark.parametrize("beta", [0.0, None])
def test_mistral_4_without_query_scaling(beta, tmp_path):
    ropes = tiny_config("mistral4")["rope_parameters"]
    assert read(tmp_path, "mistral4").query_scaling == QueryScaling(0.1, 32)
    assert read(tmp_path, "mistral4", rope_parameters=ropes | {"llama_4_scaling_beta": beta}).query_scaling is None


def test_ernies_module_for_further_tokens_is_left_out(tmp_path):
    weights = tiny_weights("ernie4_5_moe")
    for name in ("mtp_block.0.input_layernorm", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"):
        weights[f"model.{name}.weight"] = np.ones(72, np.float32)
    save_checkpoint(tiny_config("ernie4_5_moe"), weights, tmp_path)
    golden = load_golden("ernie4_5_moe")
    ids = golden.prompt_token_ids
    (logits,) = Harness(tmp_path).run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden.logits).max() <= 1e-4


def test_alpha_stretches_the_base_whatever_the_length(tmp_path):
    plain = read(tmp_path, "hunyuan", "rope_scaling").layers[0].rope
    rope = read(tmp_path, "hunyuan").layers[0].rope
    assert plain is not None and rope is not None
    assert rope.theta == pytest.approx(plain.theta * 1000 ** (20 / 18))
    assert not rope.depends_on_length
