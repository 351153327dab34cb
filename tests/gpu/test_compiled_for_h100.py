"""The programs that an H100 would run, compiled here: what is in them, and what is not.

Nothing is tuned without a device: which tiles and which library a product takes means nothing here. What all layers
have alike is looked at in a few of them; those of a whole model take minutes to compile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.compile_step import large_copies

pytestmark = [pytest.mark.gpu_compile, pytest.mark.timeout(900)]

CONFIGS = Path(__file__).parents[1] / "reference" / "configs"
MOST_SECONDS = 20
SLOWER = 10
"""How much longer a compilation may take beside others, or on a slow machine."""


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
    assert found["large_copies"] == []
    assert found["aliased"] >= found["pages"] > 0
    assert found["temporaries"] <= found["planned"]
    assert found["seconds"] < MOST_SECONDS * SLOWER
    assert [name for name in found["spilled"] if "fusion" not in name] == []  # fusions are XLA's own
    if decode:
        assert found["launches"] == ["kCommandBuffer"]  # the host starts one graph, and has nothing more to do


@pytest.mark.parametrize(
    ("rows", "most", "options"),
    [
        # With two rows the library's products would be padded. XLA's own split the inputs of three, which is a guess
        # without a device, and add up what they gave.
        ("2", 10 + 3, ("--triton",)),
        ("16", 10, ()),
        ("256", 10, ()),
    ],
)
def test_a_dense_model_has_ten_kernels_a_layer(compiled: Any, rows: str, most: int, options: tuple[str, ...]) -> None:
    few, more = (compiled("Llama-3.1-8B", "decode", rows, "plain", *options, layers=n) for n in (2, 4))
    check(few)
    check(more)
    assert (more["kernels"] - few["kernels"]) / 2 <= most
    assert more["spilled"] == {}


@pytest.mark.parametrize("step", [("decode", "256", "sampled"), ("backbone", "2048", "plain")], ids=" ".join)
def test_a_whole_dense_model(compiled: Any, step: tuple[str, ...]) -> None:
    check(compiled("Llama-3.1-8B", *step), decode=step[0] == "decode")


@pytest.mark.parametrize("step", [("decode", "256", "plain"), ("backbone", "2048", "plain")], ids=" ".join)
def test_experts_are_neither_copied_nor_expanded(compiled: Any, step: tuple[str, ...]) -> None:
    found = compiled("Qwen3-30B-A3B", *step, layers=4)
    check(found, decode=step[0] == "decode")
    assert found["temporaries"] < 0.01 * 48 / 4 * found["weights"]


@pytest.mark.parametrize("step", [("decode", "16", "plain"), ("backbone", "1536", "plain")], ids=" ".join)
def test_latent_attention(compiled: Any, step: tuple[str, ...]) -> None:
    """With 1,536 tokens, so that no activation has the size of a weight."""
    check(compiled("DeepSeek-V2-Lite", *step, layers=3), decode=step[0] == "decode")


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantized_weights_are_expanded_in_registers(compiled: Any, kind: str) -> None:
    found = compiled("Llama-3.1-8B", "decode", "16", "plain", "--isq", kind, "--triton", layers=4)
    check(found)
    assert found["temporaries"] < 0.02 * found["weights"]


def test_several_devices_are_one_graph_too(compiled: Any) -> None:
    check(compiled("Llama-3.1-8B", "decode", "16", "plain", "--tp", "2", layers=4))


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


def test_a_copy_of_a_weight_or_of_pages_is_seen() -> None:
    text = """
  %copy.1 = bf16[4096,4096]{1,0} copy(%p0)
  ROOT %transpose.2 = bf16[8,16,65536]{2,1,0} transpose(%p1), dimensions={1,0,2}
  %copy.3 = f32[512,128]{1,0} copy(%p2)
"""
    assert large_copies(text, {4096 * 4096, 8 * 16 * 65536, 512 * 128}) == ["copy.1", "transpose.2"]


def test_a_spill_and_a_second_launch_fail(compiled: Any) -> None:
    found = compiled("Llama-3.1-8B", "decode", "2", "plain", layers=2)
    check(found)
    for changed in ({"spilled": {"paged_attention_decode": 8}}, {"launches": ["kCommandBuffer", "kCopy"]}):
        with pytest.raises(AssertionError):
            check(found | changed)
