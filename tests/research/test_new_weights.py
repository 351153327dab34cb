"""An engine whose weights are exchanged is, from the next step on, an engine that was started with those weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, CheckpointError, ConfigError, EnginePausedError, InvalidRequestError, SamplingParams
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.doors.async_llm import AsyncLLM
from jaxllm.engine.messages import TokenDelta
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_prompt, tiny_weights
from tests.research import exchanged
from tests.support.devices import over_devices
from tests.support.sizes import FIELDS

pytestmark = pytest.mark.programs

SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def changed(name: str) -> dict[str, np.ndarray]:
    """Other weights for a tiny model, as random as its own."""
    rng = np.random.default_rng(7)
    return {key: (array * (1 + 0.5 * rng.standard_normal(array.shape))).astype(np.float32)
            for key, array in tiny_weights(name).items()}  # fmt: skip


def write(name: str, folder: Path, weights: dict[str, np.ndarray]) -> Path:
    return save_checkpoint(tiny_config(name), weights, folder)


def said(llm: LLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    (output,) = llm.generate([prompt], SAMPLED, use_tqdm=False)
    completion = output.outputs[0]
    return completion.token_ids, [
        step[t].logprob for step, t in zip(completion.logprobs or (), completion.token_ids, strict=True)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = write(name, folder / "old", tiny_weights(name)), write(name, folder / "new", changed(name))
        return made[name]

    return of


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama_gqa", {}),
        ("llama_mha8", {"dtype": "bfloat16"}),
        ("llama_mha8", {"dtype": "bfloat16", "isq": "q8_0"}),
        ("qwen3_moe", {}),
        ("lfm2", {}),
        ("gemma3_small", {"isq": "int4"}),
    ],
)
def test_it_is_as_if_started_with_them(name: str, fields: dict[str, Any], folders: Any) -> None:
    """From a folder, from arrays by the checkpoint's names, and by those of `params`; and back again."""
    old, new = folders(name)
    prompt = tiny_prompt(name)[:40]
    with LLM(new, **FIELDS | fields) as llm:
        expected, params = said(llm, prompt), {path: np.array(array) for path, array in llm.params.items()}
    sources = {"folder": new, "arrays": changed(name), "params": params}
    with LLM(old, **FIELDS | fields) as llm:
        before = said(llm, prompt)
        assert before[0] != expected[0] and llm.weight_version == "initial"
        for number, (given, source) in enumerate(sources.items(), start=1):
            assert llm.update_weights(source) == llm.weight_version == str(2 * number - 1)
            found = said(llm, prompt)
            if given == "params" and "isq" in fields:  # codes of codes: as near as the type lets them be
                assert found != before
            else:
                assert found == expected, given
            (output,) = llm.generate([prompt], SAMPLED, use_tqdm=False)
            assert output.outputs[0].weight_versions == [(str(2 * number - 1), 0, 12)]
            llm.update_weights(old)
            assert said(llm, prompt) == before
        assert llm.update_weights(new, version="tuned") == "tuned"
        llm.restart()
        assert llm.weight_version == "initial" and said(llm, prompt) == before


def test_some_arrays_are_enough_and_are_copied(folders: Any) -> None:
    old, _ = folders("llama_gqa")
    prompt = tiny_prompt("llama_gqa")[:40]
    key = "model.layers.1.mlp.down_proj.weight"
    mine = changed("llama_gqa")[key]
    with LLM(write("llama_gqa", old.parent / "one", tiny_weights("llama_gqa") | {key: mine}), **FIELDS) as llm:
        expected = said(llm, prompt)
    for source in ({key: mine.copy()}, {"layers.1.mlp.down.weight": jax.numpy.asarray(mine)}):
        with LLM(old, **FIELDS) as llm:
            llm.update_weights(source)
            array = source[next(iter(source))]
            array.fill(0) if isinstance(array, np.ndarray) else array.delete()
            assert said(llm, prompt) == expected
            norms = {"model.norm.weight": tiny_weights("llama_gqa")["model.norm.weight"] * 0}
            llm.update_weights(norms)
            (captures,) = llm.capture([prompt], {"final": True}, use_tqdm=False)
            assert not captures.final.any()


@pytest.fixture
def llama(folders: Any) -> Iterator[LLM]:
    with LLM(folders("llama_gqa")[0], **FIELDS) as llm:
        yield llm


QKV = "model.layers.0.self_attn.{}_proj.weight"


