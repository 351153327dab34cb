"""The programs that an H100 would run, compiled here: what is in them, and what is not.

Nothing is tuned without a device: which tiles and which library a product takes means nothing here. What all layers
have alike is looked at in a few of them; those of a whole model take minutes to compile. Tests marked `slow` see what
their siblings see, in other models, formats and sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OPTIMIZED = True

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(900)]
slow = pytest.mark.slow

CONFIGS = Path(__file__).parents[1] / "reference" / "configs"
MOST_SECONDS = 60
"""Of processor time, all threads together: beside others a compilation takes no more of it. `ptxas` is not counted."""


@pytest.fixture
def compiled(tmp_path: Path) -> Any:
    def compile_step(model: str, *arguments: str, layers: int | None = None) -> dict[str, Any]:
        directory = tmp_path / "-".join([model, *arguments, str(layers)]).replace("/", "")
        config = directory / "config.json"
        config.parent.mkdir()
        values = json.loads((CONFIGS / f"{model}.json").read_text())["config"]
        config.write_text(json.dumps(values | ({"num_hidden_layers": layers} if layers else {})))
        kind, size, variant, *more = arguments
        program = [sys.executable, "-m", "tests.gpu.compile_step", str(config), kind, size, variant, str(directory)]
        done = subprocess.run([*program, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return compile_step


def check(found: dict[str, Any], *, decode: bool = True) -> None:
    assert found["copies"] == []
    assert found["aliased"] >= found["pages"] > 0
    assert found["temporaries"] <= found["planned"]
    assert found["seconds"] < MOST_SECONDS
    assert found["spilled"] == {}
    if decode:
        assert found["launches"] == ["kCommandBuffer"]  # the host starts one graph, and has nothing more to do


MOST_KERNELS = [
    pytest.param("Llama-3.1-8B", "2", 10, marks=slow),
    ("Llama-3.1-8B", "16", 10),
    pytest.param("Llama-3.1-8B", "256", 10, marks=slow),
    ("Qwen3-30B-A3B", "16", 11),
    pytest.param("Qwen3-30B-A3B", "256", 13, marks=slow),
    pytest.param("DeepSeek-V2-Lite", "16", 15, marks=slow),
    pytest.param("DeepSeek-V2-Lite", "256", 17, marks=slow),
]
"""By model and rows; of one layer, in decode."""


@pytest.mark.parametrize(("model", "rows", "most"), MOST_KERNELS)
def test_a_layer_has_few_kernels(compiled: Any, model: str, rows: str, most: int) -> None:
    few, more = (compiled(model, "decode", rows, "plain", layers=n) for n in (2, 4))
    check(few)
    check(more)
    assert (more["kernels"] - few["kernels"]) / 2 <= most


@slow
@pytest.mark.parametrize(
    "step",
    [("decode", "256", "sampled"), ("decode", "1", "plain", "--packing", "q4_k_m"), ("backbone", "2048", "plain")],
    ids=" ".join,
)
def test_a_whole_dense_model(compiled: Any, step: tuple[str, ...]) -> None:
    check(compiled("Llama-3.1-8B", *step), decode=step[0] == "decode")


@pytest.mark.parametrize(
    "step", [pytest.param(("decode", "256", "plain"), marks=slow), ("backbone", "2048", "plain")], ids=" ".join
)
def test_experts_are_neither_copied_nor_expanded(compiled: Any, step: tuple[str, ...]) -> None:
    found = compiled("Qwen3-30B-A3B", *step, layers=4)
    check(found, decode=step[0] == "decode")
    assert found["temporaries"] < 0.01 * 48 / 4 * found["weights"]


@pytest.mark.parametrize(
    "step", [("decode", "16", "plain"), pytest.param(("backbone", "2048", "plain"), marks=slow)], ids=" ".join
)
def test_latent_attention(compiled: Any, step: tuple[str, ...]) -> None:
    check(compiled("DeepSeek-V2-Lite", *step, layers=3), decode=step[0] == "decode")


@pytest.mark.parametrize(
    "step", [("decode", "64", "plain"), pytest.param(("backbone", "2048", "plain"), marks=slow)], ids=" ".join
)
def test_states_are_not_copied(compiled: Any, step: tuple[str, ...]) -> None:
    """Three layers of linear attention and one of attention."""
    check(compiled("Qwen3-Next-80B-A3B-Instruct", *step, layers=4), decode=step[0] == "decode")


@pytest.mark.parametrize("variant", [pytest.param("plain", marks=slow), "sampled"])
def test_drafts_are_verified_in_one_graph(compiled: Any, variant: str) -> None:
    check(compiled("Llama-3.1-8B", "verify", "64", variant, layers=2))


@pytest.mark.parametrize("kind", ["q4k", *(pytest.param(kind, marks=slow) for kind in ("int4", "int8", "fp8", "q4_0"))])
def test_quantized_weights_are_expanded_in_registers(compiled: Any, kind: str) -> None:
    found = compiled("Llama-3.1-8B", "decode", "16", "plain", "--isq", kind, layers=4)
    check(found)
    assert found["temporaries"] < 0.02 * found["weights"]


@pytest.mark.parametrize("rows", ["2", pytest.param("16", marks=slow)])
@pytest.mark.parametrize(
    "kind", [("--packing", "q4_k_m"), *(pytest.param(("--isq", kind), marks=slow) for kind in ("q4k", "q4_0", "q6k"))]
)
def test_a_layer_has_as_few_kernels_in_blocks(compiled: Any, kind: tuple[str, str], rows: str) -> None:
    """As in bfloat16: parts of products are added up where they are read, and formats side by side are one kernel's."""
    few, more = (compiled("Llama-3.1-8B", "decode", rows, "plain", *kind, layers=n) for n in (2, 4))
    check(few)
    check(more)
    assert (more["kernels"] - few["kernels"]) / 2 <= 10


