"""Keys of config.json that one family has, or reads in a way of its own."""

from __future__ import annotations

import json
import math
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
from tests.reference.tiny_gguf import GGUF_MODELS, write_gguf


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


@pytest.mark.parametrize("pattern", ["", "LLXG", -1, True])
def test_other_patterns_of_windows_are_refused(pattern, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"sliding_window_pattern is .*; accepted is an integer .* L and G or null"
    ):
        read(tmp_path, "exaone4", sliding_window_pattern=pattern)


def test_exaone_without_a_window_as_transformers_saves_it_again(tmp_path):
    kinds = ["full_attention"] * 4
    config = read(tmp_path, "exaone4", sliding_window=None, sliding_window_pattern=0, layer_types=kinds)
    assert windows(config) == [None] * 4


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "modernbert", "nomic_bert", "gpt2", "gpt_neox"])
def test_families_without_groups_of_heads_ignore_keys_about_them(name, tmp_path):
    """As transformers does, whose classes of these families have no such attribute."""
    assert read(tmp_path, name, num_key_value_heads=1, head_dim=1024) == read(tmp_path, name)


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


def test_hunyuans_numbers_may_be_lists(tmp_path):
    plain = read(tmp_path, "hunyuan_moe")
    assert read(tmp_path, "hunyuan_moe", moe_topk=[3, 3], num_experts=[8, 8], moe_intermediate_size=[48, 48]) == plain
    for changes, says in (
        ({"moe_topk": [3, 2]}, r"moe_topk is \[3, 2\]; accepted is one number for all layers"),
        ({"num_shared_expert": [2, 2]}, r"num_shared_expert is \[2, 2\]; accepted is 1"),
        ({"moe_intermediate_size": 44}, "moe_intermediate_size is 44; accepted is 48"),
    ):
        with pytest.raises(CheckpointError, match=says):
            read(tmp_path, "hunyuan_moe", **changes)


def test_layers_of_llama_4(tmp_path):
    layers = read(tmp_path, "llama4").layers
    assert [(layer.window, layer.chunked, layer.rope is None) for layer in layers] == [
        *[(13, True, False)] * 3,
        (None, False, True),
    ]
    assert [layer.sparse for layer in layers] == [False, True, False, True]
    kinds = ["chunked_attention", *["full_attention"] * 3]
    with pytest.raises(CheckpointError, match="the size of attention's chunks is missing; accepted is 1 or more"):
        read(tmp_path, "llama4", layer_types=kinds, attention_chunk_size=None)


def test_gpt_2_without_scores_scaled_by_layer(tmp_path):
    with pytest.raises(CheckpointError, match="scale_attn_by_inverse_layer_idx is true; accepted is false"):
        read(tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True)


def test_internlm_3_says_its_biases_in_two_ways(tmp_path):
    old = read(tmp_path, "internlm3", "attention_bias", "mlp_bias", qkv_bias=True, bias=True)
    assert old == read(tmp_path, "internlm3")
    assert old != read(tmp_path, "internlm3", "attention_bias", "mlp_bias", qkv_bias=True, bias=False)


def test_the_factors_of_falcon_h1_are_in_the_weights_of_gguf_files(tmp_path, monkeypatch):
    monkeypatch.setitem(GGUF_MODELS, "falcon_h1", {})
    golden = load_golden("falcon_h1")
    ids = golden.prompt_token_ids
    (logits,) = Harness(write_gguf("falcon_h1", tmp_path / "model.gguf")).run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden.logits).max() <= 1e-4


@pytest.mark.parametrize(
    ("factor", "flag"), [("attention_in_multiplier", "attention_bias"), ("ssm_in_multiplier", "mamba_proj_bias")]
)
def test_falcon_h1_has_no_factor_on_the_input_of_a_product_with_a_bias(factor, flag, tmp_path):
    read(tmp_path, "falcon_h1", **{flag: True, factor: 1.0})
    with pytest.raises(CheckpointError, match=f"{factor} is 0.5; accepted is 1 where {flag} is true"):
        read(tmp_path, "falcon_h1", **{flag: True, factor: 0.5})


