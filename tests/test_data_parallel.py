"""An engine with several batches side by side says what it says with one, and its requests share out among them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxllm import LLM, ConfigError
from jaxllm.config import EngineConfig, ServeConfig, make_config
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.engine.start.plan import EnginePlan
from jaxllm.engine.start.platform import Platform
from tests.reference.tiny import write_checkpoint
from tests.serving.mixed_requests import write_model
from tests.support.batches_over_devices import EVERY_KIND, LAYOUTS, parallel, seen_inside
from tests.support.devices import over_devices, shared_folder
from tests.support.parallel_answers import SIZES, assert_same, told

CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def ask_both(cases: list[tuple[str, tuple[int, int]]], folder: Path) -> None:
    """What engines with several batches say, and what those with one do."""
    for name in {EVERY_KIND[0], *(name for name, _ in cases)}:
        write_model(folder / name, name)
    names = [f"{name} {layout}" for name, layout in cases]
    found = over_devices(4, "tests.support.batches_over_devices", folder / "told.npz", str(folder), *names)
    asked = dict.fromkeys((name, (name, layout) == EVERY_KIND) for name, layout in cases)
    alone = {f"{name} {every_kind}": told(folder / name, every_kind) for name, every_kind in asked}
    both = {"told": json.loads(str(found["told"])), "inside": json.loads(str(found["inside"])), "alone": alone}
    (folder / "both.json").write_text(json.dumps(both | {"inside_one": seen_inside(folder / EVERY_KIND[0])}))


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = {item.name for item in request.session.items}
    cases = [(n, layout) for n, layout in CASES if f"test_batches_say_what_one_batch_says[{n}-{layout}]" in run]
    folder = shared_folder(tmp_path_factory, "batches", partial(ask_both, cases or [EVERY_KIND]))
    found: dict[str, Any] = json.loads((folder / "both.json").read_text())
    return found


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_batches_say_what_one_batch_says(both: dict[str, Any], name: str, layout: tuple[int, int]) -> None:
    """In the first case with requests preempted, and then again, when their prompts are cached."""
    expected = both["alone"][f"{name} {(name, layout) == EVERY_KIND}"]
    preempts = (name, layout) == EVERY_KIND  # in others each batch has pages for all of its requests
    assert_same(both["told"][f"{name} {layout}"], expected, near=2e-5, preempts=preempts)


def test_who_looks_inside_sees_the_same(both: dict[str, Any]) -> None:
    """Some requests of a batch are steered, patched or captured, for which they run steps that others do not."""
    found, expected = both["inside"], both["inside_one"]
    for name in ("captured", "pooled"):
        for one, other in zip(expected.pop(name), found.pop(name), strict=True):
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)
    assert found == expected
    assert found["plain"] == found["exchanged"] != found["steered"]
    assert found["patched"][0] != found["plain"][0] and found["patched"][1:] == found["plain"][1:]


def planned(model: Path, parts: dict[str, Any]) -> EnginePlan:
    config = make_config(EngineConfig, model=str(model), **SIZES | parts)
    return plan_engine(config, Platform("cpu", 4, None, 8 * 2**30))


def test_a_device_holds_its_part_of_the_experts_and_the_whole_of_the_rest(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "deepseek_v3")

    def weights(**parts: Any) -> int:
        return planned(model, parts).weight_bytes

    one = weights()
    assert weights(data_parallel_size=2, enable_dp_attention=True) == one
    shared = [weights(**parallel(count, 1, experts=True)) for count in (2, 4)]
    assert one - shared[0] == 2 * (shared[0] - shared[1]) > 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "data_parallel_size is 1, so that there would be one batch"),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"data_parallel_size": 2, "decode_steps": 2}, "decode_steps is 2"),
        ({"data_parallel_size": 2, "enable_lora": True}, "enable_lora is True"),
        ({"data_parallel_size": 2, "speculative_config": {"num_speculative_tokens": 2}}, "speculative_config is set"),
        ({"data_parallel_size": 2, "kv_offload_memory": "1MiB"}, "kv_offload_memory is"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_go_with_it_says_so(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        make_config(EngineConfig, enable_dp_attention=True, **fields)
    assert "enable_dp_attention" in str(refused.value) and "\n" not in str(refused.value)


def test_experts_and_models_that_do_not_fit_say_so(tmp_path: Path) -> None:
    model, encoder = write_model(tmp_path / "m", "deepseek_v3"), write_checkpoint("bert", tmp_path / "bert")
    with pytest.raises(ConfigError, match="experts are not shared equally by 3 devices"):
        planned(model, parallel(3, 1, experts=True))
    with pytest.raises(ConfigError, match="this model is an encoder"):
        planned(encoder, {"skip_tokenizer_init": True, **parallel(2, 1, experts=False)})
    with pytest.raises(ConfigError, match="data_parallel_size 64, but this machine has"):
        LLM(str(model), **SIZES, **parallel(64, 1, experts=False))


def test_the_example_says_how_many_devices_it_takes() -> None:
    fields = yaml.safe_load((Path(__file__).parents[1] / "examples/scale/dp_attention.yaml").read_text())
    config = make_config(ServeConfig, **fields)
    assert (config.num_devices, config.num_batches, config.num_engines) == (8, 8, 1)
