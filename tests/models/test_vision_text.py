"""Language models of checkpoints that see images, on text alone, against what transformers computes at float32."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights
from tests.reference.tiny_configs import VISION
from tests.reference.vision import load_vision, write_vision_checkpoint


@pytest.mark.parametrize("name", VISION)
def test_text_alone_is_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    golden = load_vision(name)
    ids = golden["text_token_ids"].tolist()
    (logits,) = Harness(write_vision_checkpoint(name, tmp_path)).run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden["text_logits"]).max() < 2e-4


def test_experts_of_qwen3_vl_may_lie_the_other_way_around(tmp_path: Path) -> None:
    """As its checkpoints were published."""
    golden = load_vision("qwen3_vl_moe")
    ids = golden["text_token_ids"].tolist()
    folder = write_vision_checkpoint("qwen3_vl_moe", tmp_path)
    weights = load_file(folder / "model.safetensors")
    turned = {name: w.swapaxes(1, 2).copy() if ".experts." in name else w for name, w in weights.items()}
    save_file(turned, folder / "model.safetensors")
    (logits,) = Harness(folder).run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden["text_logits"]).max() < 2e-4


@pytest.mark.parametrize(
    ("wrapper", "name", "model", "head", "other"),
    [
        ("got_ocr2", "qwen2", "model.language_model.", "", "model.multi_modal_projector.conv.weight"),
        ("fuyu", "persimmon", "model.language_model.", "", "model.vision_embed_tokens.weight"),
        ("emu3", "emu3", "text_model.model.", "text_model.", "vqmodel.quantize.embedding.weight"),
    ],
)
def test_the_language_model_of_a_wrapper_whose_images_are_not_read(wrapper, name, model, head, other, tmp_path):
    weights = {other: np.zeros((2, 2), np.float32)}
    for tensor, weight in tiny_weights(name).items():
        weights[re.sub("^lm_head", f"{head}lm_head", re.sub("^model[.]", model, tensor))] = weight
    text = tiny_config(name)
    config = {"model_type": wrapper, "text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}
    golden = load_golden(name)
    ids = golden.prompt_token_ids
    (logits,) = Harness(save_checkpoint(config, weights, tmp_path)).run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden.logits).max() <= 1e-4
