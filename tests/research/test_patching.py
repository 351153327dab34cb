"""The residual stream is patched as hooks of transformers patch it, beside requests that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, InvalidRequestError, SamplingParams, Steer
from jaxllm.requests import steering
from tests.reference import load_golden
from tests.reference.inside import PATCHED_PLACES, STEERED, load_inside, patches
from tests.reference.tiny import tiny_prompt, write_checkpoint
from tests.research.inside import GREEDY, tokens_of
from tests.support.sizes import FIELDS, few_pages
from tests.support.tiny_engine import tiny_engine


@pytest.fixture(scope="module", params=STEERED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("which", PATCHED_PLACES)
def test_a_patched_request_is_as_transformers_has_it(llm: LLM, name: str, which: str) -> None:
    """64 tokens come in two chunks or more."""
    golden, prompt = load_inside(name), tiny_prompt(name)
    patch = patches(which, llm.info.hidden_size)
    (rows,) = llm.logits(prompt, use_tqdm=False, patch=patch)
    np.testing.assert_allclose(rows[:], golden.patched[which], atol=1e-4, rtol=1e-4)
    assert tokens_of(llm, [prompt], patch=patch) == [golden.patched_tokens[which]]


def test_patched_and_plain_requests_share_a_batch(llm: LLM, name: str) -> None:
    golden, prompt = load_inside(name), tiny_prompt(name)
    plain, short = load_golden(name).greedy_token_ids[:8], tokens_of(llm, [prompt[:9]])[0]
    assert plain not in golden.patched_tokens.values()
    of_prompt, of_both = (patches(which, llm.info.hidden_size) for which in ("prompt", "generated"))
    prompts, given = [prompt, prompt, prompt[:9], prompt, prompt], [of_prompt, None, {}, of_both, of_prompt]
    expected = [golden.patched_tokens["prompt"], plain, short, golden.patched_tokens["generated"]]
    expected.append(golden.patched_tokens["prompt"])
    for _ in range(3):  # with the prefixes of the time before
        assert tokens_of(llm, prompts, patch=given) == expected
        assert tokens_of(llm, [prompt] * 4) == [plain] * 4


def test_several_tokens_a_step_and_drafts(name: str, tmp_path: Path) -> None:
    """They run again once the last patched token has."""
    golden, prompt = load_inside(name), tiny_prompt(name)
    ways: list[dict[str, Any]] = [{"decode_steps": 4}]
    if name == "llama_gqa":
        ways.append({"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}})
    for way in ways:
        with tiny_engine(name, tmp_path / next(iter(way)), **way) as other:
            given = [patches("prompt", other.info.hidden_size), patches("generated", other.info.hidden_size), None]
            found = tokens_of(other, [prompt] * 3, patch=given)
            assert found[:2] == list(golden.patched_tokens.values())
            assert found[2] == load_golden(name).greedy_token_ids[:8]


def test_captures_show_the_patch_and_what_comes_of_it(llama: LLM) -> None:
    """Also with a vector that is added to the same layer: the patch is what leaves it."""
    prompt, vector = tiny_prompt("llama_gqa")[:20], np.arange(llama.info.hidden_size) / 9
    wanted: dict[str, Any] = {"residual": True}
    (plain,) = llama.capture(prompt, wanted, use_tqdm=False)
    (patched,) = llama.capture(prompt, wanted, use_tqdm=False, patch={(-2, -10): vector})
    np.testing.assert_allclose(patched["residual"][0], plain["residual"][0], atol=1e-5)
    others = [position for position in range(20) if position != 10]
    np.testing.assert_allclose(patched["residual"][1][others], plain["residual"][1][others], atol=1e-5)
    np.testing.assert_allclose(patched["residual"][1][10], vector, atol=1e-6)
    np.testing.assert_allclose(patched["residual"][2][:10], plain["residual"][2][:10], atol=1e-5)
    assert (np.abs(patched["residual"][2][10:] - plain["residual"][2][10:]).max(1) > 1e-3).all()
    (output,) = llama.generate(
        [prompt], GREEDY, use_tqdm=False, capture=wanted, patch={(1, 10): vector}, steer=Steer(1, 3 * vector)
    )
    assert output.outputs[0].captures is not None
    np.testing.assert_allclose(output.outputs[0].captures["residual"][1][10], vector, atol=1e-6)


def test_patching_in_what_was_there_changes_nothing(llama: LLM) -> None:
    """Of a clean run into a corrupted one at every token of a layer: the clean run's logits come out."""
    clean, corrupted = tiny_prompt("llama_gqa")[:20], tiny_prompt("llama_gqa")[20:40]
    states = llama.capture(clean, {"residual": 1}, use_tqdm=False)[0]["residual"][1]
    (expected,) = llama.logits(clean, use_tqdm=False)
    everywhere = {(1, position): row for position, row in enumerate(states)}
    (found,) = llama.logits(corrupted, use_tqdm=False, patch=everywhere)
    np.testing.assert_allclose(found[:], expected[:], atol=1e-4)
    one = tokens_of(llama, [corrupted], patch={(1, 19): states[19]})[0][0]
    assert one != int(np.argmax(expected[-1])), "layer 2 still attends to the corrupted tokens"


