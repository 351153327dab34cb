"""Functions of the caller's own choose what the same in NumPy chooses, beside requests that use none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, AsyncLLM, ConfigError, InvalidRequestError, SamplingParams, compat
from jaxllm.requests.structured_outputs import StructuredOutputs
from tests.reference.tiny import tiny_prompt, write_checkpoint
from tests.research.inside import tokens_of
from tests.research.processors import PROCESSORS, by_hand
from tests.serving.mixed_requests import write_model
from tests.support.sizes import FIELDS, few_pages
from tests.support.tiny_engine import tiny_engine

COUNT = 9
CHOICES: list[dict[str, dict[str, Any]]] = [
    {"fresh": {}},
    {"nudge": {"ids": [7, 11], "by": 9.5, "late": True}},
    {"stripes": {}},
    {"stripes": {}, "nudge": {"ids": np.array([20, 21]), "by": 3}, "fresh": {}},
]


def greedy(chosen: Any = (), **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logits_processors=chosen, **fields)


@pytest.fixture(scope="module", params=["llama_gqa", "lfm2"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, **FIELDS, logits_processors=PROCESSORS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_engine("llama_gqa", tmp_path_factory.mktemp("llama"), logits_processors=PROCESSORS) as llm:
        yield llm


def test_tokens_are_those_that_numpy_chooses(llm: LLM, name: str) -> None:
    """In one batch with requests that use none, and then in slots that others have used."""
    prompts = [tiny_prompt(name)[:40], tiny_prompt(name)[3:9]]
    plain = tokens_of(llm, prompts, [greedy()] * 2)
    for prompt in prompts:
        expected = [by_hand(llm, prompt, COUNT, chosen) for chosen in CHOICES]
        assert len({tuple(tokens) for tokens in expected}) == len(CHOICES), "each changes something else"
        asked = [prompt] * len(CHOICES) + prompts
        params = [*map(greedy, CHOICES), greedy(), greedy()]
        assert tokens_of(llm, asked, params) == expected + plain
        assert tokens_of(llm, asked[::-1], params[::-1]) == (expected + plain)[::-1]
    assert tokens_of(llm, prompts * 2, [greedy()] * 4) == plain * 2


@pytest.mark.parametrize(
    "way",
    [
        {"decode_steps": 4},
        {"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
    ],
)
def test_several_tokens_a_step_and_drafts(way: dict[str, Any], llama: LLM, tmp_path: Path) -> None:
    prompt, path = tiny_prompt("llama_gqa")[:20], write_checkpoint("llama_gqa", tmp_path / "model")
    if "method" in way.get("speculative_config", {}):
        way = {"speculative_config": way["speculative_config"] | {"model": str(path)}}
    expected = [by_hand(llama, prompt, COUNT, chosen) for chosen in CHOICES[:3]]
    plain = tokens_of(llama, [prompt], [greedy()])
    with LLM(path, **FIELDS, **way, logits_processors=PROCESSORS) as other:
        found = tokens_of(other, [prompt] * 4, [*map(greedy, CHOICES[:3]), greedy()])
    assert found == expected + plain


def test_penalties_and_biases_come_after(llama: LLM) -> None:
    prompt, chosen = tiny_prompt("llama_gqa")[:12], CHOICES[1]

    def then(logits: np.ndarray, tokens: list[int]) -> np.ndarray:
        logits, seen = logits.copy(), list(set(tokens))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.7, logits[seen] * 1.7)
        logits[5] += 2.0
        return logits

    params = greedy(chosen, repetition_penalty=1.7, logit_bias={5: 2.0})
    assert tokens_of(llama, [prompt], [params]) == [by_hand(llama, prompt, COUNT, chosen, then)]


def test_drawn_tokens_are_of_the_processed_distribution(llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:12]
    params = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True, logits_processors=["stripes"], seed=4, n=3)
    (output,) = llama.generate(prompt, params, use_tqdm=False)
    for choice in output.outputs:
        assert [token % 2 for token in choice.token_ids] == [position % 2 for position in range(12, 52)]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3


def test_logprobs_are_those_of_the_raw_distribution(llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:12]
    (output,) = llama.generate(prompt, greedy(CHOICES[3], logprobs=2), use_tqdm=False)
    (choice,) = output.outputs
    (rows,) = llama.logits(prompt + choice.token_ids[:-1], list(range(11, 11 + COUNT)), use_tqdm=False)
    logits = rows[:].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for token, entries, expected in zip(choice.token_ids, choice.logprobs or [], logprobs, strict=True):
        np.testing.assert_allclose(entries[token].logprob, expected[token], atol=1e-4)
        assert max(entries.values(), key=lambda entry: entry.logprob).logprob == pytest.approx(expected.max(), abs=1e-4)


def test_a_request_that_was_preempted_goes_on_alike(tmp_path: Path, llama: LLM) -> None:
    prompts = [tiny_prompt("llama_gqa")[i : i + 30] for i in range(4)]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logits_processors=chosen) for chosen in CHOICES
    ]
    expected = tokens_of(llama, prompts, params)
    with few_pages(17), tiny_engine("llama_gqa", tmp_path, logits_processors=PROCESSORS) as other:
        found = tokens_of(other, prompts, params)
        assert other.stats().num_preemptions > 0
    assert found == expected


def test_a_grammar_has_the_last_word(tmp_path: Path) -> None:
    fields = FIELDS | {"model": str(write_model(tmp_path)), "skip_tokenizer_init": False}

    def only(logits: Any, state: Any, *, token: Any = 0) -> Any:
        return jnp.where(jnp.arange(logits.shape[0]) == token, 50.0, logits)

    with LLM(**fields, logits_processors=[only]) as llm:
        tokenizer = llm.get_tokenizer()
        b, z = (tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "bz")

        def answer(token: int) -> str:
            grammar = StructuredOutputs(regex="[abc]{6}")
            params = greedy({"only": {"token": token}}, structured_outputs=grammar)
            return llm.generate("ab", params, use_tqdm=False)[0].outputs[0].text

        assert answer(b) == "bbbbbb"
        assert set(answer(z)) <= set("abc") and len(answer(z)) == 6


def test_requests_without_run_what_they_run_in_an_engine_without(tmp_path: Path) -> None:
    fields = FIELDS | {"enforce_eager": False}
    prompt, sampled = tiny_prompt("llama_gqa")[:12], SamplingParams(max_tokens=3)
    with LLM(write_checkpoint("llama_gqa", tmp_path), **fields, logits_processors=PROCESSORS) as llm:
        llm.generate([prompt] * 2, [greedy(), sampled], use_tqdm=False)
        executables = llm._client()._loop._core._runner.device._executables  # type: ignore[union-attr]
        executables.wait()
        assert not any(executables.features.is_rare(key) for key in executables._compiles)
        llm.generate(prompt, greedy(["fresh"]), use_tqdm=False)
        found = {str(key) for key in executables._compiles if executables.features.is_rare(key)}
        assert found == {"put-processors", "head-8-sampled+processors", "decode-8-sampled+processors"}
        assert llm.stats().compiles_unforeseen == 0


def test_another_engines_functions_are_not_taken_for_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executables are kept between starts, but for those that have somebody's functions in them."""
    monkeypatch.setattr(compat, "compile_cache", lambda: tmp_path / "kept")
    fields = FIELDS | {"enforce_eager": False}
    path, prompt = write_checkpoint("llama_gqa", tmp_path / "model"), tiny_prompt("llama_gqa")[:6]
    found = []
    for wanted in (3, 8):
        with LLM(path, **fields, logits_processors=[always_of(wanted)]) as llm:
            found.append(tokens_of(llm, [prompt], [greedy(["always"])])[0])
    assert found == [[3] * COUNT, [8] * COUNT]