def test_experts_whose_rows_are_no_whole_tiles(compiled: Any) -> None:
    """1,408 inputs, of which 256 divide nothing, in Q5_1: read as they are by kernels, as in other formats."""
    few, more = (compiled("DeepSeek-V2-Lite", "decode", "16", "plain", "--isq", "q4k", layers=n) for n in (2, 4))
    check(few)
    check(more)
    assert more["temporaries"] < 0.02 * more["weights"]
    assert (more["kernels"] - few["kernels"]) / 2 <= 18


@slow
def test_hundreds_of_rows_expand_one_weight_at_a_time(compiled: Any) -> None:
    check(compiled("Llama-3.1-8B", "backbone", "2048", "plain", "--isq", "q4k", layers=4), decode=False)


def test_a_weight_that_is_expanded_in_memory_is_seen(compiled: Any) -> None:
    """Else temporaries would say nothing."""
    found = compiled("Llama-3.1-8B", "decode", "16", "plain", "--isq", "q4k", "--defect", "expand", layers=2)
    assert found["temporaries"] > 0.02 * found["weights"]


@slow
def test_blocks_of_fp8_are_read_as_they_are(compiled: Any) -> None:
    """By kernels as many as bfloat16 has."""
    found, more = (
        compiled("Llama-3.1-8B", "decode", "16", "plain", "--packing", "fp8_blocks", layers=n) for n in (2, 4)
    )
    check(found)
    assert found["temporaries"] < 0.02 * found["weights"]
    assert (more["kernels"] - found["kernels"]) / 2 <= 10


@slow
def test_integers_are_multiplied_as_they_are(compiled: Any) -> None:
    """By kernels as many as bfloat16 has, and those that round the inputs of four products."""
    found, more = (compiled("Llama-3.1-8B", "decode", "16", "plain", "--packing", "w8a8", layers=n) for n in (2, 4))
    check(found)
    assert found["temporaries"] < 0.02 * found["weights"]
    assert (more["kernels"] - found["kernels"]) / 2 <= 10 + 4


@slow
@pytest.mark.parametrize("step", [("decode", "16", "plain"), ("backbone", "512", "plain")], ids=" ".join)
def test_sorted_inputs_are_gathered_and_weights_left_alone(compiled: Any, step: tuple[str, ...]) -> None:
    """Once for queries, keys and values, once for outputs, once for gate and up; where an activation stands in front of
    it, the gather is part of that."""
    ordered, plain = (compiled("Llama-3.1-8B", *step, "--packing", p, layers=4) for p in ("gptq_sorted", "gptq"))
    check(ordered, decode=step[0] == "decode")
    assert ordered["temporaries"] < 0.02 * ordered["weights"] + plain["temporaries"]
    assert ordered["kernels"] - plain["kernels"] <= 3 * 4


