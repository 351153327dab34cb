"""The programs that an H100 would run, compiled here: what is in them, and what is not.

Nothing is tuned without a device: which tiles and which library a product takes means nothing here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu_compile, pytest.mark.timeout(900)]

CONFIGS = Path(__file__).parents[1] / "reference" / "configs"


@pytest.fixture
def compiled(tmp_path: Path) -> Any:
    def compile_step(model: str, *arguments: str) -> dict[str, Any]:
        config = tmp_path / model / "config.json"
        config.parent.mkdir()
        config.write_text(json.dumps(json.loads((CONFIGS / f"{model}.json").read_text())["config"]))
        kind, size, variant, *more = arguments
        program = [sys.executable, "-m", "tests.gpu.compile_step", str(config), kind, size, variant, str(tmp_path)]
        done = subprocess.run([*program, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return compile_step


@pytest.mark.parametrize(
    "step",
    [
        ("decode", "2", "plain"),
        ("decode", "16", "sampled"),
        ("decode", "256", "sampled"),
        ("backbone", "2048", "plain"),
    ],
    ids=" ".join,
)
def test_a_dense_model(compiled: Any, step: tuple[str, ...]) -> None:
    found = compiled("Llama-3.1-8B", *step)
    assert found["large_copies"] == []
    assert found["aliased"] >= found["pages"] > 0
    assert found["temporaries"] <= found["planned"]
    assert [name for name in found["spilled"] if not name.endswith("fusion")] == []  # fusions are XLA's own
    if step[0] == "decode":
        assert found["launches"] == ["kCommandBuffer"]  # the host starts one graph, and has nothing more to do
    assert found["kernels"] / found["layers"] < 18  # fourteen in a layer; the head and the sampler have the others


def test_several_devices_are_one_graph_too(compiled: Any) -> None:
    found = compiled("Llama-3.1-8B", "decode", "16", "plain", "--tp", "2")
    assert found["launches"] == ["kCommandBuffer"]
    assert found["large_copies"] == [] and found["aliased"] >= found["pages"] > 0


def test_with_the_compilers_defaults_the_sampler_is_outside_the_graph(compiled: Any) -> None:
    """Else the options would be there for nothing, and the tests above would show nothing."""
    assert len(compiled("Llama-3.1-8B", "decode", "16", "sampled", "--defaults")["launches"]) > 1
