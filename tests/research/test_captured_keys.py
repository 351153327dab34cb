"""Keys and values are captured as transformers' cache holds them, however requests are batched and cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, InvalidRequestError, SamplingParams
from tests.reference.inside import ATTENDED, ATTENDED_TOKENS, load_inside
from tests.reference.tiny import tiny_prompt
from tests.support.tiny_engine import tiny_engine

EXACT = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module", params=ATTENDED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_keys_and_values_are_as_transformers_holds_them(llm: LLM, name: str) -> None:
    """40 tokens come in two chunks; beside another prompt, and with what is of another shape."""
    golden, prompt = load_inside(name).attention, tiny_prompt(name)[:ATTENDED_TOKENS]
    wanted = {"keys": True, "residual": 0, "values": True}
    found, other = llm.capture([prompt, prompt[7:20]], wanted, use_tqdm=False)
    assert {f"keys.{layer}" for layer in found["keys"]} == {key for key in golden if key.startswith("keys")}
    assert found["residual"][0].shape == (ATTENDED_TOKENS, llm.info.hidden_size)
    for point in ("keys", "values"):
        for layer, array in found[point].items():
            expected = golden[f"{point}.{layer}"]
            assert array.shape == (ATTENDED_TOKENS, *expected.shape[1:]) and array.dtype == np.float32
            np.testing.assert_allclose(array[-len(expected) :], expected, **EXACT)
            assert other[point][layer].shape == (13, *expected.shape[1:])


def test_they_are_what_attention_shows(llm: LLM, name: str) -> None:
    """Of a completion, too."""
    prompt = tiny_prompt(name)[:12]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    wanted: dict[str, Any] = {"keys": True, "values": True}
    (output,) = llm.generate([prompt], params, use_tqdm=False, capture=wanted)
    (choice,) = output.outputs
    assert choice.captures is not None
    for layer, attention in llm.attention(prompt + choice.token_ids[:-1]).items():
        np.testing.assert_allclose(choice.captures["keys"][layer], attention.keys, **EXACT)
        np.testing.assert_allclose(choice.captures["values"][layer], attention.values, **EXACT)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_engine("llama_gqa", tmp_path_factory.mktemp("llama")) as llm:
        yield llm


def test_names_of_transformer_lens(llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:6]
    (found,) = llama.capture(prompt, ["blocks.1.attn.hook_rot_k", "blocks.2.attn.hook_v"], use_tqdm=False)
    (ours,) = llama.capture(prompt, {"keys": 1, "values": 2}, use_tqdm=False)
    np.testing.assert_array_equal(found.array("blocks.1.attn.hook_rot_k"), ours["keys"][1])
    np.testing.assert_array_equal(found.array("blocks.2.attn.hook_v"), ours["values"][2])
    assert "keys of layer 1" in ours._repr_html_() and "values of layer 2" in ours._repr_html_()
    (several,) = llama.capture(prompt, {"keys": True, "residual": 0}, use_tqdm=False)
    assert "keys, root mean square" in several._repr_html_()


@pytest.mark.parametrize(
    ("model", "wanted", "said"),
    [
        ("lfm2", {"keys": 0}, "capture has layer 0 of 'keys'; layers with keys of their own are 2"),
        ("deepseek_v2", {"values": 0}, "capture has layer 0 of 'values'; layers with values of their own are none"),
        ("deepseek_v2", {"values": True}, "capture has True for 'values'; it must be a layer, a list of layers"),
    ],
)
def test_layers_without_are_refused(model: str, wanted: Any, said: str, tmp_path: Path) -> None:
    with (
        tiny_engine(model, tmp_path) as llm,
        pytest.raises(InvalidRequestError, match=said),
    ):
        llm.capture([1, 2, 3], wanted, use_tqdm=False)


def test_keys_may_be_wider_than_the_stream(tmp_path: Path) -> None:
    """8 heads of 16, of a stream of 64: beside what is as wide as that."""
    prompt = tiny_prompt("llama_mha8")[:12]
    with tiny_engine("llama_mha8", tmp_path) as llm:
        (found,) = llm.capture(prompt, {"keys": 1, "residual": 1, "final": True}, use_tqdm=False)
        (stream,) = llm.capture(prompt, {"residual": 1, "final": True}, use_tqdm=False)
        keys = llm.attention(prompt, 1)[1].keys
    assert keys.shape == (12, 8, 16) and found.final.shape == (12, 64)
    np.testing.assert_allclose(found["keys"][1], keys, **EXACT)
    np.testing.assert_allclose(found["residual"][1], stream["residual"][1], atol=1e-6)
    np.testing.assert_allclose(found.final, stream.final, atol=1e-6)
