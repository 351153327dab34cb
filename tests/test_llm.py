"""The notebook API and the engine loop behind it, on a tiny model."""

import asyncio
import gc
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.engine.doors.beams import BeamSearchParams
from jaxllm.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
)
from jaxllm.llm import _engines, generate
from tests.reference.tiny import tiny_config, write_checkpoint
from tests.serving.fake_engine import ByteTokenizer
from tests.support.sizes import FIELDS

VOCAB = tiny_config("llama_gqa")["vocab_size"]
CONTEXT = FIELDS["max_model_len"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama_gqa")
    write_checkpoint("llama_gqa", path)
    return path


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(directory, **FIELDS) as llm:
        yield llm


def test_one_prompt_and_many_and_dicts(llm):
    one = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    many = llm.generate([[5, 6, 7], {"prompt_token_ids": [8]}], [GREEDY, GREEDY], use_tqdm=False)
    assert len(one) == 1 and len(many) == 2
    assert one[0].outputs[0].token_ids == many[0].outputs[0].token_ids
    assert many[1].prompt_token_ids == [8]
    assert one[0].finished and one[0].outputs[0].finish_reason == "length"


def test_whole_vocabulary_prompt_logprobs(llm):
    prompt = [5, 6, 7, 8, 9]
    few, whole = (
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=n), use_tqdm=False)[0]
        for n in (2, -1)
    )
    assert len(whole.prompt_logprobs) == len(prompt) and whole.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        entry = whole.prompt_logprobs[position]
        assert len(entry) == VOCAB
        assert sum(math.exp(lp.logprob) for lp in entry.values()) == pytest.approx(1, abs=1e-4)
        assert sorted(lp.rank for lp in entry.values()) == list(range(1, VOCAB + 1))
        for token, lp in few.prompt_logprobs[position].items():
            assert entry[token].logprob == pytest.approx(lp.logprob, abs=1e-5) and entry[token].rank == lp.rank


def test_logprobs_of_named_tokens_are_those_of_the_whole_distribution(llm):
    prompt, asked = [5, 6, 7, 8], [3, VOCAB - 1, 0]
    named, plain = (
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **fields), use_tqdm=False)[
            0
        ]
        for fields in ({"logprob_token_ids": asked}, {"logprobs": 20})
    )
    tokens = named.outputs[0].token_ids
    assert tokens == plain.outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    whole = llm.generate([[*prompt, *tokens]], params, use_tqdm=False)[0].prompt_logprobs
    for step, token, entry, top in zip(
        range(3), tokens, named.outputs[0].logprobs, plain.outputs[0].logprobs, strict=True
    ):
        assert list(entry) == [token, *(other for other in asked if other != token)]
        assert entry[token] == pytest.approx(top[token], abs=1e-5)
        for other in asked:
            assert entry[other].logprob == pytest.approx(whole[len(prompt) + step][other].logprob, abs=1e-4)


def test_logprobs_of_named_tokens_come_beside_the_most_likely_ones(llm):
    prompt, asked = [5, 6, 7, 8], [3, VOCAB - 1, 0]
    both, named, plain = (
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=3, **fields), use_tqdm=False)[0].outputs[0]
        for fields in ({"logprobs": 17, "logprob_token_ids": asked}, {"logprob_token_ids": asked}, {"logprobs": 17})
    )
    for entry, of_named, top in zip(both.logprobs, named.logprobs, plain.logprobs, strict=True):
        assert list(entry) == [*top, *(token for token in of_named if token not in top)]
        assert all(entry[token] == top[token] for token in top)
        assert all(entry[token].logprob == of_named[token].logprob for token in of_named)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
