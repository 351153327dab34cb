"""Baichuan, of which transformers has no class: Llama with q, k and v in one tensor, its own head, and maybe ALiBi."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.models.config import DecoderConfig
from jaxllm.models.families.llama import VOCAB_OF_2
from jaxllm.models.registry import model_spec
from jaxllm.pallas_kernels.kernels import CPU, REFERENCE
from jaxllm.weights import open_checkpoint
from tests.models import baichuan_13b
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden, tiny_gguf
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights

TWIN = "llama_mha8"
"""A Llama with as many KV heads as others: the model that a Baichuan of these weights is."""


def config(**changes: Any) -> dict[str, Any]:
    found = tiny_config(TWIN) | {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"} | changes
    return {key: value for key, value in found.items() if key != "num_key_value_heads"}


def packed(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q, k and v of each layer on top of each other."""
    apart = tuple(f"{part}_proj.weight" for part in "qkv")
    found = {name: weight for name, weight in weights.items() if not name.endswith(apart)}
    for name in weights:
        if name.endswith("q_proj.weight"):
            parts = [weights[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            found[name.replace("q_proj", "W_pack")] = np.concatenate(parts)
    return found


def test_it_says_what_llama_says(tmp_path: Path) -> None:
    golden = load_golden(TWIN)
    model = Harness(save_checkpoint(config(), packed(tiny_weights(TWIN)), tmp_path))
    ids = golden.prompt_token_ids
    (logits,) = model.run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden.logits).max() <= 1e-4


def test_a_gguf_file_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_golden(TWIN)
    own = dataclasses.replace(tiny_gguf._ARCHITECTURES["llama"], name="baichuan")
    monkeypatch.setitem(tiny_gguf._ARCHITECTURES, "llama", own)
    path = tiny_gguf.write_gguf(TWIN, tmp_path / "model.gguf")
    assert model_spec(open_checkpoint(path)).family.name == "Baichuan"
    ids = golden.prompt_token_ids
    (logits,) = Harness(path).run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden.logits).max() <= 1e-4


def test_the_second_versions_head_has_rows_of_length_one(tmp_path: Path) -> None:
    """Rows of zeros past the vocabulary stay zeros."""
    weights = packed(tiny_weights(TWIN))
    size, tokens = weights["lm_head.weight"].shape[1], len(weights["lm_head.weight"])
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        weights[name] = np.concatenate([weights[name], np.zeros((VOCAB_OF_2 - tokens, size), np.float32)])
    golden = load_golden(TWIN)
    model = Harness(save_checkpoint(config(vocab_size=VOCAB_OF_2), weights, tmp_path))
    ids = golden.prompt_token_ids
    (logits,) = model.run([ids], [Chunk(0, 0, len(ids))])
    lengths = np.linalg.norm(weights["lm_head.weight"][:tokens].astype(np.float64), axis=1)
    assert np.abs(logits[:, :tokens] - golden.logits / lengths).max() <= 1e-4
    assert not logits[:, tokens:].any()


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return baichuan_13b.logits(baichuan_13b.weights(), baichuan_13b.IDS)


WRITERS = {"folder": baichuan_13b.write_folder, "file": baichuan_13b.write_file}
KERNELS = {"plain": REFERENCE} | ({"cpu": CPU} if cpu_kernels.available() else {})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", WRITERS)
def test_13b_attends_less_to_what_is_far_away(kind: str, kernels: str, expected: np.ndarray, tmp_path: Path) -> None:
    """In one chunk, in several of which the last is a decode, and behind another's pages."""
    model = Harness(WRITERS[kind](tmp_path / "model"), kernels=KERNELS[kernels])
    assert model.config.alibi == 8.0 and model.config.max_position_embeddings == 256
    ids = baichuan_13b.IDS
    (whole,) = model.run([ids], [Chunk(0, 0, len(ids))])
    bounds = [0, 1, 7, 8, 30, len(ids) - 1]
    parts = [model.run([ids], [Chunk(0, a, b)])[0] for a, b in pairwise(bounds)]
    parts.append(model.decode(ids[-1], len(ids) - 1)[None])
    for found in (whole, np.concatenate(parts)):
        assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


def test_a_model_of_13bs_size_has_alibi_however_many_layers_it_has(tmp_path: Path) -> None:
    def read(**changes: Any) -> DecoderConfig:
        (tmp_path / "config.json").write_text(json.dumps(baichuan_13b.CONFIG | changes))
        return model_spec(open_checkpoint(tmp_path, "dummy")).config

    assert read(hidden_size=5120, num_attention_heads=40, num_hidden_layers=38).alibi == 8.0
    rotating = read(num_hidden_layers=32)
    assert rotating.alibi is None and all(layer.rope is not None for layer in rotating.layers)