DOWN, HF_DOWN = "layers.0.mlp.down.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({HF_DOWN + "s": (4, 4)}, "down_proj.weights' is stored there, but this model does not use it"),
        ({HF_DOWN: (4, 4)}, r"down_proj.weight' is \(4, 4\); expected \(64, 96\)"),
        ({QKV.format("q"): (64, 64)}, r"q_proj.weight' and .*k_proj.weight', .*v_proj.weight' are kept in one array"),
        ({DOWN: (4, 4)}, r"'layers.0.mlp.down.weight' is \[4, 4\]; it must be \[64, 96\], as in llm.params"),
        ({DOWN: (64, 96), "layers.0.mlp.dawn": (1,)}, "'layers.0.mlp.dawn' is no name of llm.params, as others"),
        ({"model.norm.weight": "text"}, "'model.norm.weight' is of type str; it must be an array"),
        ({"model.norm.weight": np.arange(64)}, "'model.norm.weight' has numbers of type int64; they must be floats"),
    ],
)
def test_what_cannot_be_used_changes_nothing(llama: LLM, arrays: dict[str, Any], message: str) -> None:
    prompt = tiny_prompt("llama_gqa")[:20]
    before = said(llama, prompt)
    given = {key: np.ones(array, np.float32) if isinstance(array, tuple) else array for key, array in arrays.items()}
    with pytest.raises(CheckpointError, match=message):
        llama.update_weights(given)
    assert said(llama, prompt) == before and llama.weight_version == "initial"


