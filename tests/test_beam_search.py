"""Beam search through both front doors, on a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.engine.doors.beams import BeamSearchParams
from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import InvalidRequestError
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint("llama_gqa", path)
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), **FIELDS) as llm:
        yield llm


def test_one_beam_is_greedy(llm: LLM) -> None:
    (output,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    assert output.outputs[0].token_ids == llm.generate([PROMPT], greedy, use_tqdm=False)[0].outputs[0].token_ids


def test_a_search_needs_no_more_log_probabilities_than_may_be_shown(llm: LLM, directory: Path) -> None:
    search = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    texts = [beam.token_ids for beam in llm.beam_search([PROMPT], search)[0].outputs]
    with LLM(str(directory), **FIELDS, max_logprobs=2) as other:
        beams = other.beam_search([PROMPT], search)[0].outputs
        with pytest.raises(InvalidRequestError, match=r"^logprobs asks for 3; this engine gives at most 2"):
            other.generate([PROMPT], SamplingParams(logprobs=3), use_tqdm=False)
    assert [beam.token_ids for beam in beams] == texts
    assert all(len(step) <= 3 for beam in beams for step in beam.logprobs)


def test_a_beams_log_probability_is_that_of_its_text(llm: LLM) -> None:
    outputs = llm.beam_search([PROMPT, PROMPT[::-1]], BeamSearchParams(beam_width=3, max_tokens=4))
    assert [len(output.outputs) for output in outputs] == [3, 3]
    for output in outputs:
        for beam in output.outputs:
            ids = [*output.prompt_token_ids, *beam.token_ids]
            scored = llm.generate(
                [ids], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False
            )
            entries = (scored[0].prompt_logprobs or [])[len(output.prompt_token_ids) :]
            tail = zip(beam.token_ids, entries, strict=True)
            total = sum((entry or {})[token].logprob for token, entry in tail)
            assert beam.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_both_front_doors_agree(llm: LLM, directory: Path) -> None:
    search = BeamSearchParams(beam_width=3, max_tokens=5)
    (expected,) = llm.beam_search([PROMPT], search)
    engine = AsyncLLM(model=str(directory), **FIELDS)

    async def run() -> list[tuple[int, list[int]]]:
        params = SamplingParams(n=3, detokenize=False)
        request = EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params)
        with engine.run([request], searches=[search]) as stream:
            return [(choice, delta.token_ids) async for events in stream.arrivals() for choice, delta in events]

    try:
        assert asyncio.run(run()) == [(beam.index, beam.token_ids) for beam in expected.outputs]
    finally:
        engine.shutdown()


def test_a_search_ends_where_the_context_is_full(llm: LLM) -> None:
    room = llm.info.max_model_len - len(PROMPT)
    (output,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=10**6, ignore_eos=True))
    assert [(len(beam.token_ids), beam.finish_reason) for beam in output.outputs] == [(room, "length")] * 2
    with pytest.raises(InvalidRequestError, match="prompt has"):
        llm.beam_search([PROMPT * 100], BeamSearchParams(beam_width=2))
