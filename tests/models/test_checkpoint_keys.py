"""Keys of checkpoints that change what a model computes: each is read, or named and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from tests.reference.tiny import tiny_config
from tests.reference.tiny_gguf import gguf_architecture, write_gguf


def read(tmp_path: Path, name: str, **changes: Any) -> DecoderConfig:
    """The tiny model `name` with these keys of its config.json changed."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(name) | changes))
    return model_spec(open_checkpoint(tmp_path, "dummy")).config


def gguf(tmp_path: Path, name: str, **keys: Any) -> DecoderConfig:
    """The tiny model `name` as a GGUF file with these keys too."""
    return model_spec(open_checkpoint(write_gguf(name, tmp_path / "model.gguf", also_keys=keys))).config


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "qwen3"])
def test_attention_that_sees_later_tokens_is_refused(name, tmp_path):
    causal = read(tmp_path, name, use_bidirectional_attention=False, is_causal=True)
    assert causal == read(tmp_path, name, use_bidirectional_attention=None, is_causal=None) == read(tmp_path, name)
    with pytest.raises(
        CheckpointError, match="use_bidirectional_attention is True; accepted is False or null, since this family is"
    ):
        read(tmp_path, name, use_bidirectional_attention=True)
    with pytest.raises(CheckpointError, match="is_causal is False; accepted is True or null, since this family is not"):
        read(tmp_path, name, is_causal=False)


def test_gemma_3_whose_tokens_see_later_ones_is_an_encoder_in_a_wrapper_too(tmp_path):
    text = tiny_config("gemma3_conditional")["text_config"] | {"use_bidirectional_attention": True}
    assert read(tmp_path, "gemma3_conditional", text_config=text).encoder is not None
    assert read(tmp_path, "gemma3_conditional").encoder is None


def test_a_gguf_file_of_an_encoder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"attention\.causal is false; accepted is true, for this is not"):
        gguf(tmp_path, "llama_gqa", **{"llama.attention.causal": False})


def test_a_cap_on_gemma_3s_attention_logits_is_refused(tmp_path):
    """transformers 5.24 reads the key and caps nothing, so that nobody can say what such a model computes."""
    assert read(tmp_path, "gemma3_small", attn_logit_softcapping=None) == read(tmp_path, "gemma3_small")
    with pytest.raises(CheckpointError, match=r"attn_logit_softcapping is 50\.0; accepted is null"):
        read(tmp_path, "gemma3_small", attn_logit_softcapping=50.0)
    with pytest.raises(CheckpointError, match=r"attn_logit_softcapping is 50\.0; accepted is null"):
        gguf(tmp_path, "gemma3_small", **{"gemma3.attn_logit_softcapping": 50.0})


def test_ministral_3s_query_scaling_says_from_which_length_on(tmp_path):
    """transformers divides positions by the original length, which kinds of scaling other than YaRN may leave out."""
    rope = {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.5}
    config = read(tmp_path, "ministral3_text", rope_parameters=rope | {"original_max_position_embeddings": 32})
    assert config.query_scaling is not None and config.query_scaling.original_length == 32
    with pytest.raises(CheckpointError, match=r"llama_4_scaling_beta is 0\.5 without original_max_position_embeddings"):
        read(tmp_path, "ministral3_text", rope_parameters=rope)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


