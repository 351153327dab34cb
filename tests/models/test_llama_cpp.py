"""Tiny GGUF files as llama.cpp reads them: the same probabilities of the next token, or the same hidden states.

Needs a Python that has xllamacpp: this one, or the one that LLAMA_CPP_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import baichuan_13b
from tests.models.encoder_harness import EncoderHarness
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny_configs import ENCODERS
from tests.reference.tiny_gguf import GGUF_MODELS, gguf_config, write_gguf

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
RUN = Path(__file__).with_name("run_llama_cpp.py")
TOKENS = 24
TOLERANCE = 5e-3
"""Of logarithms: llama.cpp takes GELU from a table of float16."""

NOT_LOADED = {
    **dict.fromkeys(("smollm3_list", "lfm2_bias", "olmo3_new_rope", "granite4_moe", "nemotron_h_moe"), "biases"),
    **dict.fromkeys(("gpt_neox_in_turn", "mamba2_bias"), "no biases where it expects some"),
    **dict.fromkeys(("deepseek_v2_lite", "deepseek_v3_plain"), "queries without a latent, but in models of 27 layers"),
    **dict.fromkeys(("exaone4", "exaone4_full"), "heads that together are not as wide as the model"),
    **dict.fromkeys(("qwen3_next", "qwen3_5"), "heads of keys and values that differ in size"),
    "phi": "an MLP that is not four times as wide as the model",
    "cohere_qk_norm": "norms on queries and keys, but in models of 64 layers or more",
    "gemma4": "layers without KV of their own, but after one with a window and one without",
}
"""What these tiny models have that llama.cpp does not load."""
OTHERWISE = {
    "phi3_window": "it leaves Phi-3's windows out, and says so",
    "qwen2_yarn": "it reads YaRN's betas for other architectures alone",
    "gpt_oss": "it rounds YaRN's bounds, which the model was trained without",
    "deepseek_v2": "it scores groups of experts as DeepSeek V3 does",
}
"""What llama.cpp computes otherwise than transformers and this."""
PLAIN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0, "rope_scaling": {"rope_type": "default"}},
    "deepseek_v2": {"rope_scaling": None, "n_group": 1, "topk_group": 1},
}
"""Those of them that are compared without what is otherwise, and how their config changes."""
MORE_KEYS = {"glm4_moe_lite": {"deepseek2.expert_gating_func": 2}}
"""What llama.cpp knows by sizes that tiny models do not have."""
DECODERS = [name for name in GGUF_MODELS if name not in ENCODERS and name not in NOT_LOADED | OTHERWISE]


@cache
def why_not() -> str:
    """Why llama.cpp cannot be asked, if it cannot."""
    found = subprocess.run([PYTHON, "-c", "import xllamacpp"], capture_output=True, text=True, timeout=60)
    return "" if found.returncode == 0 else f"{PYTHON} has no xllamacpp; LLAMA_CPP_PYTHON names one that has"


def vocabulary(size: int) -> dict[str, Any]:
    """Tokens without which llama.cpp loads no model; texts are not used."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(size)],
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ["t 1"],
    }


def llama_cpps(path: Path, ids: list[int], wanted: str = "next") -> np.ndarray:
    if why_not():
        pytest.skip(why_not())
    run = subprocess.run(
        [PYTHON, str(RUN), str(path), wanted], input=json.dumps(ids), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return np.array(json.loads(run.stdout.splitlines()[-1]))


def logarithms(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_as_likely(path: Path, ids: list[int]) -> None:
    theirs = llama_cpps(path, ids[:TOKENS])
    (logits,) = Harness(path).run([ids], [Chunk(0, 0, len(ids))])  # all, as LongRoPE goes by the length
    ours = logarithms(logits)[:TOKENS]
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize("name", DECODERS)
def test_the_next_token_is_as_likely_as_llama_cpp_says(name: str, tmp_path: Path) -> None:
    config = gguf_config(name)
    keys = vocabulary(config.get("text_config", config)["vocab_size"]) | MORE_KEYS.get(name, {})
    path = write_gguf(name, tmp_path / "model.gguf", also_keys=keys)
    assert_as_likely(path, load_golden(name).prompt_token_ids)


@pytest.mark.parametrize("name", PLAIN)
def test_the_rest_of_a_model_is_as_llama_cpp_has_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GGUF_MODELS, name, PLAIN[name])
    path = write_gguf(name, tmp_path / "model.gguf", also_keys=vocabulary(gguf_config(name)["vocab_size"]))
    assert_as_likely(path, load_golden(name).prompt_token_ids)


@pytest.mark.parametrize("name", ["bert", "nomic_bert", "modernbert"])  # its EmbeddingGemma fails on so small a one
def test_an_encoders_hidden_states_are_llama_cpps(name: str, tmp_path: Path) -> None:
    config = gguf_config(name)
    types = {"tokenizer.ggml.token_type_count": config.get("type_vocab_size") or 1}
    path = write_gguf(name, tmp_path / "model.gguf", also_keys=vocabulary(config["vocab_size"]) | types)
    ids = load_golden(name).prompt_token_ids[:40]
    theirs = llama_cpps(path, ids, "mean")
    (states,) = EncoderHarness(path).run([ids], [0])
    np.testing.assert_allclose(states.mean(0), theirs, atol=TOLERANCE)


def test_baichuan_13b_has_llama_cpps_slopes(tmp_path: Path) -> None:
    path = baichuan_13b.write_file(tmp_path / "model.gguf", vocabulary(baichuan_13b.VOCAB))
    assert_as_likely(path, baichuan_13b.IDS)
