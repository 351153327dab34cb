"""What layers attend by is what transformers gives with eager attention, and what its cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, ConfigError, InvalidRequestError
from tests.reference.inside import ATTENDED, ATTENDED_TOKENS, load_inside
from tests.reference.tiny import tiny_prompt
from tests.support.tiny_engine import tiny_engine

EXACT = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module", params=ATTENDED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_attention_is_as_transformers_has_it(llm: LLM, name: str) -> None:
    golden = load_inside(name).attention
    found = llm.attention(tiny_prompt(name)[:ATTENDED_TOKENS])
    assert {f"weights.{layer}" for layer in found} == {key for key in golden if key.startswith("weights")}
    for layer, attention in found.items():
        np.testing.assert_allclose(attention.weights, golden[f"weights.{layer}"], **EXACT)
        np.testing.assert_allclose(attention.weights.sum(-1), 1, atol=1e-5)
        kept = len(golden[f"keys.{layer}"])  # a layer with a window forgets the earlier ones
        np.testing.assert_allclose(attention.keys[-kept:], golden[f"keys.{layer}"], **EXACT)
        np.testing.assert_allclose(attention.values[-kept:], golden[f"values.{layer}"], **EXACT)
        assert attention.queries.shape == (ATTENDED_TOKENS, len(attention.weights), attention.keys.shape[2])


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_engine("gemma3_small", tmp_path_factory.mktemp("gemma")) as llm:
        yield llm


def test_a_window_hides_what_is_further_back(gemma: LLM) -> None:
    """Layer 5 sees everything, the others 16 tokens."""
    found = gemma.attention(tiny_prompt("gemma3_small")[:40], [0, 5, -1])
    assert list(found) == [0, 5, 6]
    rows, columns = np.indices((40, 40))
    for layer, attention in found.items():
        visible = (columns <= rows) & ((rows - columns < 16) | (layer == 5))
        np.testing.assert_array_equal(attention.weights > 0, np.broadcast_to(visible, attention.weights.shape))


def softmax_of(queries: np.ndarray, keys: np.ndarray, scale: float, sinks: np.ndarray | None = None) -> np.ndarray:
    """In float64, of causal attention; sinks have a part of each row."""
    group = queries.shape[1] // keys.shape[1]
    scores = np.einsum("qhd,khd->hqk", queries.astype(np.float64), np.repeat(keys, group, axis=1)) * scale
    scores = np.where(np.tri(len(queries), dtype=bool), scores, -np.inf)
    weights = np.exp(scores)
    taken = 0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None, None]
    return weights / (weights.sum(-1, keepdims=True) + taken)


@pytest.mark.parametrize("model", ["llama_gqa", "gemma4", "falcon_h1"])
def test_weights_follow_from_queries_and_keys(model: str, tmp_path: Path) -> None:
    """Also where later layers share the keys of an earlier one, and where attention stands beside a state."""
    with tiny_engine(model, tmp_path) as llm:
        found = llm.attention(tiny_prompt(model)[:6])
        for layer, attention in found.items():
            scale = llm.module.layers[layer].attention.scale
            expected = softmax_of(attention.queries, attention.keys, scale)
            np.testing.assert_allclose(attention.weights, expected, atol=1e-5)
        for layer in range(1, len(found)):
            assert np.abs(found[layer].weights - found[layer - 1].weights).max() > 1e-3


def test_sinks_take_a_part(tmp_path: Path) -> None:
    with tiny_engine("gpt_oss", tmp_path) as llm:
        attention = llm.attention(tiny_prompt("gpt_oss")[:6], 0)[0]
        sinks = np.asarray(llm.params["layers.0.attention.sinks"])
    expected = softmax_of(attention.queries, attention.keys, attention.keys.shape[-1] ** -0.5, sinks)
    np.testing.assert_allclose(attention.weights, expected, atol=1e-5)
    assert (attention.weights.sum(-1) < 0.95).any()


def test_what_is_not_there_is_refused(gemma: LLM, tmp_path: Path) -> None:
    prompt = list(range(8))
    with pytest.raises(InvalidRequestError, match="layers is 7; it must be True, or some of those that have attention"):
        gemma.attention(prompt, 7)
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        gemma.attention([])
    with pytest.raises(InvalidRequestError, match="prompt has 128 tokens"):
        gemma.attention([1] * 128)
    with (
        tiny_engine("lfm2", tmp_path / "lfm2") as llm,
        pytest.raises(InvalidRequestError, match=r"layers is \[0\]; .* those that have attention: 2$"),
    ):
        llm.attention(prompt, [0])
    with (
        tiny_engine("deepseek_v2", tmp_path / "mla") as llm,
        pytest.raises(InvalidRequestError, match="attends to latents"),
    ):
        llm.attention(prompt)
    with (
        tiny_engine("llama_gqa", tmp_path / "llama", engine_process=True) as llm,
        pytest.raises(ConfigError, match="engine_process is True"),
    ):
        llm.attention(prompt)


def test_a_text_that_is_too_long_is_refused(gemma: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.research.model.MOST_TOKENS", 7)
    with pytest.raises(InvalidRequestError, match="prompt has 8 tokens; accepted are up to 7"):
        gemma.attention([1] * 8)
    assert set(gemma.attention([1] * 7, 0)) == {0}
