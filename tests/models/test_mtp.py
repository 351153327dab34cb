"""Modules that predict further tokens against their definition in float64, and checkpoints without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.predictor import MTPSpec, mtp_spec
from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from tests.models.mtp_module import module_hidden, mtp_config, mtp_weights, write_mtp_checkpoint
from tests.models.predicting import predicted
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights, write_checkpoint

TOKENS = 21


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_what_the_head_reads_is_as_defined(name, tmp_path):
    dice, size = np.random.default_rng(2), tiny_config(name)["hidden_size"]
    embeddings, hidden = (dice.standard_normal((TOKENS, size)).astype(np.float32) for _ in range(2))
    expected = module_hidden(mtp_weights(name), mtp_config(name), embeddings, hidden)
    directory = write_mtp_checkpoint(name, tmp_path)
    checkpoint = open_checkpoint(directory)
    spec = mtp_spec(checkpoint, model_spec(checkpoint))
    for cuts in ([TOKENS], [7, 8, 20, TOKENS]):
        found = predicted(checkpoint, spec, embeddings, hidden, cuts)
        np.testing.assert_allclose(found.hidden, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(found.state, found.hidden)


def spec_of(directory: Any) -> MTPSpec:
    checkpoint = open_checkpoint(directory)
    try:
        return mtp_spec(checkpoint, model_spec(checkpoint))
    finally:
        checkpoint.close()


def test_a_checkpoint_without_one_is_refused_by_the_name_of_a_tensor(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tensor 'mtp\.fc\.weight'"):
        spec_of(write_checkpoint("qwen3_5", tmp_path))


def test_the_module_of_a_wrapped_model_is_found_beside_a_copy_of_the_embedding(tmp_path):
    """Kimi's checkpoints have a prefix before all names; some list the module's own embedding before the model's."""
    weights = {f"language_model.{name}": weight for name, weight in sorted(mtp_weights("deepseek_v3").items())[::-1]}
    wrapper = {"model_type": "kimi_k25", "text_config": mtp_config("deepseek_v3"), "tie_word_embeddings": False}
    save_checkpoint(wrapper, weights, tmp_path)
    names = spec_of(tmp_path).names
    assert names["join.weight"][0][0].name == "language_model.model.layers.2.eh_proj.weight"
    assert names["layers.0.attention.kv_b.weight"][0][0].name in weights


def test_a_family_whose_modules_are_not_supported_is_refused_by_name(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"a checkpoint of Llama .* supported in .* DeepSeek V3, .* Qwen3-Next, Qwen3\.5"
    ):
        spec_of(save_checkpoint(tiny_config("llama_gqa"), tiny_weights("llama_gqa"), tmp_path))