@pytest.mark.parametrize("way", [{}, {"speculative_config": {"num_speculative_tokens": 2, "prompt_lookup_min": 1}}])
def test_whole_vocabularies_of_generated_tokens(directory, fields, way):
    prompt, plain = [5, 6, 7, 8], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=20, **fields)
    whole = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=-1, n=2, **fields)
    with LLM(directory, **FIELDS, **way, max_logprobs=-1) as other:
        asked, beside = other.generate([prompt, [9, 10]], [whole, plain], use_tqdm=False)
        alone, its_own = other.generate([prompt, [9, 10]], [plain, plain], use_tqdm=False)
        assert beside.outputs[0].token_ids == its_own.outputs[0].token_ids
        assert asked.outputs[0].token_ids == alone.outputs[0].token_ids
        for output in asked.outputs:
            scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
            again = other.generate([[*prompt, *output.token_ids]], scored, use_tqdm=False)[0].prompt_logprobs
            for token, entry, expected in zip(output.token_ids, output.logprobs, again[4:], strict=True):
                assert next(iter(entry)) == token and entry.keys() == expected.keys() == set(range(VOCAB))
                assert [entry[i].logprob for i in range(VOCAB)] == pytest.approx(
                    [expected[i].logprob for i in range(VOCAB)], abs=1e-4
                )
        for entry, top in zip(asked.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
            assert all(entry[token].rank == value.rank for token, value in top.items())


def test_whole_vocabularies_need_max_logprobs_of_minus_one(llm):
    with pytest.raises(InvalidRequestError, match=r"^logprobs asks for the whole vocabulary; .* at most 20 \(max_logp"):
        llm.generate([5], SamplingParams(logprobs=-1), use_tqdm=False)


def test_steps_are_counted_by_their_tokens(llm):
    before = llm.stats()
    llm.generate([[9, 8, 7, 6, 5]], GREEDY, use_tqdm=False)
    after = llm.stats()
    counts = [new - old for new, old in zip(after.steps_by_tokens, before.steps_by_tokens, strict=True)]
    assert counts[:2] == [counts[0], 1] and counts[0] >= 7 and sum(counts) == counts[0] + 1
    assert after.step_tokens - before.step_tokens == 5 + counts[0]


def test_logprobs_of_greedy_tokens_rank_first(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    output = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0]
    assert len(output.logprobs) == 6
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token and entry[token].rank == 1 and len(entry) == 3
    assert output.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    )


def test_stop_token_and_min_tokens(llm):
    free = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stop = free[2]
    first = free.index(stop)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    output = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == free[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    held = SamplingParams(temperature=0, max_tokens=8, min_tokens=6, ignore_eos=True, stop_token_ids=[stop])
    longer = llm.generate([[1, 2, 3]], held, use_tqdm=False)[0].outputs[0]
    assert stop not in longer.token_ids[:6] and longer.token_ids[:first] == free[:first]


def test_logit_bias_forces_and_forbids(llm):
    forced = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={42: 100})
    assert llm.generate([[1, 2]], forced, use_tqdm=False)[0].outputs[0].token_ids == [42] * 3
    free = llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids[0]
    banned = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={free: -100})
    assert free not in llm.generate([[1, 2]], banned, use_tqdm=False)[0].outputs[0].token_ids


def test_the_longest_context(llm):
    prompt = np.random.default_rng(0).integers(0, VOCAB, CONTEXT - 1).tolist()
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], GREEDY, "at least one token"),
        ([VOCAB], GREEDY, f"token id {VOCAB}"),
        ([1] * CONTEXT, GREEDY, f"{CONTEXT} tokens"),
        ([1], SamplingParams(logit_bias={VOCAB: 1}), "logit_bias"),
        ([1], SamplingParams(stop="x"), "tokenizer"),
        ("text", GREEDY, "skip_tokenizer_init"),
    ],
)
def test_what_cannot_be_honoured_is_refused(llm, prompt, params, says):
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate([prompt], params, use_tqdm=False)
    assert llm.generate([[1]], GREEDY, use_tqdm=False)[0].finished  # and nobody else is hurt


SEVERAL = [[5, 6, 7], [8], [9, 10]]
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
ASKED = {
    "generate": lambda llm, prompts: [o.outputs[0].token_ids for o in llm.generate(prompts, SHORT, False)],
    "one line": lambda llm, prompts: generate(prompts, "kept", detokenize=False, temperature=0, max_tokens=2),
    "beam_search": lambda llm, prompts: [
        [beam.token_ids for beam in o.outputs]
        for o in llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=2))
    ],
    "embed": lambda llm, prompts: [o.outputs.embedding for o in llm.embed(prompts, False)],
    "pool": lambda llm, prompts: [o.values.tolist() for o in llm.pool(prompts, None, False)],
    "score": lambda llm, prompts: [s.total for s in llm.score(prompts, iter([[1], [2], [3]]), False)],
    "score after one prompt": lambda llm, prompts: [s.total for s in llm.score([4], prompts, False)],
    "capture": lambda llm, prompts: [
        c["residual"][0].tolist() for c in llm.capture(prompts, {"residual": 0}, "all", False)
    ],
    "logits": lambda llm, prompts: [rows[:].tolist() for rows in llm.logits(prompts, "prompt", False)],
    "a list for each prompt": lambda llm, prompts: [
        o.outputs[0].token_ids
        for o in llm.generate(
            prompts, iter([SHORT] * 3), False, iter([None] * 3), steer=iter([None] * 3), patch=iter([None] * 3)
        )
    ],
}