@pytest.mark.parametrize("limits", [[0.1, 0.5], [0, 7], [0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None])
def test_steps_of_states_are_kept_within_limits(limits, tmp_path):
    ssd = read(tmp_path, "mamba2", time_step_limit=limits).ssd
    least, most = limits or (0, float("inf"))
    unbounded = isinstance(most, dict) or math.isinf(most)
    assert ssd is not None and (ssd.dt_min, ssd.dt_max) == (least, None if unbounded else most)


@pytest.mark.parametrize("limits", [[0.1], [0.5, 0.1], [-1, 2], ["0", "1"], [0.0, {"__float__": "NaN"}], [True, 2.0]])
def test_other_limits_are_refused(limits, tmp_path):
    with pytest.raises(CheckpointError, match=r"time_step_limit is .*; accepted are two numbers"):
        read(tmp_path, "mamba2", time_step_limit=limits)


def test_sizes_of_states_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"head_dim is 7, which 12 state-space heads have; accepted is .* 96 channels"
    ):
        read(tmp_path, "mamba2", head_dim=7)
    with pytest.raises(CheckpointError, match="number of state-space groups is 5; accepted is a divisor of 12 heads"):
        read(tmp_path, "mamba2", n_groups=5)


def test_granite_4_may_have_no_states_at_all(tmp_path):
    config = read(tmp_path, "granite4", layer_types=["attention"] * 4, position_embedding_type="rope")
    assert config.ssd is None and not config.has_states and all(layer.rope for layer in config.layers)
    with pytest.raises(CheckpointError, match="position_embedding_type is 'alibi'; accepted is one of rope, nope or"):
        read(tmp_path, "granite4", position_embedding_type="alibi")


@pytest.mark.parametrize("pattern", ["M-*X", "M" * 1025])
def test_other_letters_of_nemotron_are_refused(pattern, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"hybrid_override_pattern is .*; accepted is a letter for each layer, of M"
    ):
        read(tmp_path, "nemotron_h", hybrid_override_pattern=pattern)


def test_nemotrons_modules_for_further_tokens_are_left_out(tmp_path):
    weights = tiny_weights("nemotron_h") | {"mtp.layers.0.enorm.weight": np.ones(60, np.float32)}
    path = save_checkpoint(tiny_config("nemotron_h"), weights, tmp_path)
    golden = load_golden("nemotron_h")
    ids = golden.prompt_token_ids
    (logits,) = Harness(path).run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden.logits).max() <= 1e-4


@pytest.mark.parametrize(("name", "architecture"), [("lfm2", "lfm2"), ("granite4", "granitehybrid")])
@pytest.mark.parametrize("kv_heads", [[0, 0, 0, 0], [0, 1, 2, 0]])
def test_layers_of_a_hybrid_attend_with_as_many_kv_heads_or_none(name, architecture, kv_heads, tmp_path):
    path = write_gguf(name, tmp_path / "model.gguf", also_keys={f"{architecture}.attention.head_count_kv": kv_heads})
    with pytest.raises(CheckpointError, match="accepted is 0 or one and the same in each layer"):
        model_spec(open_checkpoint(path))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clip_qkv": -6.0}, "attn_config.clip_qkv is -6.0; accepted is null or a number from 0.001 to"),
        ({"alibi": False}, "attn_config.alibi is False; accepted is true"),
        ({"qk_ln": True}, "attn_config.qk_ln is True; accepted is false"),
        ({"prefix_lm": True}, "attn_config.prefix_lm is True; accepted is false"),
        ({"attn_type": "multiquery_attention"}, "attn_config.attn_type is .*; accepted is one of multihead_attention"),
    ],
)
def test_what_mpt_attention_may_not_be(changes, says, tmp_path):
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path, "mpt", attn_config=changes)


def test_mpts_gguf_files_say_how_steep_alibi_is_and_what_is_clamped(tmp_path):
    for clamp, clip in ((6.0, 6.0), (0.0, None)):
        path = write_gguf("mpt", tmp_path / f"{clamp}.gguf", also_keys={"mpt.attention.clamp_kqv": clamp})
        assert model_spec(open_checkpoint(path)).config.qkv_clip == clip
    path = write_gguf("mpt", tmp_path / "wrong.gguf", also_keys={"mpt.attention.clamp_kqv": -6.0})
    with pytest.raises(CheckpointError, match=r"mpt.attention.clamp_kqv is -6.0; accepted is a number from 0.001 to"):
        model_spec(open_checkpoint(path))
    path = write_gguf("mpt_scaled", tmp_path / "steep.gguf")
    assert model_spec(open_checkpoint(path)).config.alibi == 12.0
