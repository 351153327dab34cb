"""The padding of a step is shared out among the requests that it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.engine.doors.beams import BeamSearchParams
from jaxllm.engine.messages import EngineRequest, TokenDelta
from tests.engine.doors.test_contract import FIELDS
from tests.reference.tiny import write_checkpoint


def padding_of_steps(engine: AsyncLLM) -> int:
    """Rows of padding in what ran all layers; a head, which pads the rows that are sampled, does not."""
    return sum(rows for bucket, rows in engine.stats().padded_tokens.items() if not bucket.startswith("head"))


def last_deltas(engine: AsyncLLM, requests: list[EngineRequest], searches: list[BeamSearchParams]) -> list[TokenDelta]:
    async def collect() -> list[TokenDelta]:
        with engine.run(requests, searches=searches) as stream:
            return [delta async for gains in stream.arrivals() for _, delta in gains if delta.finish_reason is not None]

    return asyncio.run(collect())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path: Path = write_checkpoint("llama_gqa", tmp_path_factory.mktemp("tiny"))
    engine = AsyncLLM(model=str(path), skip_tokenizer_init=True, **FIELDS)
    yield engine
    engine.shutdown()


def asked(length: int, max_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id="r", prompt_token_ids=list(range(1, length + 1)), sampling_params=params)


def test_shares_add_up_to_what_the_steps_ran(engine: AsyncLLM) -> None:
    before = padding_of_steps(engine)
    ended = last_deltas(engine, [asked(3, 4), asked(9, 11), asked(5, 7)], [])
    assert len(ended) == 3 and all(delta.padding > 0 for delta in ended)
    assert sum(delta.padding for delta in ended) == pytest.approx(padding_of_steps(engine) - before)


def test_a_search_has_the_padding_of_all_its_beams(engine: AsyncLLM) -> None:
    before = padding_of_steps(engine)
    request = asked(3, 4)
    request.sampling_params = SamplingParams(temperature=0, max_tokens=4, n=2, ignore_eos=True)
    ended = last_deltas(engine, [request], [BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)])
    assert len(ended) == 2 and ended[1].padding == 0
    assert ended[0].padding == pytest.approx(padding_of_steps(engine) - before) and ended[0].padding > 0
