"""Activations against transformers' own, of prompts and of completions, however they are batched and cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, InvalidRequestError, SamplingParams
from jaxllm.requests.captures import POINTS, TRANSFORMER_LENS, Captures
from tests.reference import load_golden
from tests.reference.inside import HOOKED, POSITIONS, load_inside
from tests.reference.tiny import tiny_prompt, write_checkpoint
from tests.support.sizes import FIELDS
from tests.support.tiny_engine import tiny_engine

EXACT = {"atol": 1e-4, "rtol": 1e-4}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", params=HOOKED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def check(captures: Captures, name: str, positions: list[int]) -> None:
    """Against what transformers computes, of the prompt and the greedy tokens after it."""
    expected = load_inside(name).activations
    assert captures.positions.tolist() == positions
    both = [position for position in POSITIONS if position in positions]
    assert both, "some of the positions are kept"
    for point, layers in captures.items():
        for layer, array in layers.items():
            assert array.shape == (len(positions), len(expected["final.-1"][0])) and array.dtype == np.float32
            known = dict(zip(POSITIONS, at(expected, point, layer), strict=True))
            found = dict(zip(positions, array, strict=True))
            for position in both:
                np.testing.assert_allclose(found[position], known[position], **EXACT, err_msg=f"{point} {layer}")


def at(expected: dict[str, np.ndarray], point: str, layer: int) -> np.ndarray:
    if point == "residual_middle":
        return expected[f"residual_before.{layer}"] + expected[f"attention_out.{layer}"]
    return expected[f"{point}.{layer}"]


def test_every_point_of_a_prompt_is_as_transformers_has_it(llm: LLM, name: str) -> None:
    """64 tokens come in two chunks or more."""
    everything = dict.fromkeys(POINTS, True) | {"final": True}
    (captures,) = llm.capture(tiny_prompt(name), everything, use_tqdm=False)
    assert list(captures) == [*POINTS, "final"] and len(captures["residual"]) == llm.info.num_layers
    check(captures, name, list(range(64)))


@pytest.mark.parametrize("model", ["falcon_h1", "smollm2-135m"])
def test_the_stream_is_the_sum_of_what_is_added_to_it(model: str, tmp_path: Path) -> None:
    """Also where several mixers add at once, and where kernels add to the stream what they multiply."""
    tiny = not model.startswith("smollm2")
    path = write_checkpoint(model, tmp_path) if tiny else model
    with LLM(path, **FIELDS | {"dtype": "float32" if tiny else "bfloat16"}) as llm:
        prompt = tiny_prompt(model) if tiny else list(range(500, 564))
        (captures,) = llm.capture(prompt, dict.fromkeys(POINTS, True), use_tqdm=False)
        few = list(captures["residual"])[:4]  # as many as a step has room for, so that no place is left over
        (alone,) = llm.capture(prompt, {"residual": few}, use_tqdm=False)
    for layer in captures["residual"]:
        before, mixed, middle, added, after = (captures[point][layer] for point in POINTS)
        np.testing.assert_allclose(middle, before + mixed, **EXACT)
        np.testing.assert_allclose(after, middle + added, **EXACT)
    for layer in few:
        np.testing.assert_allclose(alone["residual"][layer], captures["residual"][layer], **EXACT)


def test_completions_are_captured_beside_requests_that_are_not(llm: LLM, name: str) -> None:
    prompt, greedy = tiny_prompt(name), load_golden(name).greedy_token_ids
    prompts = [prompt, prompt[5:14], prompt[20:21], prompt]
    plain = [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    wanted = {"residual": [1], "mlp_out": 0}
    captured = [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False, capture=wanted)]
    assert [output.token_ids for output in captured] == [output.token_ids for output in plain]
    assert captured[0].token_ids == greedy
    for output, before, ids in zip(captured, plain, prompts, strict=True):
        assert before.captures is None and output.captures is not None
        assert output.captures.positions.tolist() == list(range(len(ids) + 15)), "the last token is not run"
    for output in (captured[0], captured[3]):
        assert output.captures is not None
        check(output.captures, name, list(range(79)))


@pytest.mark.parametrize("positions", ["last", [-1, 7, 3], [63], "generated", [64, 42]])
def test_only_the_positions_that_are_asked_for(llm: LLM, name: str, positions: str | list[int]) -> None:
    prompt = tiny_prompt(name)
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False, capture={"residual": [0, 1]}, positions=positions)
    if isinstance(positions, str):
        expected = [63] if positions == "last" else list(range(64, 79))
    else:
        expected = sorted(position % 64 if position < 0 else position for position in positions)
    assert output.outputs[0].captures is not None
    check(output.outputs[0].captures, name, expected)


def test_the_lens_at_the_last_layer_is_the_head(llm: LLM, name: str) -> None:
    prompt, last = tiny_prompt(name)[:20], llm.info.num_layers - 1
    (captures,) = llm.capture(prompt, {"residual": last, "final": True}, use_tqdm=False)
    (rows,) = llm.logits(prompt, use_tqdm=False)
    assert rows.shape == (20, llm.info.vocab_size) and len(rows) == 20
    expected = np.asarray(llm.model_fn(llm.params, prompt))
    np.testing.assert_allclose(rows[:], expected, atol=1e-4)
    np.testing.assert_allclose(llm.unembed(captures["residual"][last]), expected, atol=1e-4)
    np.testing.assert_allclose(llm.unembed(captures.final, norm=False), expected, atol=1e-4)
    np.testing.assert_allclose(rows[-1], expected[-1], atol=1e-4)
    np.testing.assert_allclose(np.asarray(rows), np.stack(list(rows)), atol=1e-4)
    assert [len(chunk) for chunk in rows.chunks(8)] == [8, 8, 4]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_engine("llama_gqa", tmp_path_factory.mktemp("llama")) as llm:
        yield llm


def test_what_is_captured_is_not_taken_from_the_prefix_cache(llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:40]
    first = llama.capture(prompt, {"residual": 0}, use_tqdm=False)[0]
    cached = llama.stats().cached_prompt_tokens
    again = llama.capture(prompt, {"residual": 0}, use_tqdm=False)[0]
    assert llama.stats().cached_prompt_tokens == cached
    np.testing.assert_array_equal(again["residual"][0], first["residual"][0])
    last = llama.capture(prompt, {"residual": 0}, "last", use_tqdm=False)[0]
    assert llama.stats().cached_prompt_tokens == cached + 32, "all whole pages before the token that is wanted"
    np.testing.assert_allclose(last["residual"][0][0], first["residual"][0][39], atol=1e-5)


def test_requests_of_one_batch_want_different_things(llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:12]
    whole = llama.capture(prompt, {"residual": True, "attention_out": True}, use_tqdm=False)[0]
    params = SamplingParams(temperature=0, max_tokens=5, n=3, seed=1)
    (output,) = llama.generate(prompt, params, use_tqdm=False, capture={"attention_out": 1})
    for choice in output.outputs:
        assert choice.captures is not None and list(choice.captures) == ["attention_out"]
        np.testing.assert_allclose(choice.captures["attention_out"][1][:12], whole["attention_out"][1], atol=1e-5)


def test_steps_without_captures_are_those_of_an_engine_that_knows_none(tmp_path: Path) -> None:
    """Nothing is planned for captures, and what they run is theirs alone."""
    fields = FIELDS | {"enforce_eager": False}
    prompt = tiny_prompt("llama_gqa")[:12]
    with LLM(write_checkpoint("llama_gqa", tmp_path), **fields) as llm:
        llm.generate(prompt, GREEDY, use_tqdm=False)
        executables = llm._client()._loop._core._runner.device._executables  # type: ignore[union-attr]
        executables.wait()
        assert not any(executables.features.is_rare(key) for key in executables._compiles)
        (captures,) = llm.capture(prompt, {"residual": 0}, use_tqdm=False)
        assert captures["residual"][0].shape == (12, llm.info.hidden_size)
        rare = {str(key) for key in executables._compiles if executables.features.is_rare(key)}
        assert rare == {"backbone-32-captures1"}
        assert llm.stats().compiles_unforeseen == 0


def test_names_of_transformer_lens(llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:6]
    names = [f"blocks.2.{hook}" for hook in TRANSFORMER_LENS]
    (theirs,) = llama.capture(prompt, names, use_tqdm=False)
    (ours,) = llama.capture(prompt, dict.fromkeys(TRANSFORMER_LENS.values(), -1), use_tqdm=False)
    for name, point in zip(names, TRANSFORMER_LENS.values(), strict=True):
        np.testing.assert_array_equal(theirs.array(name), ours[point][2])
    assert repr(theirs).startswith("Captures(residual_before: [2], attention_out: [2]")


def test_in_a_process_of_its_own(tmp_path: Path, llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:12]
    with tiny_engine("llama_gqa", tmp_path, engine_process=True) as llm:
        (there,) = llm.capture(prompt, {"residual": True}, [2, -1], use_tqdm=False)
    (here,) = llama.capture(prompt, {"residual": True}, [2, 11], use_tqdm=False)
    assert there.positions.tolist() == [2, 11]
    for layer, array in here["residual"].items():
        np.testing.assert_allclose(there["residual"][layer], array, atol=1e-5)


@pytest.mark.parametrize(
    ("capture", "positions", "said"),
    [
        ({"residuals": 1}, "all", r"capture has 'residuals'; did you mean 'residual'\?; accepted are residual_before"),
        ({"residual": 9}, "all", "capture has layer 9 of 'residual'; layers go from 0 to 2"),
        ({"residual": []}, "all", r"capture has \[\] for 'residual'; it must be a layer, a list of layers, or True"),
        ({"residual": "3"}, "all", "capture has '3' for 'residual'"),
        ({"final": 3}, "all", "capture has 3 for 'final', which is of no layer; it must be True"),
        ({}, "all", "capture names no activation; it must have one"),
        (
            ["blocks.1.hook_z"],
            "all",
            r"capture has 'blocks\.1\.hook_z'; in a list accepted are blocks\.N\.hook_resid_pre",
        ),
        ({"blocks.1.hook_mlp_out": 1}, "all", "names go into a list"),
        ({"residual": 1}, "first", "positions is 'first'; it must be 'all', 'prompt'"),
        ({"residual": 1}, [1.5], r"positions is \[1\.5\]"),
        (
            {"residual": 1},
            [-7],
            "positions has -7; of a prompt of 6 tokens, in a context of 128, they go from -6 to 127",
        ),
    ],
)
def test_what_is_not_there_is_refused(llama: LLM, capture: Any, positions: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llama.generate(tiny_prompt("llama_gqa")[:6], GREEDY, use_tqdm=False, capture=capture, positions=positions)


def test_more_than_there_is_room_for_is_refused(llama: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2 * 4 * llama.info.max_num_batched_tokens * llama.info.hidden_size
    monkeypatch.setattr("jaxllm.engine.doors.sequences.MOST_CAPTURED_BYTES", room)
    with pytest.raises(InvalidRequestError, match="capture asks for 3 activations; accepted are up to 2 at a time"):
        llama.capture([1, 2], {"residual": True}, use_tqdm=False)
    assert len(llama.capture([1, 2], {"residual": [0, 1]}, use_tqdm=False)) == 1


def test_activations_of_another_width_have_no_logits(llama: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"activations has the shape \[3, 5\]; the last axis must be"):
        llama.unembed(np.zeros((3, 5)))
    assert llama.unembed(np.zeros((0, llama.info.hidden_size))).shape == (0, llama.info.vocab_size)
    assert llama.unembed(np.zeros((2, 70, llama.info.hidden_size))).shape == (2, 70, llama.info.vocab_size)