def test_prefixes_are_shared_by_those_that_are_patched_alike(llama: LLM) -> None:
    prompt = [(7 * i) % 90 + 1 for i in range(40)]
    vector = np.random.default_rng(2).standard_normal(llama.info.hidden_size)

    def cached(patch: Any) -> int:
        (output,) = llama.generate([prompt], GREEDY, use_tqdm=False, patch=patch)
        return output.num_cached_tokens

    assert [cached(None), cached(None), cached({})] == [0, 32, 32]
    assert [cached({(1, 3): vector}), cached({(-2, -37): vector})] == [0, 32]
    assert [cached({(1, 4): vector}), cached({(0, 3): vector}), cached({(1, 3): 2 * vector})] == [0] * 3


def test_a_request_that_was_preempted_is_patched_again(tmp_path: Path, llama: LLM) -> None:
    prompts = [tiny_prompt("llama_gqa")[i : i + 30] for i in range(4)]
    rows = np.random.default_rng(8).standard_normal((4, llama.info.hidden_size))
    given = [{(1, 20): row, (0, 45): row} for row in rows]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = tokens_of(llama, prompts, params, patch=given)
    with few_pages(17), tiny_engine("llama_gqa", tmp_path) as other:
        assert tokens_of(other, prompts, params, patch=given) == expected
        assert other.stats().num_preemptions > 0


def test_requests_without_run_what_they_run_in_an_engine_without(tmp_path: Path) -> None:
    """Tokens after the last that is patched are decoded by the ordinary steps."""
    fields = FIELDS | {"enforce_eager": False}
    prompt = tiny_prompt("llama_gqa")[:12]
    with LLM(write_checkpoint("llama_gqa", tmp_path), **fields) as llm:
        llm.generate([prompt], GREEDY, use_tqdm=False, patch={(1, 3): np.zeros(llm.info.hidden_size)})
        executables = llm._client()._loop._core._runner.device._executables  # type: ignore[union-attr]
        executables.wait()
        rare = {str(key) for key in executables._compiles if executables.features.is_rare(key)}
        assert rare == {"backbone-32-patching4"}
        assert llm.stats().compiles_unforeseen == 0
        assert llm.stats().scheduled_tokens["decode-8"] == 7


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    golden, prompt = load_inside("llama_gqa"), tiny_prompt("llama_gqa")
    with tiny_engine("llama_gqa", tmp_path, engine_process=True) as llm:
        found = tokens_of(llm, [prompt], patch=patches("generated", llm.info.hidden_size))
    assert found == [golden.patched_tokens["generated"]]


ROW = np.ones(64)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({(3, 0): ROW}, "patch has layer 3; layers go from 0 to 2"),
        (
            {(0, 128): ROW},
            "patch has position 128; of a prompt of 3 tokens, in a context of 128, they go from -3 to 127",
        ),
        ({(0, -4): ROW}, "patch has position -4"),
        ({(0, 1): ROW[1:]}, r"patch has \[63\] for \(0, 1\); it must be \[64\], and finite"),
        ({(0, 1): ROW * np.nan}, "and finite"),
        ({3: ROW}, r"patch has the key 3; it must be \(layer, position\)"),
        ({(0, 1.0): ROW}, r"patch has the key \(0, 1\.0\)"),
        ({(0, 1): ROW, (-3, -2): ROW}, "patch has two entries for layer 0 at position 1; it must have one"),
        ([{}, {}], "patch has 2 entries for 1 prompts; give one for all, or one a prompt"),
    ],
)
def test_what_is_not_there_is_refused(llama: LLM, patch: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llama.generate([[1, 2, 3]], GREEDY, use_tqdm=False, patch=patch)


def test_more_than_there_is_room_for_is_refused(llama: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "MOST_BYTES", 2 * 4 * 64)
    with pytest.raises(InvalidRequestError, match="patch has 3 entries; accepted are up to 2"):
        llama.generate([[1, 2, 3]], GREEDY, use_tqdm=False, patch={(0, i): ROW for i in range(3)})
