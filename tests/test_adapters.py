"""Adapters at run time: a request with some gets what the model gives into which they were merged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, AsyncLLM, InvalidRequestError, LoRARequest, RequestOutput, SamplingParams
from jaxllm.requests.steering import AdapterUse
from tests.reference.adapters import merge, write_adapter
from tests.reference.tiny import write_checkpoint
from tests.support.adapters_over_devices import DENSE, GREEDY, MODELS, answers, prompts
from tests.support.devices import over_devices
from tests.support.sizes import FIELDS

ADAPTED: dict[str, Any] = {**FIELDS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


class Given(NamedTuple):
    """A model, two adapters for it, and the engine that is to use them."""

    model: Path
    modules: tuple[str, ...]
    adapters: tuple[Path, Path]
    llm: LLM

    def lora(self, index: int, scale: float = 1.0) -> LoRARequest:
        return LoRARequest(f"adapter-{index}", index + 1, self.adapters[index], scale)


@pytest.fixture(scope="module", params=MODELS)
def given(request, tmp_path_factory) -> Iterator[Given]:
    folder = tmp_path_factory.mktemp(request.param)
    model = Path(write_checkpoint(request.param, folder / "model"))
    modules = MODELS[request.param]
    first = write_adapter(folder / "first", model, modules, rank=8, alpha=16, seed=1)
    second = write_adapter(folder / "second", model, modules[:1], rank=3, alpha=3, seed=2)
    with LLM(str(model), **ADAPTED) as llm:
        yield Given(model, modules, (first, second), llm)


def assert_alike(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        (left,), (right,) = one.outputs, other.outputs
        assert left.token_ids == right.token_ids
        assert left.logprobs is not None and right.logprobs is not None
        for step, wanted in zip(left.logprobs, right.logprobs, strict=True):
            for token, logprob in wanted.items():
                assert step[token].logprob == pytest.approx(logprob.logprob, abs=2e-4)


def expected(given: Given, folder: Path, adapters: list[tuple[Path, float]]) -> list[RequestOutput]:
    with LLM(str(merge(folder, given.model, adapters)), **FIELDS) as merged:
        return merged.generate(prompts(), GREEDY, use_tqdm=False)


def test_an_adapter_gives_what_the_merged_model_gives(given, tmp_path):
    found = given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=given.lora(0))
    assert_alike(found, expected(given, tmp_path / "merged", [(given.adapters[0], 1.0)]))


def test_several_adapters_add_up_each_with_its_scale(given, tmp_path):
    both = [given.lora(0, 0.5), given.lora(1, -2.0)]
    found = given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=[both] * 4)
    scaled = [(given.adapters[0], 0.5), (given.adapters[1], -2.0)]
    assert_alike(found, expected(given, tmp_path / "merged", scaled))


def test_requests_with_other_adapters_and_without_share_steps(given, tmp_path):
    choices = [None, given.lora(0), given.lora(1), [given.lora(1), given.lora(0)]]
    found = given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=choices)
    alone = [
        given.llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=[choice])[0]
        for prompt, choice in zip(prompts(), choices, strict=True)
    ]
    assert_alike(found, alone)
    with LLM(str(given.model), **FIELDS) as plain:
        assert_alike(found[:1], plain.generate(prompts()[:1], GREEDY, use_tqdm=False))
    assert len({tuple(output.outputs[0].token_ids) for output in alone}) == 4


def test_more_adapters_than_places_take_turns(given):
    """Three versions of one adapter share two places; every request gets its own."""
    requests = [LoRARequest("first", 11 + i, given.adapters[0], scale) for i, scale in enumerate((0.5, 1.0, 2.0))]
    many = [requests[i % 3] for i in range(9)]
    found = given.llm.generate(prompts()[:1] * 9, GREEDY, use_tqdm=False, lora_request=many)
    alone = [
        given.llm.generate(prompts()[:1], GREEDY, use_tqdm=False, lora_request=[request])[0] for request in requests
    ]
    assert_alike(found, alone * 3)


def test_it_is_known_which_adapters_requests_use(given):
    """Two adapters have places; a third waits until one of them has none of its requests left."""
    uses = [AdapterUse(31 + i, f"known-{i}", str(given.adapters[0])) for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    async def watch() -> list[tuple[dict[str, int], dict[str, int]]]:
        engine = AsyncLLM(model=str(given.model), engine_process=False, **ADAPTED)
        seen = []

        async def ask(use: AdapterUse) -> None:
            async for _ in engine.stream(prompts()[0], params, adapters=(use,)):
                stats = engine.stats()
                seen.append((stats.running_adapters, stats.waiting_adapters))

        try:
            await asyncio.gather(*map(ask, uses))
        finally:
            engine.shutdown()
        return seen

    seen = asyncio.run(watch())
    names = {use.name for use in uses}
    full = next((running, waiting) for running, waiting in seen if waiting)
    assert len(full[0]) == 2 and full[0].keys() | full[1].keys() == names and set(full[0].values()) == {1}
    assert all(any(name in running for running, _ in seen) for name in full[1])


@pytest.mark.parametrize(("index", "rank"), [(0, 8), (1, 3)])
def test_kernels_read_as_many_rows_as_an_adapter_has(given, index, rank):
    """No row that holds something is behind what the tables say of its rank, and a tensor it leaves alone has none."""
    store = given.llm._streams.client.ask(lambda core: core.features["adapters"].store)
    reader = store._reader
    rows = dict(zip((table.path for table in reader.tables), reader.read(str(given.adapters[index])), strict=True))
    found = set()
    for path, ranks in rows.items():
        if path.endswith(".ranks"):
            a = rows[path.replace(".ranks", ".a")]
            filled = a.reshape(len(ranks), -1, a.shape[-1]).any(axis=2)
            assert filled.sum(axis=1).tolist() == ranks.tolist()
            assert all(filled[part, :own].all() for part, own in enumerate(ranks))
            found |= set(ranks.tolist())
    assert rank in found <= {0, rank}


def test_prompts_are_scored_with_adapters(given, tmp_path):
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (found,) = given.llm.generate([prompts()[0]], scored, use_tqdm=False, lora_request=given.lora(0))
    with LLM(str(merge(tmp_path, given.model, [(given.adapters[0], 1.0)])), **FIELDS) as merged:
        (wanted,) = merged.generate([prompts()[0]], scored, use_tqdm=False)
    for step, other in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        for token, logprob in other.items():
            assert step[token].logprob == pytest.approx(logprob.logprob, abs=2e-4)


WRONG = {
    "rank": (
        lambda given: write_adapter(given.model.parent / "bad", given.model, given.modules, rank=9),
        "its rank is 9; accepted are ranks up to",
    ),
    "nowhere": (lambda given: given.model / "nowhere", "does not exist"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_cannot_be_used_fails_its_request_alone(given, case):
    make, message = WRONG[case]
    with pytest.raises(InvalidRequestError, match=message):
        given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=LoRARequest("bad", 99, make(given)))
    assert len(given.llm.generate(prompts(), GREEDY, use_tqdm=False)) == 4


def test_a_tensor_that_the_model_lacks_is_named(given, tmp_path):
    adapter = write_adapter(tmp_path, given.model, given.modules[:1], rank=2)
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("layers.0.", "layers.77."): tensor for name, tensor in tensors.items()}
    save_file(renamed, adapter / "adapter_model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"adds to 'model\.layers\.77\..*this model has no tensor"):
        given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=LoRARequest("bad", 98, adapter))


def test_wrong_uses_are_refused_before_anything_runs(given):
    twice = [[given.lora(0), given.lora(0)]] * 4
    with pytest.raises(InvalidRequestError, match="'adapter-0' is among them twice"):
        given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=twice)
    three = [[LoRARequest("x", number, given.adapters[0]) for number in (21, 22, 23)]] * 4
    with pytest.raises(
        InvalidRequestError, match="3 adapters are asked for at once; accepted are max_loras, which is 2"
    ):
        given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=three)
    with pytest.raises(InvalidRequestError, match="lora_request has 1 entries for 4 prompts"):
        given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=[given.lora(0)])
    with LLM(str(given.model), **FIELDS) as plain, pytest.raises(InvalidRequestError, match="runs without adapters"):
        plain.generate(prompts(), GREEDY, use_tqdm=False, lora_request=given.lora(0))


def test_arrays_of_a_notebook_are_an_adapter(given):
    tensors = load_file(given.adapters[0] / "adapter_model.safetensors")
    added = given.llm.add_lora("made here", tensors, {"r": 8, "lora_alpha": 16})
    found = given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=added)
    assert_alike(found, given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=given.lora(0)))
    again = given.llm.add_lora("made here", {name: 2 * tensor for name, tensor in tensors.items()}, {"r": 8})
    other = given.llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=again)
    assert [o.outputs[0].token_ids for o in other] != [o.outputs[0].token_ids for o in found]


def test_arrays_that_do_not_fit_are_refused_when_they_are_added(given):
    tensors = load_file(given.adapters[0] / "adapter_model.safetensors")
    name, a = next((name, tensor) for name, tensor in tensors.items() if ".lora_A." in name)
    with pytest.raises(InvalidRequestError, match=rf"has {a.shape[1] + 1} inputs; the model's has {a.shape[1]}"):
        wide = {name: np.pad(a, ((0, 0), (0, 1)))}
        given.llm.add_lora("wide", tensors | wide, {"r": 8, "lora_alpha": 16})


@pytest.fixture(scope="module")
def over_two_devices(tmp_path_factory) -> dict[str, np.ndarray]:
    """What engines with tensor_parallel_size 2 say, in a process that has so many devices."""
    return over_devices(2, "tests.support.adapters_over_devices", tmp_path_factory.mktemp("two") / "answers.npz")


@pytest.mark.parametrize("model", MODELS)
def test_under_tensor_parallelism_adapters_add_the_same(model, over_two_devices, tmp_path):
    tokens, logprobs = answers(model, tmp_path, 1)
    np.testing.assert_array_equal(over_two_devices[f"{model}.tokens"], tokens)
    np.testing.assert_allclose(over_two_devices[f"{model}.logprobs"], logprobs, atol=2e-4)


FAMILIES = {
    "gemma3_small": DENSE,
    "gemma2": DENSE,
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "shared_experts.up_proj"),
    "lfm2": ("q_proj", "in_proj", "conv.out_proj", "w1", "w2", "w3"),
    "qwen3_next": ("q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert.down_proj"),
    "falcon_h1": ("q_proj", "in_proj", "out_proj", "gate_proj", "down_proj"),
    "cohere": DENSE,
    "phi": ("q_proj", "dense", "fc1", "fc2"),
    "gpt_neox": ("query_key_value", "attention.dense", "dense_h_to_4h"),
    "gemma4": ("q_proj", "o_proj", "per_layer_input_gate", "per_layer_projection", "down_proj"),
}
"""Other tiny models, and what their adapters add to: fused and gated projections, those of recurrent layers."""


@pytest.mark.parametrize("model", FAMILIES)
def test_adapters_of_other_families(model, tmp_path):
    folder = Path(write_checkpoint(model, tmp_path / "model"))
    adapter = write_adapter(tmp_path / "adapter", folder, FAMILIES[model], rank=4, alpha=6, seed=3)
    with LLM(str(folder), **ADAPTED) as llm:
        found = llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=LoRARequest("one", 1, adapter))
    with LLM(str(merge(tmp_path / "merged", folder, [(adapter, 1.0)])), **FIELDS) as merged:
        assert_alike(found, merged.generate(prompts(), GREEDY, use_tqdm=False))
