"""A tiny model of each family written as GGUF loads to the very parameters of its Hugging Face checkpoint."""

from __future__ import annotations

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.abstract import abstract_model
from jaxllm.models.decoder import BuildOptions
from jaxllm.models.registry import model_spec
from jaxllm.sharding.mesh import build_mesh
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import load_parameters
from tests.reference.tiny import tiny_config, tiny_weights, write_checkpoint

MODELS = {"llama_gqa": "llama", "llama_mqa_tied": "llama", "qwen3": "qwen3", "gemma3_small": "gemma3"}


def permute_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows: row i of a head's first half beside row i of its second."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def write_gguf(name: str, path) -> None:
    config, architecture = tiny_config(name), MODELS[name]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for tensor, weight in tiny_weights(name).items():
        if architecture == "llama" and "q_proj" in tensor:
            weight = permute_pairs(weight, heads)
        if architecture == "llama" and "k_proj" in tensor:
            weight = permute_pairs(weight, kv_heads)
        if architecture == "gemma3" and "norm" in tensor:
            weight = weight + 1
        writer.add_tensor(names.get_name(tensor, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parameters(path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint)
    _, specs = abstract_model(spec, BuildOptions(dtype=jnp.float32))
    arrays = load_parameters(checkpoint, specs, spec.names, build_mesh(1), ignored=spec.ignored)
    return {s.path: np.asarray(array) for s, array in zip(specs, arrays, strict=True)}


@pytest.mark.parametrize("name", MODELS)
def test_gguf_loads_to_the_same_parameters(name, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(name, path)
    ours, theirs = parameters(path), parameters(write_checkpoint(name, tmp_path / "hf"))
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        np.testing.assert_array_equal(ours[key], expected, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_gguf_metadata_gives_the_same_config(name, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(name, path)
    ours = model_spec(open_checkpoint(path)).config
    theirs = model_spec(open_checkpoint(write_checkpoint(name, tmp_path / "hf"))).config
    for field in ("vocab_size", "num_layers", "num_kv_heads", "head_dim", "tie_word_embeddings", "rope", "hidden_act"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert getattr(ours, "windows", None) == getattr(theirs, "windows", None)
