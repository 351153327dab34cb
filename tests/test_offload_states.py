"""Prompts of models with recurrent layers find pages and states again in host memory and on disk, as other prompts do.

What follows a restored state is what follows one that was computed; tiny random models at float32. The oracle is an
engine that shares no prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, EngineConfig, SamplingParams
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.features.offload.pages import CHECKSUM
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.errors import ConfigError
from tests.reference.tiny import tiny_config, write_checkpoint
from tests.support.sizes import FIELDS, PAGE
from tests.test_offload import GREEDY, ask, cached, said, start, wait_for

MODELS = ("lfm2", "qwen3_5", "mamba2", "falcon_h1")
"""Short convolutions, the gated delta rule, a state space without any attention, and one beside attention."""
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("lfm2", tmp_path_factory.mktemp("lfm2") / "lfm2")


@pytest.fixture(scope="module")
def alone(lfm2: Path) -> Iterator[LLM]:
    with LLM(str(lfm2), **FIELDS, enable_prefix_caching=False) as llm:
        yield llm


def prompts_of(directory: Path, count: int = 3, length: int = 100, seed: int = 3) -> list[list[int]]:
    vocab = tiny_config(directory.name)["vocab_size"]
    return np.random.default_rng(seed).integers(3, vocab, (count, length)).tolist()


def expected(directory: Path, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    with LLM(str(directory), **FIELDS, enable_prefix_caching=False) as llm:
        return said(ask(llm, prompts, params))


def state_bytes(directory: Path) -> int:
    return plan_engine(EngineConfig(model=str(directory), **FIELDS)).state_bytes


def room_for(directory: Path, pages: int, states: int) -> str:
    plan = plan_engine(EngineConfig(model=str(directory), **FIELDS))
    return str(pages * PAGE * plan.kv_bytes_per_token + states * plan.state_bytes)


def inside(llm: LLM, ask: Callable[[EngineCore], Any]) -> Any:
    return llm._streams.client.ask(ask)  # type: ignore[attr-defined]


def wait_until_saved(llm: LLM) -> None:
    """Until all that an idle engine copies to disk is there."""
    tiers = inside(llm, lambda core: core.features["offload"].tiers)
    wait_for(lambda: not tiers.has_unsaved)
    tiers.wait()


@contextmanager
def few_states(directory: Path, count: int, pages: int = 100, **fields: Any) -> Iterator[LLM]:
    """An engine whose devices keep states of so many prefixes; in the end no row and no page is lost."""
    with start(directory, pages, state_cache_memory=count * state_bytes(directory), **fields) as llm:
        yield llm
        inside(llm, lambda core: core._pool.check([]))
        states = inside(llm, lambda core: core.features["states"].cache)
        states.check([])
        assert states.num_rows == count


def test_a_prompt_is_found_again_in_host_memory(directory: Path) -> None:
    """After its pages, and the states with them, have been given away."""
    prompts = prompts_of(directory)
    wanted = expected(directory, prompts)
    with start(directory) as llm:
        first, second = ask(llm, prompts), ask(llm, prompts)
        stats = llm.stats()
    assert cached(first) == [0] * 3 and cached(second) == [96] * 3
    assert said(first) == said(second) == wanted
    assert 2 * 96 <= stats.offload_hits <= 3 * 96


def test_another_process_finds_what_an_idle_one_has_saved(directory: Path, tmp_path: Path) -> None:
    prompts = prompts_of(directory)
    folder = {"kv_offload_dir": tmp_path / "pages"}
    with start(directory, **folder) as llm:
        first = ask(llm, prompts[:1])
        wait_until_saved(llm)
    with start(directory, **folder) as llm:
        second = ask(llm, prompts[1:] + prompts[:1])
        assert llm.stats().offload_hits == 96
    assert cached(second) == [0, 0, 96] and said(second[2:]) == said(first)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1])
def test_prefixes_about_a_pages_end(lfm2: Path, alone: LLM, length: int) -> None:
    prompts = prompts_of(lfm2, 1, length) + prompts_of(lfm2, 2)
    with start(lfm2, 18) as llm:
        first = ask(llm, prompts)
        again = ask(llm, prompts[:1])
    assert said(again) == said(first[:1]) == said(ask(alone, prompts[:1]))
    assert cached(again) == [(length - 1) // PAGE * PAGE]


def test_the_state_is_given_away_and_its_pages_are_not(lfm2: Path, alone: LLM) -> None:
    prompts = prompts_of(lfm2)
    with few_states(lfm2, 2) as llm:
        first = ask(llm, prompts)
        before = llm.stats()
        second = ask(llm, prompts)
        after = llm.stats()
        assert cached(second) == [96] * 3 and said(second) == said(first) == said(ask(alone, prompts))
        assert after.num_free_pages == after.num_pages and before.num_host_pages > 0
        assert after.offload_hits - before.offload_hits == 3 * 96


def test_pages_beyond_the_last_state_stay_where_they_are(lfm2: Path, alone: LLM) -> None:
    """Two prompts part in the middle of what the first one left: there is a state once the second has come by."""
    (prompt,), others = prompts_of(lfm2, 1), prompts_of(lfm2, 2, seed=4)
    parting = [prompt[:60] + prompts_of(lfm2, 1, 30, seed=seed)[0] for seed in (5, 6)]
    with start(lfm2) as llm:
        ask(llm, [prompt, *others])
        second = ask(llm, [parting[0], *others, parting[1]])
    assert said(second) == said(ask(alone, [parting[0], *others, parting[1]]))
    assert cached(second)[0] == 32, "the state at the end of the first step's tokens"
    assert cached(second)[3] == 56, "the last full page that all have in common"


def test_requests_that_share_a_prefix_go_on_from_one_state(lfm2: Path, alone: LLM) -> None:
    (stem,), others = prompts_of(lfm2, 1, 49), prompts_of(lfm2, 2, seed=4)
    prompts = [[*stem, token] for token in range(3, 8)]
    with few_states(lfm2, 2, 18) as llm:
        ask(llm, [stem, *others])
        together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert said(together) == said(ask(alone, prompts)) and cached(together) == [48] * 5


@pytest.mark.parametrize("model", ["lfm2", "qwen3_5", "mamba2"])
def test_requests_beside_each_other_and_preempted(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With few pages and few rows for states nothing is lost, and each says what it says alone."""
    directory = write_checkpoint(model, tmp_path / model)
    prompts = prompts_of(directory, 12, 60)
    wanted = expected(directory, prompts, SAMPLED)
    with few_states(directory, 2, 20, kv_offload_memory=room_for(directory, 200, 300)) as llm:
        for _ in range(3):
            assert said(llm.generate(prompts, SAMPLED, use_tqdm=False)) == wanted
        stats = llm.stats()
    assert stats.num_preemptions > 0 and stats.offload_hits > 0
    assert "the KV cache is broken" not in caplog.text