def always_of(wanted: int) -> Any:
    salt = time.time() % 1  # what XLA finds in its own cache is not kept again

    def always(logits: Any, state: Any) -> Any:
        return logits.at[wanted].set(99.0 + salt)

    return always


def test_with_asyncio(tmp_path: Path, llama: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:12]

    async def run(engine: AsyncLLM) -> list[int]:
        async for output in engine.generate(prompt, greedy(CHOICES[0])):
            last = output
        return last.outputs[0].token_ids

    expected = tokens_of(llama, [prompt], [greedy(CHOICES[0])])[0]
    engine = AsyncLLM(model=str(write_checkpoint("llama_gqa", tmp_path)), **FIELDS, logits_processors=PROCESSORS)
    try:
        assert asyncio.run(run(engine)) == expected
        engine.restart()
        assert asyncio.run(run(engine)) == expected
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (["frsh"], r"logits_processors has 'frsh'; did you mean 'fresh'\?; this engine has fresh, nudge, stripes"),
        ({"nudge": {"buy": 2}}, r"logits_processors has 'buy' for nudge; did you mean 'by'\?; it takes ids, by, late"),
        ({"nudge": {"by": [1, 2]}}, r"has \[1, 2\] for 'by' of nudge; it must be float32 of the shape \[\]"),
        ({"nudge": {"ids": [1.5, 2]}}, r"has \[1\.5, 2\.0\] for 'ids' of nudge; it must be int32 of the shape \[2\]"),
        ({"nudge": {"ids": [2**40, 2]}}, r"it must be int32 of the shape \[2\]"),
        ({"nudge": {"by": "a"}}, "has 'a' for 'by' of nudge; it must be float32"),
        ({"fresh": {"by": 1}}, "has 'by' for fresh; it takes no arguments"),
        ("fresh", "logits_processors is 'fresh'; it must be a list of names, or a dictionary of names and arguments"),
        ([3], r"logits_processors is \[3\]; it must be a list of names"),
        ({"nudge": 2}, "it must be a list of names, or a dictionary"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(llama: LLM, chosen: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llama.generate([[1, 2, 3]], greedy(chosen), use_tqdm=False)


def narrow(logits: Any, state: Any) -> Any:
    return logits[:5]


def branches(logits: Any, state: Any) -> Any:
    return logits if state.length > 3 else -logits


def unbound(logits: Any, state: Any, *, by: Any) -> Any:
    return logits + by


def worded(logits: Any, state: Any, *, by: Any = "much") -> Any:
    return logits


def short(logits: Any) -> Any:
    return logits


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ([narrow], r"logits_processors: narrow gives float32\[5\]; it must give logits, float32\[257\]"),
        ([branches], "logits_processors: JAX cannot trace branches: TracerBoolConversionError"),
        ([unbound], "the argument 'by' of unbound has no default value"),
        ([worded], "the argument 'by' of worded has the default 'much'; it must be a number"),
        ([short], r"logits_processors has short\(logits\); it must take \(logits, state\)"),
        ([3], r"logits_processors has 3; it must be a function"),
        ([PROCESSORS[0], PROCESSORS[0]], "logits_processors has two functions called 'fresh'"),
    ],
)
def test_functions_that_cannot_be_compiled_are_refused_at_the_start(tmp_path: Path, functions: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_engine("llama_gqa", tmp_path, logits_processors=functions)


def test_an_engine_elsewhere_takes_no_functions(tmp_path: Path) -> None:
    path = write_checkpoint("llama_gqa", tmp_path)
    with pytest.raises(
        ConfigError, match="logits_processors are functions, which reach only an engine in this process"
    ):
        LLM(path, **FIELDS, engine_process=True, logits_processors=PROCESSORS)
    with LLM(path, **FIELDS) as llm, pytest.raises(InvalidRequestError, match="'fresh', and this engine has none"):
        llm.generate([[1, 2, 3]], greedy(["fresh"]), use_tqdm=False)
