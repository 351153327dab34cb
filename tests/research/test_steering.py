"""Requests are steered as hooks of transformers steer them, beside others that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from jaxllm import LLM, CheckpointError, InvalidRequestError, SamplingParams, Steer
from jaxllm.requests.steering import steers_of
from tests.reference.inside import STEERED, STEERED_LAYER, STEERED_POSITIONS, load_inside, steering_vector
from tests.reference.tiny import tiny_prompt
from tests.research.inside import GREEDY, tokens_of
from tests.support.tiny_engine import tiny_engine


@pytest.fixture(scope="module", params=STEERED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def steer_of(llm: LLM, which: str, scale: float = 1.0) -> Steer:
    """What the golden is steered by."""
    positions = STEERED_POSITIONS[which]
    ends = "all" if which == "all" else (positions.start, positions.stop)
    return Steer(STEERED_LAYER, steering_vector(llm.info.hidden_size) / scale, scale, ends)


def test_vectors_may_come_from_an_iterator() -> None:
    one, other = (Steer(layer, np.ones(4)) for layer in (0, 1))
    assert steers_of(iter([one, other]), 2) == [[one, other]] * 2  # type: ignore[arg-type]
    assert steers_of(iter([None, one]), 2) == [[], [one]]  # type: ignore[arg-type]


@pytest.mark.parametrize("which", STEERED_POSITIONS)
def test_a_steered_request_is_as_transformers_has_it(llm: LLM, name: str, which: str) -> None:
    golden, prompt = load_inside(name), tiny_prompt(name)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=-1)
    (output,) = llm.generate([prompt], params, use_tqdm=False, steer=steer_of(llm, which, 4.0))
    assert output.outputs[0].token_ids == golden.steered_tokens[which]
    logits = golden.steered[which].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for position in range(1, len(prompt)):
        entry = (output.prompt_logprobs or [])[position]
        assert entry is not None
        found = [entry[token].logprob for token in range(llm.info.vocab_size)]
        np.testing.assert_allclose(found, expected[position - 1], atol=2e-4)


def test_steered_and_plain_requests_share_a_batch(llm: LLM, name: str) -> None:
    golden, prompt = load_inside(name), tiny_prompt(name)
    plain, short = tokens_of(llm, [prompt]), tokens_of(llm, [prompt[:9]])
    assert plain[0] != golden.steered_tokens["all"] != golden.steered_tokens["part"]
    prompts = [prompt, prompt, prompt[:9], prompt, prompt]
    steers = [steer_of(llm, "all"), None, [], [steer_of(llm, "part")], [steer_of(llm, "all", 2.0)]]
    expected = [golden.steered_tokens["all"], plain[0], short[0], golden.steered_tokens["part"]]
    expected.append(golden.steered_tokens["all"])
    for _ in range(3):  # with the prefixes of the time before, and in slots that others were steered in
        assert tokens_of(llm, prompts, steer=steers) == expected
        assert tokens_of(llm, [prompt] * 4) == plain * 4


def test_several_tokens_a_step_and_drafts(name: str, tmp_path: Path) -> None:
    golden, prompt = load_inside(name), tiny_prompt(name)
    ways: list[dict[str, Any]] = [{"decode_steps": 4}]
    if name == "llama_gqa":
        ways.append({"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}})
    for way in ways:
        with tiny_engine(name, tmp_path / next(iter(way)), **way) as other:
            steers = [steer_of(other, "all"), steer_of(other, "part"), None]
            found = tokens_of(other, [prompt] * 3, steer=steers)
            assert found[:2] == [golden.steered_tokens["all"], golden.steered_tokens["part"]]
            assert found[2] == tokens_of(other, [prompt])[0]


def test_prefixes_are_shared_by_those_that_are_steered_alike(llama: LLM) -> None:
    prompt = [(7 * i) % 90 + 1 for i in range(40)]
    vector = np.random.default_rng(2).standard_normal(llama.info.hidden_size)

    def cached(steer: Any) -> int:
        (output,) = llama.generate([prompt], GREEDY, use_tqdm=False, steer=steer)
        return output.num_cached_tokens

    assert [cached(None), cached(None)] == [0, 32]
    assert [cached(Steer(1, vector)), cached([Steer(1, vector / 2, 2.0)])] == [0, 32]
    assert [cached(Steer(1, vector, 1.1)), cached(Steer(0, vector)), cached(Steer(1, vector, 1.0, "prompt"))] == [0] * 3


def test_vectors_of_a_layer_add_up_and_generated_tokens_alone_may_be_steered(llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:20]
    one, other = np.random.default_rng(3).standard_normal((2, llama.info.hidden_size))
    several = [Steer(1, one), Steer(-2, other, 2.0)]
    assert tokens_of(llama, [prompt], steer=several) == tokens_of(llama, [prompt], steer=Steer(1, one + 2 * other))
    plain = tokens_of(llama, [prompt])[0]
    (later,) = tokens_of(llama, [prompt], steer=Steer(2, 5 * one, positions="generated"))
    assert later[0] == plain[0] and later != plain
    assert later == tokens_of(llama, [prompt], steer=Steer(2, 5 * one, positions=(20, 96)))[0]


def test_captures_of_a_steered_layer_have_the_vector(llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:10]
    vector = np.random.default_rng(4).standard_normal(llama.info.hidden_size).astype(np.float32)
    wanted: dict[str, Any] = {"residual": [0, 1], "mlp_out": 1}
    steered, plain = (
        llama.generate([prompt], GREEDY, use_tqdm=False, capture=wanted, positions="prompt", steer=steer)[0].outputs[0]
        for steer in (Steer(1, vector), None)
    )
    assert steered.captures is not None and plain.captures is not None
    np.testing.assert_allclose(steered.captures["residual"][0], plain.captures["residual"][0], atol=1e-5)
    difference = steered.captures["residual"][1] - plain.captures["residual"][1]
    np.testing.assert_allclose(difference, np.tile(vector, (10, 1)), atol=1e-4)


def write_control_vector(path: Path, vectors: dict[str, np.ndarray], kind: str = "controlvector") -> Path:
    writer = GGUFWriter(path, kind)
    writer.add_string("controlvector.model_hint", "llama")
    for tensor, vector in vectors.items():
        writer.add_tensor(tensor, vector.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_control_vectors_of_a_gguf_file(llama: LLM, tmp_path: Path) -> None:
    one, other = np.random.default_rng(5).standard_normal((2, llama.info.hidden_size))
    path = write_control_vector(tmp_path / "happy.gguf", {"direction.1": one, "direction.2": other})
    prompt = tiny_prompt("llama_gqa")[:20]
    by_hand = tokens_of(llama, [prompt], steer=[Steer(1, one, 3.0), Steer(2, other, 3.0)])
    assert tokens_of(llama, [prompt], steer=llama.control_vector(path, 3.0)) == by_hand
    (last,) = llama.control_vector(str(path), layers=(2, 9))
    assert last.layer == 2 and last.scale == 1.0
    np.testing.assert_allclose(last.vector, other, rtol=1e-6)


def test_files_that_are_no_control_vectors_are_refused(llama: LLM, tmp_path: Path) -> None:
    vector = np.ones(8)
    with pytest.raises(CheckpointError, match=r"none\.gguf: no such file; accepted is a GGUF file of control vectors"):
        llama.control_vector(tmp_path / "none.gguf")
    path = write_control_vector(tmp_path / "model.gguf", {"direction.1": vector}, "llama")
    with pytest.raises(CheckpointError, match=r"its general\.architecture is 'llama'; it must be 'controlvector'"):
        llama.control_vector(path)
    path = write_control_vector(tmp_path / "odd.gguf", {"direction": vector})
    with pytest.raises(CheckpointError, match=r"tensor 'direction'; a file of control vectors has direction\.N alone"):
        llama.control_vector(path)
    path = write_control_vector(tmp_path / "one.gguf", {"direction.1": vector})
    with pytest.raises(CheckpointError, match="has no vector for the layers 2 to 3"):
        llama.control_vector(path, layers=(2, 3))


VECTOR = np.ones(64)


@pytest.mark.parametrize(
    ("steer", "said"),
    [
        (Steer(3, VECTOR), "steer has layer 3; layers go from 0 to 2"),
        (Steer(1, VECTOR[1:]), r"steer has a vector \[63\] for layer 1; it must be \[64\], and finite"),
        (Steer(1, VECTOR, np.inf), "it must be .64., and finite"),
        (
            Steer(1, VECTOR, positions="last"),
            "steer has the positions 'last'; they must be 'all', 'prompt', 'generated'",
        ),
        (Steer(1, VECTOR, positions=(5, 5)), r"steer has the positions \(5, 5\)"),
        (
            [Steer(1, VECTOR), Steer(1, VECTOR, positions="prompt")],
            "for the positions 'all' and 'prompt'; those of one",
        ),
        ([None, Steer(1, VECTOR)], "steer has 2 entries for 1 prompts; give those of all, or a list for each prompt"),
    ],
)
def test_what_cannot_steer_is_refused(llama: LLM, steer: Any, said: str) -> None:
    assert llama.info.hidden_size == 64
    with pytest.raises(InvalidRequestError, match=said):
        llama.generate([[1, 2, 3]], GREEDY, use_tqdm=False, steer=steer)