@pytest.fixture
def kept(llm, monkeypatch):
    monkeypatch.setitem(_engines, ("kept", ()), llm)
    return llm


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_prompts_may_come_from_an_iterator(kept, ask):
    expected = ask(kept, SEVERAL)
    assert len(expected) == 3 and ask(kept, (prompt for prompt in SEVERAL)) == expected
    assert ask(kept, {"a": SEVERAL[0], "b": SEVERAL[1], "c": SEVERAL[2]}.values()) == expected


def test_messages_may_come_from_an_iterator(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", ByteTokenizer())
    (expected,) = llm.chat(CHAT, SHORT, False)
    assert [output.prompt for output in llm.chat(iter(CHAT), SHORT, False)] == [expected.prompt]
    several = llm.chat(map(iter, [CHAT, CHAT[:1]]), SHORT, False)
    assert [output.prompt for output in several] == [
        output.prompt for output in llm.chat([CHAT, CHAT[:1]], SHORT, False)
    ]
    assert several[0].prompt == expected.prompt != several[1].prompt


@pytest.mark.parametrize("prompts", [b"Hi", [b"Hi"], bytearray(b"Hi"), {"prompt": b"Hi"}, 5])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(llm, prompts):
    with pytest.raises(InvalidRequestError, match=r"^prompt is (bytes; it|bytearray; it|5; it)"):
        llm.generate(prompts, SHORT, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^prompt is (bytes; it|bytearray; it|5; it)"):
        llm.embed(prompts, use_tqdm=False)


def test_a_picture_is_refused_where_the_template_would_leave_it_out(llm, monkeypatch):
    texts_alone = "{% for part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    monkeypatch.setattr(llm, "tokenizer", ByteTokenizer(texts_alone))
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
    with pytest.raises(
        InvalidRequestError, match=r"^messages\[0\]\.content\[1\] is an image, and this model sees no images"
    ):
        llm.chat(asked, SHORT, False)
    for content in ("What is this?", asked[0]["content"][:1]):
        assert llm.chat([{"role": "user", "content": content}], SHORT, False)[0].prompt == "What is this?"


def test_inside_a_running_event_loop(llm):
    async def notebook_cell():
        return llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)

    assert asyncio.run(notebook_cell())[0].finished


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Undo what hides an interrupt from this process.

    A shell that starts something in the background has it ignore interrupts; and one that arrives while a
    callback of the garbage collector runs (Hypothesis installs one) is printed and forgotten.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_what_runs_and_leaves_the_rest_usable(llm):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    many = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 2000, many, use_tqdm=False)
    deadline = time.monotonic() + 5
    while (stats := llm.stats()).num_running + stats.num_waiting:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    assert len(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_several_threads_may_generate(llm):
    prompts = [[5, 6, 7], [8], [9, 10]]
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(3) as threads:
        outputs = list(threads.map(lambda prompt: llm.generate([prompt], GREEDY, use_tqdm=False), prompts))
    assert [output[0].outputs[0].token_ids for output in outputs] == alone


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_an_engine_that_is_forgotten_ends(directory, make):
    before = set(threading.enumerate())
    engine = make(model=str(directory), **FIELDS)
    assert {thread.name for thread in set(threading.enumerate()) - before} >= {"engine", "outputs"}
    del engine
    gc.collect()
    deadline = time.monotonic() + 10
    while left := [t.name for t in set(threading.enumerate()) - before if t.name in ("engine", "outputs")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_generate_one_liner(directory):
    try:
        fields = FIELDS | {"skip_tokenizer_init": False}
        with pytest.raises(CheckpointError, match="tokenizer"):
            generate("hello", str(directory), engine=fields)
    finally:
        _engines.clear()


@pytest.mark.parametrize(
    ("model", "fields", "error", "says"),
    [
        ("smollm2-135", {}, ModelNotFoundError, "smollm2-135m"),
        ("DIR", {"max_model_len": 10**9}, ConfigError, "max_model_len"),
        ("DIR", {"kv_cache_memory": 100}, ConfigError, "kv_cache_memory"),
        ("DIR", {"tensor_parallel_size": 5}, ConfigError, "tensor_parallel_size is 5"),
        ("DIR", {"attention_backend": "gpu"}, ConfigError, "needs a GPU"),
        ("DIR", {"dtyp": "float32"}, ConfigError, "did you mean 'dtype'"),
    ],
)
def test_a_config_that_cannot_be_had_is_one_line(directory, model, fields, error, says):
    with pytest.raises(error, match=says) as caught:
        LLM(directory if model == "DIR" else model, **(FIELDS | fields))
    assert "\n" not in str(caught.value)


def test_context_shrinks_to_what_fits(directory):
    with LLM(directory, **(FIELDS | {"kv_cache_memory": 80_000, "max_model_len": None})) as llm:
        assert (
            8 <= llm.info.max_model_len == llm.info.num_pages * 8 < tiny_config("llama_gqa")["max_position_embeddings"]
        )
        prompt = [1] * (llm.info.max_model_len - 4)
        full = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert len(llm.generate([prompt], full, use_tqdm=False)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("process", [False, True])
def test_closing_a_stream_frees_its_pages(directory, process):
    async def scenario():
        engine = AsyncLLM(model=str(directory), **(FIELDS | {"engine_process": process}))
        try:
            long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
            streams = [engine.stream([i + 1, 2, 3], long) for i in range(6)]
            for stream in streams:
                await anext(stream)
            for stream in streams:
                await stream.aclose()
            deadline = time.time() + 20
            while (s := engine.stats()).num_running + s.num_waiting or s.num_free_pages != s.num_pages:
                assert time.time() < deadline, s
                await asyncio.sleep(0.02)
            outputs = [output async for output in engine.generate([1, 2, 3], GREEDY)]
            assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 8
        finally:
            engine.shutdown()
        with pytest.raises(EngineDeadError):
            await anext(engine.stream([1], GREEDY))

    asyncio.run(scenario())


def test_a_full_queue_refuses(directory):
    async def scenario():
        engine = AsyncLLM(model=str(directory), **(FIELDS | {"max_num_seqs": 2, "max_num_waiting": 1}))
        try:
            long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            streams = [engine.stream([1, 2, 3], long) for _ in range(4)]
            tasks = [asyncio.create_task(anext(stream)) for stream in streams]
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(d, QueueFullError) for d in done] == [False, False, False, True]
            for stream in streams:
                await stream.aclose()
        finally:
            engine.shutdown()

    asyncio.run(scenario())


def test_a_process_that_cannot_start_says_why(directory):
    with pytest.raises(ConfigError, match="tensor_parallel_size is 5"):
        AsyncLLM(model=str(directory), **(FIELDS | {"engine_process": True, "tensor_parallel_size": 5}))


def test_a_step_that_fails_is_said_and_the_engine_can_be_started_again(directory):
    def catch_fire(*arguments):
        raise RuntimeError("the device caught fire")

    with LLM(directory, **FIELDS) as llm:
        before, pages = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids, llm.info.num_pages
        llm._streams.client._loop._core._runner.dispatch = catch_fire
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"RuntimeError: the device caught fire; restart\(\)"):
                llm.generate([[5, 6, 7]] * 3, GREEDY, use_tqdm=False)
        assert llm._streams.is_dead
        llm.restart()
        assert not llm._streams.is_dead
        assert llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before
        assert llm.info.num_pages == pages


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:os.fork", "ignore:This process .* is multi-threaded, use of fork")
def test_a_forked_process_is_told_that_the_engine_is_elsewhere(llm):
    expected = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            with pytest.raises(EngineDeadError, match=r"forked from .* spawn"):
                llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
            llm.shutdown()  # ends nothing of the parent's
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