@pytest.mark.parametrize("tp", ["2", pytest.param("4", marks=slow)])
@pytest.mark.parametrize(
    "more",
    [(), *(pytest.param(each, marks=slow) for each in (("--isq", "int4"), ("--packing", "gptq_sorted")))],
    ids=" ".join,
)
def test_several_devices_are_one_graph_too(compiled: Any, more: tuple[str, ...], tp: str) -> None:
    """With what they add up inside it, in the type of the model."""
    found = compiled("Llama-3.1-8B", "decode", "16", "plain", "--tp", tp, *more, layers=4)
    check(found)
    assert found["reduced"] == ["bf16"]


@slow
def test_sums_of_several_devices_take_no_more_kernels(compiled: Any) -> None:
    few, more = (compiled("Llama-3.1-8B", "decode", "16", "plain", "--tp", "2", layers=n) for n in (2, 4))
    assert (more["kernels"] - few["kernels"]) / 2 <= 10


def test_experts_over_several_devices_are_one_graph_too(compiled: Any) -> None:
    found = compiled("Qwen3-30B-A3B", "decode", "16", "plain", "--tp", "2", layers=2)
    check(found)
    assert found["reduced"] == ["bf16"]


@pytest.mark.parametrize("tp", ["1", pytest.param("2", marks=slow)])
def test_batches_side_by_side_are_one_graph_too(compiled: Any, tp: str) -> None:
    """With the tokens that experts are given, and what is sampled, gathered inside it."""
    found = compiled("Qwen3-30B-A3B", "decode", "16", "plain", "--dp", "2", "--tp", tp, layers=2)
    check(found)
    assert "u8" in found["gathered"]


@pytest.mark.parametrize(
    "step",
    [
        ("decode", "16", "plain", "--isq", "q4k"),
        pytest.param(("decode", "16", "plain"), marks=slow),
        pytest.param(("backbone", "2048", "plain"), marks=slow),
    ],
    ids=" ".join,
)
def test_experts_stay_in_host_memory(compiled: Any, step: tuple[str, ...]) -> None:
    """Nothing copies the stacks, or the places on the device, and a decode is still one graph."""
    found = compiled("Qwen3-30B-A3B", *step, "--host-experts", "96", layers=2)
    check(found, decode=step[0] == "decode")
    assert found["on_host"] == found["host_weights"] > 0


def test_a_decode_step_is_sent_little_whatever_the_context(compiled: Any) -> None:
    found = compiled("Llama-3.1-8B", "decode", "256", "plain", "--max-model-len", "131072", layers=2)
    assert found["sent"] < 4096  # bytes: a token, a slot and a page for each of 256 rows, and two counts
    check(found)


def test_with_the_compilers_defaults_the_sampler_is_outside_the_graph(compiled: Any) -> None:
    """Else the options would be there for nothing, and the tests above would show nothing."""
    found = compiled("Llama-3.1-8B", "decode", "16", "sampled", "--defaults", layers=2)
    with pytest.raises(AssertionError):
        check(found)
    assert len(found["launches"]) > 1


def test_a_copy_of_pages_is_seen(compiled: Any) -> None:
    """Pages that are not given away are copied before a kernel changes them."""
    found = compiled("Llama-3.1-8B", "decode", "2", "plain", "--defect", "copy", layers=1)
    assert {line.split()[-1] for line in found["copies"]} == {"caches[0][0]", "caches[0][1]"}
    assert found["aliased"] < found["pages"]
    with pytest.raises(AssertionError):
        check(found)


def test_another_layout_of_pages_is_seen(compiled: Any) -> None:
    found = compiled("Llama-3.1-8B", "decode", "2", "plain", "--defect", "transpose", layers=1)
    assert {line.split()[-1] for line in found["copies"]} == {"caches[0][0]", "caches[0][1]"}


def test_a_spill_in_a_step_is_seen(compiled: Any) -> None:
    found = compiled("Llama-3.1-8B", "backbone", "512", "plain", "--defect", "spill", layers=1)
    assert "paged_attention_prefill" in found["spilled"]
    with pytest.raises(AssertionError):
        check(found, decode=False)
