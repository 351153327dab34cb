"""What an AsyncLLM promises, held against the real one and against the one that the server's tests stand on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.engine.doors.beams import BeamSearchParams
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxllm.requests.outputs import PoolingParams
from tests.reference.tiny import write_checkpoint
from tests.serving.fake_engine import FakeEngine, byte_letters

CONTEXT = 256
LIMIT = 48
FIELDS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": CONTEXT, "max_num_seqs": 8,
    "max_num_waiting": LIMIT - 8, "max_num_batched_tokens": 64, "kv_cache_memory": "16MiB", "block_size": 16,
    "decode_buckets": (), "prefill_buckets": (),
}  # fmt: skip
PATIENCE = 60.0
PROMPT = [1, 2, 3]
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
Start = Callable[[], AsyncLLM]


@pytest.fixture(scope="module", params=["real", "fake"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    if request.param == "fake":
        return lambda: FakeEngine(reply="The capital of France is Paris. " * 7, delay=0.002, queue_limit=LIMIT)
    path = write_checkpoint("llama_gqa", tmp_path_factory.mktemp("tiny"))
    letters = byte_letters()
    backend = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    return lambda: AsyncLLM(model=str(path), **FIELDS)


@pytest.fixture(scope="module")
def engine(start: Start) -> Iterator[AsyncLLM]:
    engine = start()
    yield engine
    engine.shutdown()


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    async def in_time() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await scenario

    return asyncio.run(in_time())


async def collected(stream: AsyncIterator[tuple[int, TokenDelta]]) -> dict[int, list[TokenDelta]]:
    found: dict[int, list[TokenDelta]] = {}
    async for choice, delta in stream:
        found.setdefault(choice, []).append(delta)
    return found


def reasons(found: dict[int, list[TokenDelta]]) -> list[str | None]:
    """How each ended; only its last delta says so."""
    assert all(delta.finish_reason is None for deltas in found.values() for delta in deltas[:-1])
    return [found[choice][-1].finish_reason for choice in sorted(found)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def sequences(params: SamplingParams, *prompts: list[int]) -> list[EngineRequest]:
    return [EngineRequest(request_id="r", prompt_token_ids=ids, sampling_params=params) for ids in prompts]


async def becomes_idle(engine: AsyncLLM) -> None:
    deadline = time.monotonic() + PATIENCE
    while (stats := engine.stats()).num_running + stats.num_waiting:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


def test_deltas_add_up_to_the_output(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        found = await collected(engine.stream(PROMPT, SHORT))
        assert list(found) == [0] and reasons(found) == ["length"]
        assert len(tokens(found[0])) == 12 and found[0][0].first_scheduled_time is not None
        outputs = [output async for output in engine.generate({"prompt_token_ids": PROMPT}, SHORT, request_id="mine")]
        last = outputs[-1]
        assert last.finished and last.request_id == "mine" and last.prompt_token_ids == PROMPT
        assert last.outputs[0].text == "".join(delta.text for delta in found[0]) != ""
        assert last.outputs[0].token_ids == tokens(found[0])

    run(scenario())


def test_choices_are_told_apart(engine: AsyncLLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=5, ignore_eos=True)
    found = run(collected(engine.stream(PROMPT, params)))
    assert sorted(found) == [0, 1, 2] and reasons(found) == ["length"] * 3
    assert [len(tokens(deltas)) for deltas in found.values()] == [5, 5, 5]


def test_a_stop_string_ends_the_text_before_it(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        whole = "".join(delta.text for delta in (await collected(engine.stream(PROMPT, LONG)))[0])
        stop = next(whole[at : at + 2] for at in range(3, 190) if whole[at : at + 2].isprintable())
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=stop)
        (deltas,) = (await collected(engine.stream(PROMPT, params))).values()
        assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)

    run(scenario())


def test_log_probabilities(engine: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (deltas,) = run(collected(engine.stream(PROMPT, params))).values()
    steps = [step for delta in deltas for step in delta.logprobs or []]
    assert [step[0][0] for step in steps] == tokens(deltas)
    for step in steps:
        assert 2 <= len(step) <= 3 and len({token for token, _ in step}) == len(step)
        assert all(isinstance(entry.decoded_token, str) and entry.logprob <= 0 for _, entry in step)
        assert all(entry.token_bytes.decode(errors="replace") == entry.decoded_token for _, entry in step)
        ranks = [entry.rank for _, entry in step[1:]]
        assert ranks == sorted(ranks)
    assert deltas[0].prompt_logprobs is not None
    first, *others = deltas[0].prompt_logprobs.steps()
    assert first is None and [entries[0][0] for entries in others if entries] == PROMPT[1:]
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    assert all(delta.logprobs is None for delta in run(collected(engine.stream(PROMPT, SHORT)))[0])


def test_pooling_keeps_the_order(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        prompts = [[1 + at % 50, 2, 3] for at in range(LIMIT + 10)]  # more than may wait at once
        outputs = await engine.pool(prompts)
        alone = [(await engine.pool([prompts[at]]))[0] for at in (0, 30)]
        assert all(
            output.values.dtype == np.float32 and output.values.shape == (engine.info.hidden_size,)
            for output in outputs
        )
        np.testing.assert_allclose([outputs[0].values, outputs[30].values], [a.values for a in alone], atol=1e-4)
        (some,) = await engine.pool([PROMPT], PoolingParams(kind="logits", token_ids=(9, 3)))
        assert some.values.shape == (2,)

    run(scenario())


@pytest.mark.parametrize(
    ("prompt", "says"),
    [([], "at least one token"), ([0] * (CONTEXT + 1), f"{CONTEXT + 1} tokens"), ([1, 10**6], "id 1000000")],
)
def test_what_cannot_be_honoured_is_refused(engine: AsyncLLM, prompt: list[int], says: str) -> None:
    async def scenario() -> None:
        for call in (anext(engine.stream(prompt, SHORT)), engine.pool([PROMPT, prompt])):
            with pytest.raises(InvalidRequestError, match=says) as caught:
                await call
            assert caught.value.param == "prompt"
        await becomes_idle(engine)

    run(scenario())


def test_a_full_queue_refuses_the_whole_call(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        with engine.run(sequences(LONG, *[PROMPT] * (LIMIT - 1))):
            with pytest.raises(QueueFullError, match=f"at most {LIMIT}"):
                engine.run(sequences(SHORT, PROMPT, PROMPT)).__enter__()
            assert reasons(await collected(engine.stream(PROMPT, SHORT))) == ["length"]
        await becomes_idle(engine)

    run(scenario())


def test_many_requests_are_one_stream(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        alone = [tokens((await collected(engine.stream(prompt, SHORT)))[0]) for prompt in ([5, 6], [7])]
        twice = SamplingParams(n=2, temperature=0, max_tokens=12, ignore_eos=True)
        found: dict[int, list[TokenDelta]] = {}
        with engine.run(sequences(twice, [5, 6], [7]), at_once=3) as stream:
            async for events in stream.arrivals():
                assert events
                for index, delta in events:
                    found.setdefault(index, []).append(delta)
        assert [tokens(found[index]) for index in range(4)] == [alone[0], alone[0], alone[1], alone[1]]
        assert reasons(found) == ["length"] * 4

    run(scenario())


def test_silence_is_told(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        with engine.run(sequences(SHORT, PROMPT)) as stream:
            while stream.num_unfinished:
                await stream.next()
            assert await stream.next(timeout=0.01) == []

    run(scenario())


def test_closing_the_iterator_aborts(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        stream = engine.stream(PROMPT, SamplingParams(n=3, temperature=0, max_tokens=200, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        await becomes_idle(engine)

    run(scenario())


@pytest.mark.parametrize("n", [1, 2])
def test_aborting_a_request_leaves_those_alone_whose_name_begins_like_it(engine: AsyncLLM, n: int) -> None:
    async def scenario() -> list[list[str | None]]:
        streams = [engine.stream([1, 2, 3], SHORT, request_id=name) for name in ("a-b", "a-0")]
        long = SamplingParams(n=n, temperature=0, max_tokens=200, ignore_eos=True)
        streams.append(engine.stream([1, 2, 3], long, request_id="a"))
        for stream in streams:
            await anext(stream)
        await engine.abort("a")
        return [reasons(found) for found in await asyncio.gather(*map(collected, streams))]

    assert run(scenario()) == [["length"], ["length"], ["abort"] * n]


def test_requests_of_one_name_do_not_mix(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        prompts = [[5, 6], [7]]
        alone = [tokens((await collected(engine.stream(prompt, SHORT)))[0]) for prompt in prompts]
        named = [collected(engine.stream(prompt, SHORT, request_id="same")) for prompt in prompts]
        assert [tokens(found[0]) for found in await asyncio.gather(*named)] == alone

    run(scenario())


def test_aborting_a_stream_ends_all_that_has_not_finished(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        found: dict[int, list[TokenDelta]] = {}
        with engine.run([*sequences(LONG, *[PROMPT] * 4), *sequences(SHORT, PROMPT)], at_once=3) as stream:
            for index, delta in await stream.next():
                found.setdefault(index, []).append(delta)
            stream.abort()
            async for events in stream.arrivals():
                for index, delta in events:
                    found.setdefault(index, []).append(delta)
        assert reasons(found) == ["abort"] * 5
        await becomes_idle(engine)

    run(scenario())


def test_beams_come_whole(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        search = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
        requests = sequences(SamplingParams(n=2, logprobs=1), [5, 6], [7])
        with engine.run(requests, searches=[search] * 2) as stream:
            events = [event async for batch in stream.arrivals() for event in batch]
        assert sorted(index for index, _ in events) == [0, 1, 2, 3]
        for _, delta in events:
            assert len(delta.token_ids) == 4 and delta.finish_reason == "length"
            assert [step[0][0] for step in delta.logprobs or []] == delta.token_ids
        with engine.run(requests, searches=[search] * 2) as stream:
            stream.abort()
            events = [event async for batch in stream.arrivals() for event in batch]
        assert [delta.finish_reason for _, delta in events] == ["abort"] * 4
        await becomes_idle(engine)

    run(scenario())


def test_shutdown_ends_what_is_open(start: Start) -> None:
    engine = start()

    async def scenario() -> None:
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        assert not engine.is_dead
        engine.shutdown()
        for open_or_new in (stream, engine.stream(PROMPT, SHORT)):
            with pytest.raises(EngineDeadError):
                await collected(open_or_new)
        with pytest.raises(EngineDeadError):
            await engine.pool([PROMPT])
        assert engine.is_dead
        engine.shutdown()

    run(scenario())


def test_shutdown_ends_the_process_that_renders_templates() -> None:
    engine = FakeEngine()
    assert engine.tokenizer is not None
    assert "Hi" in engine.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    [process] = engine.tokenizer._template_processes.processes.processes
    assert process.poll() is None
    engine.shutdown()
    assert process.poll() is not None