@pytest.mark.parametrize("count", [1, 2, 5])
def test_prompts_at_random_with_tiny_budgets(lfm2: Path, alone: LLM, count: int, tmp_path: Path) -> None:
    """Prefixes of one another, asked some at a time; pages and states go to host memory, to disk and back."""
    dice = np.random.default_rng(count)
    (stem,) = prompts_of(lfm2, 1, 90)
    rounds = [
        [stem[: dice.integers(1, 90)] + dice.integers(3, 90, dice.integers(0, 20)).tolist() for _ in range(4)]
        for _ in range(6)
    ]
    wanted = [said(ask(alone, prompts)) for prompts in rounds]
    room = {"kv_offload_memory": room_for(lfm2, 25, 6), "kv_offload_disk": room_for(lfm2, 60, 20)}
    with few_states(lfm2, count, 20, kv_offload_dir=tmp_path / "pages", **room) as llm:
        for _ in range(2):
            for prompts, tokens in zip(rounds, wanted, strict=True):
                assert said(llm.generate(prompts, GREEDY, use_tqdm=False)) == tokens
        assert llm.stats().offload_hits > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_cache_dtype": "int8"},
        {"decode_steps": 4},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_in_other_engines(lfm2: Path, fields: dict[str, Any]) -> None:
    prompts = [prompt[:50] + prompt[:50] for prompt in prompts_of(lfm2)]
    with LLM(str(lfm2), **FIELDS | fields, enable_prefix_caching=False) as llm:
        wanted = said(ask(llm, prompts))
    with start(lfm2, **fields) as llm:
        first, second = ask(llm, prompts), ask(llm, prompts)
        assert llm.stats().offload_hits >= 2 * 96
    assert said(first) == said(second) == wanted and cached(second) == [96] * 3


def test_other_weights_find_no_state(lfm2: Path) -> None:
    prompts = prompts_of(lfm2)
    with start(lfm2) as llm:
        ask(llm, prompts)
        llm.update_weights(str(lfm2))
        assert cached(ask(llm, prompts)) == [0] * 3


def test_a_damaged_state_is_deleted_and_its_prompt_computed_again(
    lfm2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, folder = prompts_of(lfm2, 1), tmp_path / "pages"
    with start(lfm2, kv_offload_dir=folder) as llm:
        first = ask(llm, prompts)
        wait_until_saved(llm)
    states = [file for file in folder.glob("*/*") if file.stat().st_size == state_bytes(lfm2) + CHECKSUM]
    assert states
    for file in states:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with start(lfm2, kv_offload_dir=folder) as llm:
        second = ask(llm, prompts)
    assert cached(second) == [0] and said(second) == said(first) and "damaged" in caplog.text


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"state_cache_memory": 0}, "kv_offload_memory is 64 MiB, .* no state of a prefix is kept"),
        ({"kv_offload_memory": "1KiB"}, "kv_offload_memory is 1 KiB, which does not hold the state of one prefix"),
        ({"kv_offload_dir": "x", "kv_offload_disk": "1KiB"}, "kv_offload_disk is 1 KiB, which does not hold the state"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_in_a_line(lfm2: Path, fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        LLM(str(lfm2), **FIELDS | {"kv_offload_memory": "64MiB"} | fields)
