"""Engines that leave experts in host memory say what they say with all of them on the devices."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, ConfigError, SamplingParams
from jaxllm.config import EngineConfig, ServeConfig, make_config
from jaxllm.config.parts import SpeculativeConfig
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.engine.start.offload import PROCESS_BYTES, check_host_memory
from jaxllm.engine.start.plan import EnginePlan
from jaxllm.engine.start.platform import Platform
from tests.reference.tiny import tiny_config, tiny_prompt, write_checkpoint
from tests.serving.mixed_requests import write_model
from tests.support.devices import over_devices, shared_folder
from tests.support.experts_over_devices import LAYOUTS
from tests.support.parallel_answers import SIZES, assert_same, told
from tests.support.sizes import FIELDS

NAMES = {
    "qwen3_5_moe": 8, "gpt_oss": 8, "gemma4_moe": 8, "llama4": 4, "nemotron_h_moe": 8, "deepseek_v3": 16, "mixtral": 8,
}  # fmt: skip
"""Experts of a layer: beside states; with biases; beside a dense MLP; one for a token, whose weight is on its input;
without gates; in groups; and no more than that."""

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def away(count: int, cached: int | None = None) -> dict[str, Any]:
    return {"num_experts_offload_per_rank": count, "num_experts_cached_per_rank": cached}


@pytest.mark.parametrize("name", NAMES)
def test_however_many_are_away(tmp_path: Path, name: str) -> None:
    """With requests preempted, and then again, when their prompts are cached; at last also on the host."""
    model, count = write_model(tmp_path / "m", name), NAMES[name]
    expected = told(model, every_kind=False)
    for parts in (away(1), away(count // 2, 1), away(count) | {"kv_offload_memory": "8MiB"}):
        assert_same(told(model, every_kind=False, **parts), expected, near=0, preempts=expected["preemptions"] > 0)


def ask_all(names: list[str], folder: Path) -> None:
    model = write_model(folder / "m", "deepseek_v3")
    found = over_devices(4, "tests.support.experts_over_devices", folder / "told.npz", str(model), *names)
    both = {"told": json.loads(str(found["told"])), "one": told(model, every_kind=False)}
    (folder / "both.json").write_text(json.dumps(both))


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = {item.name for item in request.session.items}
    names = [name for name in LAYOUTS if f"test_over_several_devices[{name}]" in run]
    folder = shared_folder(tmp_path_factory, "host_experts", partial(ask_all, names or list(LAYOUTS)))
    found: dict[str, Any] = json.loads((folder / "both.json").read_text())
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_over_several_devices(both: dict[str, Any], name: str) -> None:
    found, batches = both["told"][name], "batches" in name
    assert_same(found, both["one"], near=2e-5, preempts=not batches)


@pytest.mark.parametrize("isq", [None, "q8_0"])
def test_with_the_kernels_of_a_cpu(tmp_path: Path, isq: str | None) -> None:
    """Weights in tiles, at bfloat16: the same to the bit, since each product is."""
    wide = tiny_config("mixtral") | {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    sizes = FIELDS | {"dtype": "bfloat16", "isq": isq, "load_format": "dummy"}
    prompts = [tiny_prompt("mixtral"), [5], list(range(3, 40))]
    said = []
    for parts in ({}, away(4, 2), away(8, 1)):
        with LLM(str(tmp_path), **sizes, **parts) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True))
            said.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
    assert said[0] == said[1] == said[2]


def test_tokens_tried_ahead_and_other_weights(tmp_path: Path) -> None:
    """Places hold what was fetched before: with other weights nothing of it is used again."""
    one, other = (write_checkpoint("mixtral", tmp_path / name) for name in ("one", "other"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: -one if "experts" in name else one for name, one in tensors.items()}, other / "model.safetensors")
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [30, 31], tiny_prompt("mixtral")]

    def said(llm: LLM) -> list[list[int]]:
        return [found.outputs[0].token_ids for found in llm.generate(prompts, GREEDY, use_tqdm=False)]

    expected = []
    for model in (one, other):
        with LLM(str(model), **FIELDS) as llm:
            expected.append(said(llm))
    assert expected[0] != expected[1]
    drafts = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    with LLM(str(one), **FIELDS, **away(8, 8), speculative_config=drafts) as llm:
        assert said(llm) == expected[0]
        llm.update_weights(str(other))
        assert said(llm) == expected[1]


def planned(model: Path, memory: int | None = None, **parts: Any) -> EnginePlan:
    config = make_config(EngineConfig, model=str(model), **SIZES | parts)
    return plan_engine(config, Platform("cpu", 4, memory, 8 * 2**30))


def test_what_a_device_holds_and_what_its_host_does(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "deepseek_v3")
    whole, half, none = planned(model), planned(model, **away(8, 3)), planned(model, **away(16, 16))
    assert (whole.host_weight_bytes, whole.expert_bytes) == (0, 0)
    experts = none.host_weight_bytes
    assert whole.weight_bytes == none.weight_bytes + experts == half.weight_bytes + half.host_weight_bytes
    assert half.host_weight_bytes == experts // 2
    layers = 2  # with experts, of three
    numbers = 2 * 4 * layers
    assert half.expert_bytes == experts * 3 // 16 + 3 * numbers
    assert none.expert_bytes == experts + 16 * numbers
    assert half.planned_bytes == whole.planned_bytes - half.host_weight_bytes + half.expert_bytes
    shared = planned(model, tensor_parallel_size=2, enable_expert_parallel=True, **away(4, 2))
    assert shared.host_weight_bytes == experts // 2  # of both devices
    assert shared.expert_bytes == experts * 2 // 16 + 2 * numbers
    assert "of experts in host memory" in half.summary() and "places of experts" in half.summary()
    assert "experts" not in whole.summary().split("parameters")[1]


def test_host_memory_is_looked_at(tmp_path: Path) -> None:
    plan = planned(write_model(tmp_path / "m", "deepseek_v3"), 2**34, **away(16))
    need = PROCESS_BYTES + plan.host_weight_bytes
    gpu = partial(Platform, "gpu", 1, 2**34, 2**34, 2**34, "a GPU")
    check_host_memory(plan, gpu(host_memory=need))
    with pytest.raises(ConfigError, match=r"of host memory for experts.*lower num_experts_offload_per_rank"):
        check_host_memory(plan, gpu(host_memory=need - 1))


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("llama_gqa", away(1), "num_experts_offload_per_rank is 1, and this model has no experts; accepted is 0"),
        (
            "mixtral",
            away(9),
            "num_experts_offload_per_rank is 9, and each device has 8 experts of a layer; accepted are 0 to 8",
        ),
        (
            "mixtral",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, **away(5)},
            "num_experts_offload_per_rank is 5, and each device has 4 experts of a layer; accepted are 0 to 4",
        ),
        (
            "mixtral",
            away(2, 3),
            "num_experts_cached_per_rank is 3, and num_experts_offload_per_rank is 2; accepted are 1 to 2",
        ),
        (
            "mixtral",
            away(0, 3),
            "num_experts_cached_per_rank is 3, which changes nothing without num_experts_offload_per_rank",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, name: str, parts: dict[str, Any], message: str) -> None:
    model = write_checkpoint(name, tmp_path)
    with pytest.raises(ConfigError) as refused:
        planned(model, **parts)
    assert str(refused.value) == message


def test_the_example_can_be_served() -> None:
    fields = yaml.safe_load((Path(__file__).parents[1] / "examples/scale/host_experts.yaml").read_text())
    config = make_config(ServeConfig, **fields)
    assert (config.num_experts_offload_per_rank, config.num_experts_cached_per_rank) == (96, 32)