@pytest.mark.parametrize(
    ("name", "scaling", "longest"),
    [
        # What vLLM's _get_and_verify_max_len derives: the context that the scaling gives.
        ("llama_gqa", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        ("llama_gqa", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ("llama_gqa", {"rope_type": "yarn", "factor": 4.0}, 1024),
        ("llama_gqa", {"type": "linear", "factor": 2.5}, 640),
        ("llama_gqa", {"type": "dynamic", "factor": 3.0}, 768),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        ("gemma2", {"type": "linear", "factor": 2.0}, 512),
        # Here max_position_embeddings is the scaled one.
        ("llama_gqa", LLAMA3 | {"original_max_position_embeddings": 64}, 256),
        ("llama_gqa", LONGROPE | {"factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ("gemma3_small", {"rope_type": "linear", "factor": 8.0}, 256),
        ("llama_gqa", None, 256),
    ],
)
def test_the_longest_context_is_the_scaled_one(name, scaling, longest, tmp_path):
    changes = {"max_position_embeddings": 256, "rope_scaling": scaling}
    assert read(tmp_path, name, **changes).max_position_embeddings == longest


def test_a_scaled_context_too_long_for_positions_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="the scaled context is 2560000000 tokens; accepted is an integer from 1"):
        read(tmp_path, "llama_gqa", max_position_embeddings=2560, rope_scaling={"type": "linear", "factor": 1e6})


@pytest.mark.parametrize("name", ["llama_gqa", "llama_linear_rope", "llama_yarn", "phi3", "gemma3_small"])
def test_the_factor_on_cosine_and_sine_of_a_gguf_file(name, tmp_path):
    """ggml's rope_yarn multiplies both by attn_factor, which is yarn_attn_factor times rope_attn_factor."""
    architecture = gguf_architecture(name)
    key, plain = f"{architecture}.rope.scaling.attn_factor", gguf(tmp_path, name)
    scaled = gguf(tmp_path, name, **{key: 1.25})
    for before, after in zip(plain.layers, scaled.layers, strict=True):
        assert before.rope is not None and after.rope is not None
        assert after.rope.attention_factor == pytest.approx(1.25 * before.rope.attention_factor)


def test_the_factor_of_olmo_3_is_not_that_of_layers_with_a_window(tmp_path):
    """llama.cpp's olmo2.cpp rotates these by the plain embedding: no scaling, and 1 for attn_factor."""
    plain, scaled = (gguf(tmp_path, "olmo3", **keys) for keys in ({}, {"olmo2.rope.scaling.attn_factor": 1.25}))
    for before, after in zip(plain.layers, scaled.layers, strict=True):
        assert before.rope is not None and after.rope is not None
        factor = 1.25 if after.window is None else 1.0
        assert after.rope.attention_factor == pytest.approx(factor * before.rope.attention_factor)


@pytest.mark.parametrize(
    ("name", "key", "value", "accepted"),
    [
        ("llama_yarn", "yarn_attn_factor", 1.5, "1"),
        ("llama_yarn", "yarn_ext_factor", 0.5, "1, or a negative number"),
        ("llama_yarn", "yarn_ext_factor", 0.0, "1, or a negative number"),
        ("llama_gqa", "yarn_ext_factor", 1.0, "0, or a negative number"),
        ("llama_yarn", "yarn_log_multiplier", 0.5, "0"),
        ("deepseek_v2", "attn_factor", 1.5, "1"),
    ],
)
def test_what_llama_cpp_reads_of_yarn_for_others_is_refused(name, key, value, accepted, tmp_path):
    key = f"{gguf_architecture(name)}.rope.scaling.{key}"
    with pytest.raises(CheckpointError, match=re.escape(f"{key.partition('.')[2]} is {value}; accepted is {accepted}")):
        gguf(tmp_path, name, **{key: value})


def test_yarn_keys_that_change_nothing_are_accepted(tmp_path):
    keys = {"llama.rope.scaling.yarn_attn_factor": 1.0, "llama.rope.scaling.yarn_ext_factor": 1.0}
    assert gguf(tmp_path, "llama_yarn", **keys) == gguf(tmp_path, "llama_yarn")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("llama_gqa", "Llama"),
        ("mixtral", "Mixtral"),
        ("olmo2", "OLMo 2"),
        ("olmo3", "OLMo 3"),
        ("deepseek_v2_lite", "DeepSeek V2"),
        ("deepseek_v3", "DeepSeek V3"),
    ],
)
def test_a_gguf_file_is_of_the_family_that_its_content_says(name, family, tmp_path):
    """llama.cpp has one architecture for each two of them."""
    assert model_spec(open_checkpoint(write_gguf(name, tmp_path / "model.gguf"))).family.name == family


@pytest.mark.parametrize("name", ["llama_gqa", "gemma4", "nemotron_h", "exaone4"])
def test_layers_that_predict_further_tokens_are_fewer_than_all(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"nextn_predict_layers is 9; accepted are fewer than \d layers"):
        gguf(tmp_path, name, **{f"{gguf_architecture(name)}.nextn_predict_layers": 9})


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "minimax_m2"])
def test_a_head_size_of_null_is_the_hidden_size_shared_out_among_the_heads(name, tmp_path):
    c = tiny_config(name)
    heads = c["num_attention_heads"]
    size = c["hidden_size"] // heads
    changes = {"hidden_size": size * heads}
    assert read(tmp_path, name, head_dim=None, **changes) == read(tmp_path, name, head_dim=size, **changes)