def test_another_model_is_refused(llama: LLM, folders: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is another model than the one that runs: it is of the family"):
        llama.update_weights(folders("lfm2")[0])
    config = tiny_config("llama_gqa") | {"rms_norm_eps": 0.1}
    with pytest.raises(CheckpointError, match=r"another model than the one that runs: its .*0\.1"):
        llama.update_weights(save_checkpoint(config, tiny_weights("llama_gqa"), tmp_path))
    with pytest.raises(ConfigError, match="no/where"):
        llama.update_weights("no/where")
    with pytest.raises(InvalidRequestError, match="version is ''; it must be a text of 1 to 256"):
        llama.update_weights(folders("llama_gqa")[1], version="")
    assert llama.weight_version == "initial"


def test_a_tied_head_may_be_given_twice_but_not_differently(folders: Any) -> None:
    name = "gemma3_small"
    old, new = folders(name)
    weights, prompt = changed(name), tiny_prompt(name)[:20]
    table = weights["model.embed_tokens.weight"]
    with LLM(new, **FIELDS) as llm:
        expected = said(llm, prompt)
    with LLM(old, **FIELDS) as llm:
        with pytest.raises(CheckpointError, match=r"'lm_head.weight' is not the same as '"):
            llm.update_weights(weights | {"lm_head.weight": table + 1})
        llm.update_weights(weights | {"lm_head.weight": table})
        assert said(llm, prompt) == expected


def test_running_requests_go_on_and_say_which_weights_made_what(folders: Any) -> None:
    """Paused in the middle of a completion: its first tokens are the old weights', and what comes is no old answer."""
    old, new = folders("llama_gqa")
    prompt = tiny_prompt("llama_gqa")[:20]
    with LLM(old, **FIELDS) as llm:
        (whole,) = llm.generate([prompt], LONG, use_tqdm=False)
        assert whole.outputs[0].weight_versions == [("initial", 0, 60)]

    async def run() -> Any:
        engine = AsyncLLM(model=str(old), **FIELDS, decode_steps=1)
        try:
            output = None
            async for output in engine.generate(prompt, LONG):
                if len(output.outputs[0].token_ids) == 9:
                    engine.pause("keep")
                    assert engine.is_paused
                    made = engine.stats().generation_tokens  # it may be some steps ahead of what is seen here
                    engine.update_weights(new, version="second")
                    engine.resume()
            assert output is not None
            later = [one async for one in engine.generate(prompt, LONG)][-1]
            return output, made, later
        finally:
            engine.shutdown()

    output, made, later = asyncio.run(run())
    completion = output.outputs[0]
    (first, begin, middle), (second, same, end) = completion.weight_versions
    assert (first, begin, second, end) == ("initial", 0, "second", 60)
    assert middle == same and made >= 9 and made <= middle <= made + 1  # a step may have been under way
    assert completion.token_ids[:middle] == whole.outputs[0].token_ids[:middle]
    assert completion.token_ids != whole.outputs[0].token_ids
    with LLM(new, **FIELDS) as llm:
        (expected,) = llm.generate([prompt], LONG, use_tqdm=False)
    assert later.outputs[0].token_ids == expected.outputs[0].token_ids
    assert later.num_cached_tokens == 0


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on each step takes a while, so that none of 60 tokens is through before somebody looks."""
    turn = EngineCore.turn

    def slow_turn(core: EngineCore) -> list[TokenDelta]:
        time.sleep(0.1)
        return turn(core)

    return lambda: monkeypatch.setattr(EngineCore, "turn", slow_turn)


def test_nothing_is_lost_by_a_pause(llama: LLM, slowly: Callable[[], None]) -> None:
    prompt = tiny_prompt("llama_gqa")[:20]
    (expected,) = llama.generate([prompt], LONG, use_tqdm=False)
    slowly()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(llama.generate([prompt] * 6, LONG, use_tqdm=False)))
    steps = llama.stats().num_steps
    thread.start()
    while llama.stats().num_steps < steps + 5:
        time.sleep(0.001)
    llama.pause()
    steps = llama.stats().num_steps
    assert llama.is_paused and thread.is_alive()
    with pytest.raises(EnginePausedError, match="the engine is paused, and takes no requests until"):
        llama.generate([prompt], LONG, use_tqdm=False)
    time.sleep(0.1)
    assert llama.stats().num_steps <= steps + 1, "the one that was under way is read"
    assert not found
    llama.resume()
    thread.join(60)
    assert [output.outputs[0].token_ids for output in found] == [expected.outputs[0].token_ids] * 6
    assert not llama.is_paused


def test_a_pause_waits_for_what_runs_or_ends_it(llama: LLM, slowly: Callable[[], None]) -> None:
    """Four run at a time: those that have not begun wait until it goes on."""
    prompt = tiny_prompt("llama_gqa")[:20]
    (expected,) = llama.generate([prompt], LONG, use_tqdm=False)
    slowly()
    found: list[Any] = []
    for mode, finished in (("wait", "length"), ("abort", "abort")):
        found.clear()
        thread = threading.Thread(target=lambda: found.extend(llama.generate([prompt] * 6, LONG, use_tqdm=False)))
        steps = llama.stats().num_steps
        thread.start()
        while llama.stats().num_steps < steps + 5:
            time.sleep(0.001)
        llama.pause(mode)  # type: ignore[arg-type]
        assert llama.stats().num_running == 0
        if mode == "abort":
            thread.join(60)
        assert thread.is_alive() == (mode == "wait")
        llama.resume()
        thread.join(60)
        assert [output.outputs[0].finish_reason for output in found] == [finished] * 6
        if mode == "wait":
            assert [output.outputs[0].token_ids for output in found] == [expected.outputs[0].token_ids] * 6
    with pytest.raises(InvalidRequestError, match="mode is 'soon'; it must be 'keep', 'wait' or 'abort'"):
        llama.pause("soon")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama_gqa", "lfm2"])
def test_a_prefix_cache_can_be_reset(name: str, folders: Any) -> None:
    prompt = tiny_prompt(name)[:40]
    with LLM(folders(name)[0], **FIELDS) as llm:
        cached = []
        for reset in (False, False, True, False):
            if reset:
                llm.reset_prefix_cache()
            (output,) = llm.generate([prompt], SAMPLED, use_tqdm=False)
            cached.append(output.num_cached_tokens)
    assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0


def test_an_engine_in_its_own_process_takes_a_folder(folders: Any) -> None:
    old, new = folders("llama_gqa")
    prompt = tiny_prompt("llama_gqa")[:20]
    with LLM(new, **FIELDS) as llm:
        expected = said(llm, prompt)
    with LLM(old, **FIELDS, engine_process=True) as llm:
        with pytest.raises(ConfigError, match="engine_process is True: arrays reach only an engine in the same"):
            llm.update_weights(changed("llama_gqa"))
        with pytest.raises(CheckpointError, match="another model than the one that runs"):
            llm.update_weights(folders("lfm2")[0])
        llm.pause("wait")
        llm.update_weights(new)
        llm.resume()
        tokens, logprobs = said(llm, prompt)
        assert tokens == expected[0] and llm.weight_version == "1"
        np.testing.assert_allclose(logprobs, expected[1], atol=1e-5)  # the process compiles with more passes
        (output,) = llm.generate([prompt], SAMPLED, use_tqdm=False)
        assert output.num_cached_tokens > 0 and output.outputs[0].weight_versions == [("1", 0, 12)]
        llm.reset_prefix_cache()
        (output,) = llm.generate([prompt], SAMPLED, use_tqdm=False)
        assert output.num_cached_tokens == 0


def test_adapters_are_of_the_weights_that_they_were_made_for(folders: Any) -> None:
    with (
        LLM(folders("llama_gqa")[0], **FIELDS, enable_lora=True) as llm,
        pytest.raises(ConfigError, match="enable_lora is True: adapters were made for the engine's own weights"),
    ):
        llm.update_weights(folders("llama_gqa")[1])


def test_two_devices_exchange_them_as_one(tmp_path: Path) -> None:
    found = over_devices(2, exchanged.__name__, tmp_path / "two.npz")
    for key, array in exchanged.shown(tmp_path, 1).items():
        np.testing.assert_allclose(found[key], array, atol=1e-4, rtol=1e-4, err_msg=key)
