"""Prompts whose pages have lost their place on the devices find them in host memory, or on disk, also after a restart.

What follows a restored prefix is what follows one that was computed; tiny random models at float32, and to the bit with
the C++ kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, cpu_kernels
from jaxllm.errors import ConfigError
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights, write_checkpoint
from tests.support.sizes import FIELDS, PAGE, few_pages

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
SECONDS = 60


def bytes_of(directory: Path, pages: int, **fields: Any) -> str:
    """So much memory as that many pages take, and a little."""
    from jaxllm.config import EngineConfig
    from jaxllm.engine.start.blueprint import plan_engine

    plan = plan_engine(EngineConfig(model=str(directory), **FIELDS | fields))
    return str(plan.kv_bytes_per_token * PAGE * pages + 100)


def start(directory: Path, pages: int = 20, **fields: Any) -> LLM:
    """An engine whose devices have room for one long prompt and its answer, and the host for many."""
    with few_pages(pages):
        return LLM(str(directory), **FIELDS | {"kv_offload_memory": "64MiB"} | fields)


def prompts_of(directory: Path, count: int = 3, length: int = 100) -> list[list[int]]:
    vocab = tiny_config(directory.name)["vocab_size"]
    return np.random.default_rng(3).integers(0, vocab, (count, length)).tolist()


def ask(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY, **more: Any) -> list[Any]:
    """One after another, so that each pushes out what the one before it left."""
    return [llm.generate([prompt], params, use_tqdm=False, **more)[0] for prompt in prompts]


def said(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def scores(outputs: list[Any]) -> list[list[float]]:
    return [
        [found[token].logprob for token, found in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
        for o in outputs
    ]


def cached(outputs: list[Any]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module", params=["llama_gqa", "gemma3_linear_rope", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped heads, sliding windows, and a latent."""
    return write_checkpoint(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama_gqa", tmp_path_factory.mktemp("small") / "llama_gqa")


def other_weights(folder: Path) -> Path:
    """The same model after some training."""
    weights = {name: 1.1 * array for name, array in tiny_weights("llama_gqa").items()}
    return save_checkpoint(tiny_config("llama_gqa"), weights, folder / "llama_gqa")


def test_a_prompt_is_found_again_in_host_memory(directory: Path) -> None:
    prompts = prompts_of(directory)
    with start(directory) as llm:
        first, second = ask(llm, prompts), ask(llm, prompts)
        stats = llm.stats()
    assert cached(first) == [0] * 3 and cached(second) == [96] * 3
    assert said(second) == said(first)
    np.testing.assert_allclose(scores(second), scores(first), atol=2e-5)
    assert 2 * 96 <= stats.offload_hits <= 3 * 96 and stats.num_host_pages >= 2 * 12 and stats.num_disk_pages == 0


@pytest.mark.parametrize(
    "fields",
    [{"kv_cache_dtype": "int8"}, {"decode_steps": 4}],
    ids=str,
)
def test_in_other_engines(small: Path, fields: dict[str, Any]) -> None:
    prompts = prompts_of(small)
    with start(small, **fields) as llm:
        first, second = ask(llm, prompts), ask(llm, prompts)
        assert llm.stats().offload_hits >= 2 * 96
    assert cached(second) == [96] * 3 and said(second) == said(first)
    np.testing.assert_allclose(scores(second), scores(first), atol=2e-5)


@pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")
def test_with_the_kernels_of_a_cpu_to_the_bit(small: Path) -> None:
    prompts = prompts_of(small)
    fields = {"dtype": "bfloat16", "block_size": 16}
    with start(small, 11, **fields) as llm:
        first, second = ask(llm, prompts * 2), ask(llm, prompts)
        assert llm.stats().offload_hits >= 2 * 96
    assert scores(second) == scores(first[:3])


def test_requests_beside_each_other_and_preempted(small: Path) -> None:
    prompts = prompts_of(small, 12, 60)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    with LLM(str(small), **FIELDS) as llm:
        expected = said(llm.generate(prompts, params, use_tqdm=False))
    with start(small) as llm:
        for _ in range(3):
            assert said(llm.generate(prompts, params, use_tqdm=False)) == expected
        stats = llm.stats()
    assert stats.num_preemptions > 0 and stats.offload_hits > 0


def test_a_draft_models_pages_come_along(small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    draft = other_weights(tmp_path_factory.mktemp("draft"))
    prompts = prompts_of(small)
    fields = {"speculative_config": {"model": str(draft), "num_speculative_tokens": 2}}
    with start(small, **fields) as llm:
        first = ask(llm, prompts * 2)
        before = llm.stats()
        second = ask(llm, prompts)
        after = llm.stats()
    assert said(second) == said(first[:3]) and cached(second) == [96] * 3
    assert after.offload_hits > before.offload_hits
    assert after.num_draft_tokens > before.num_draft_tokens


def test_another_process_finds_what_an_idle_one_has_saved(small: Path, tmp_path: Path) -> None:
    prompts = prompts_of(small)
    folder = {"kv_offload_dir": tmp_path / "pages"}
    with start(small, **folder) as llm:
        first = ask(llm, prompts[:1])
        wait_for(lambda: llm.stats().num_disk_pages >= 12)
    with start(small, pages=60, **folder) as llm:
        second = ask(llm, prompts[1:] + prompts[:1])
        assert cached(second) == [0, 0, 96] and said(second[2:]) == said(first)


def test_pages_go_from_memory_to_disk_and_back(small: Path, tmp_path: Path) -> None:
    prompts = prompts_of(small)
    fields = {"kv_offload_memory": bytes_of(small, 20), "kv_offload_dir": tmp_path / "pages"}
    with start(small, **fields) as llm:
        first = ask(llm, prompts)
        wait_for(lambda: llm.stats().num_disk_pages >= 12)
        second = ask(llm, prompts)
        assert cached(second) == [96] * 3 and said(second) == said(first)
        assert llm.stats().num_host_pages <= 20


def test_other_weights_find_nothing(small: Path, tmp_path: Path) -> None:
    prompts = prompts_of(small)
    other = other_weights(tmp_path / "other")
    folder = {"kv_offload_dir": tmp_path / "pages"}
    with start(small, **folder) as llm:
        ask(llm, prompts)
        wait_for(lambda: llm.stats().num_disk_pages >= 12)
        llm.update_weights(str(other))
        changed = ask(llm, prompts)
        assert cached(changed) == [0] * 3
    with start(other, **folder) as llm:
        fresh = ask(llm, prompts)
        assert cached(fresh) == [0] * 3 and said(fresh) == said(changed)
    with start(small, 40, **folder, kv_cache_dtype="int8") as llm:
        assert cached(ask(llm, prompts[:1])) == [0]


def test_a_damaged_page_is_computed_again(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = prompts_of(small, 1)
    folder = {"kv_offload_dir": tmp_path / "pages"}
    with start(small, **folder) as llm:
        first = ask(llm, prompts)
        wait_for(lambda: llm.stats().num_disk_pages >= 12)
    for file in (tmp_path / "pages").glob("*/*"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with start(small, **folder) as llm:
        second = ask(llm, prompts)
    assert cached(second) == [0] and said(second) == said(first) and "damaged" in caplog.text


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"kv_offload_dir": "x"}, "kv_offload_dir is x, which changes nothing without kv_offload_memory"),
        ({"kv_offload_memory": "1GiB", "kv_offload_disk": "1GiB"}, "kv_offload_disk is .* without kv_offload_dir"),
        ({"kv_offload_memory": "1GiB", "enable_prefix_caching": False}, "enable_prefix_caching is false"),
        ({"kv_offload_memory": "900TiB"}, "kv_offload_memory is 900 TiB, and this process may have"),
        ({"kv_offload_memory": "0"}, "kv_offload_memory is '0'"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_in_a_line(small: Path, fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        LLM(str(small), **FIELDS, **fields)


def test_models_without_pages_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_offload_memory is 64 MiB, and this model"):
        LLM(
            str(write_checkpoint("bert", tmp_path)), dtype="float32", skip_tokenizer_init=True,
            kv_offload_memory="64MiB",
        )  # fmt: skip
