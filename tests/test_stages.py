"""A model whose layers are in stages, on devices of their own, says what it says on one device."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, ConfigError
from jaxllm.config import EngineConfig, make_config
from jaxllm.engine.core.keys import SAMPLED, Key
from jaxllm.engine.scale.staged_device import keys_of
from jaxllm.models.caches import Paged, Shared
from jaxllm.models.options import places_to_part, share_layers
from tests.reference.tiny import write_checkpoint
from tests.serving.mixed_requests import write_model
from tests.support.devices import over_devices, shared_folder
from tests.support.parallel_answers import assert_same, told
from tests.support.sizes import FIELDS
from tests.support.stages_over_devices import EVERY_KIND, LAYOUTS

CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def ask_both(cases: list[tuple[str, tuple[int, int]]], folder: Path) -> None:
    """What engines in stages say, and what those on one device do."""
    for name in {"llama_gqa", *(name for name, _ in cases)}:
        write_model(folder / name, name)
    names = [f"{name} {layout}" for name, layout in cases]
    found = over_devices(4, "tests.support.stages_over_devices", folder / "told.npz", str(folder), *names)
    (folder / "stages.json").write_text(str(found["told"]))
    asked = dict.fromkeys((name, (name, layout) == EVERY_KIND) for name, layout in cases)
    alone = {f"{name} {every_kind}": told(folder / name, every_kind) for name, every_kind in asked}
    (folder / "one.json").write_text(json.dumps(alone))


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = {item.name for item in request.session.items}
    cases = [
        (name, layout) for name, layout in CASES if f"test_stages_say_what_one_device_says[{name}-{layout}]" in run
    ]
    return shared_folder(tmp_path_factory, "stages", partial(ask_both, cases or [EVERY_KIND]))


@pytest.fixture(scope="module")
def of_stages(both: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((both / "stages.json").read_text())
    return found


@pytest.fixture(scope="module")
def of_one(both: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((both / "one.json").read_text())
    return found


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_stages_say_what_one_device_says(
    of_stages: dict[str, Any], of_one: dict[str, Any], name: str, layout: tuple[int, int]
) -> None:
    """In batches, with requests preempted, and then again, when their prompts are cached."""
    expected, found = of_one[f"{name} {(name, layout) == EVERY_KIND}"], of_stages[f"{name} {layout}"]
    rounded = layout[1] > 1 or name == "qwen3_5"  # whose states add up by chunks, wherever those begin
    assert_same(found, expected, near=2e-5 if rounded else 0)


def test_a_stage_is_told_what_was_sampled_when_it_runs_it_and_not_before(of_stages: dict[str, Any]) -> None:
    """So it runs one half of the requests while the other stage runs the other half."""
    *_, (told_a, a), (ran_a, also_a), (told_b, b), (ran_b, also_b) = of_stages["order"]
    assert (told_a, ran_a, told_b, ran_b) == ("took", "layers") * 2
    assert a == also_a and b == also_b
    assert len(a) == len(b) == 2 and not {*a} & {*b}
    halves = [slots for kind, slots in of_stages["order"] if kind == "layers"][-12:]
    assert halves == [a, b] * 6


def test_who_would_look_inside_is_told_that_the_model_is_in_parts(of_stages: dict[str, Any]) -> None:
    for name, said in of_stages["refused"].items():
        assert "pipeline_parallel_size" in said and "must be 1" in said and "\n" not in said, name
    assert len(of_stages["refused"]) == 5


@pytest.mark.parametrize(
    ("costs", "head", "count", "ends"),
    [
        ([1] * 6, 2, 2, [4, 6]),
        ([1] * 6, 0, 3, [2, 4, 6]),
        ([5, 1, 1, 1], 0, 2, [1, 4]),
        ([1, 1], 100, 2, [1, 2]),
    ],
)
def test_layers_are_shared_out_by_what_they_cost(costs: list[int], head: int, count: int, ends: list[int]) -> None:
    stages = share_layers(costs, head, range(1, len(costs)), count)
    assert [stage.end for stage in stages] == ends
    assert [stage.begin for stage in stages] == [0, *ends[:-1]]
    assert (stages[0].first, stages[0].last, stages[-1].last) == (True, False, True)


def test_a_layer_stays_with_the_one_whose_cache_it_reads() -> None:
    page = Paged(1, (8, 8))
    assert places_to_part([page, page, page, None, Shared(2)]) == [1, 2]
    assert [stage.end for stage in share_layers([1] * 5, 0, [1, 2], 2)] == [2, 5]


ADMIT = Key("put", 0, frozenset({"admit"}))


def test_each_stage_has_its_part_of_every_step() -> None:
    first, middle, last = share_layers([1] * 3, 0, [1, 2], 3)
    steps = [
        Key("decode", 8),
        Key("decode", 8, SAMPLED),
        Key("head", 4),
        Key("backbone", 32),
        ADMIT,
        Key("read", 0, frozenset({"sums"})),
        Key("put", 0, frozenset({"adjustments"})),
    ]
    layers = [Key("layers", 8, frozenset({"decode"})), Key("layers", 32, frozenset({"backbone"})), ADMIT]
    assert keys_of(last, steps) == keys_of(None, steps) == steps
    assert keys_of(middle, steps) == layers
    assert {*keys_of(first, steps)} == {*layers, Key("took", 8), Key("took", 4)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"speculative_config": {"num_speculative_tokens": 2}}, "speculative_config is set"),
        ({"enable_lora": True}, "enable_lora is True.*accepted is False"),
        ({"decode_steps": 2}, "decode_steps is 2.*accepted is 1"),
        ({"kv_offload_memory": "1MiB"}, "kv_offload_memory is 1048576.*leave it out"),
    ],
    ids=str,
)
def test_what_stages_do_not_go_with_is_refused_in_a_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as refused:
        make_config(EngineConfig, pipeline_parallel_size=2, **fields)
    assert "pipeline_parallel_size is 2" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("gemma4", 2, "every layer of this model has inputs of its own"),
        ("llama_gqa", 4, "the 3 layers of this model are parted into 3 stages at most; accepted are 1 to 3"),
        ("bert", 2, "this model is an encoder"),
    ],
)
def test_a_model_that_cannot_be_parted_is_refused(tmp_path: Path, name: str, count: int, said: str) -> None:
    from jaxllm.engine.start.blueprint import plan_engine

    model = write_checkpoint(name, tmp_path)
    with pytest.raises(ConfigError, match=f"^pipeline_parallel_size is {count}, and {said}"):
        plan_engine(EngineConfig(model=str(model), pipeline_parallel_size=count, skip_tokenizer_init=True))


def test_too_few_devices_are_said_at_the_start(tmp_path: Path) -> None:
    model = write_checkpoint("llama_gqa", tmp_path)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size 2, but this machine has 1 cpu .*NUM_CPU_DEVICES=2"):
        LLM(str(model), **FIELDS, pipeline_parallel_size=2)


def test_a_plan_shows_what_each_stage_holds(tmp_path: Path) -> None:
    from jaxllm.engine.start.blueprint import plan_engine

    model = str(write_checkpoint("llama_gqa", tmp_path))
    fields: dict[str, Any] = {**FIELDS, "model": model}
    whole, parted = (plan_engine(EngineConfig(**fields, pipeline_parallel_size=count)) for count in (1, 2))
    assert [stage.layers for stage in parted.stages] == ["0 to 1", "2 to 2"]
    assert parted.weight_bytes == max(stage.weight_bytes for stage in parted.stages) < whole.weight_bytes
    assert sum(stage.weight_bytes for stage in parted.stages) == whole.weight_bytes
    assert [stage.kv_bytes_per_token * 3 for stage in parted.stages] == [whole.kv_bytes_per_token * n for n in (2, 1)]
    assert "on 2 stages (layers 0 to 1, 2 to 2) of 1 cpu device," in parted.summary()
