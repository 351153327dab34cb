"""Models whose weights lie in the tiles of GPU kernels, interpreted or on a GPU: the logits of what is kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.platform import Platform
from jaxllm.models.registry import model_spec
from jaxllm.pallas_kernels import Kernels, Unsummed
from jaxllm.pallas_kernels.gpu import packed
from jaxllm.quantization.gpu_tiles import GpuTiles
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from tests.models.harness import Chunk, Harness
from tests.models.test_gpu_kernels import INTERPRETED
from tests.reference import load_golden, packings
from tests.reference.tiny import draw_weights, tiny_config
from tests.reference.tiny_gguf import write_gguf

pytestmark = pytest.mark.hardware

SIZES = {
    "llama_gqa": {64: 256, 96: 512},
    "phi3": {64: 256, 84: 256, 168: 512, 128: 512},
    "mixtral": {80: 256, 104: 256},
    "mixtral, ragged": {80: 256, 104: 1408},
}
"""Of tiny models: what each of their sizes becomes, so that blocks of 256 divide inputs, or those of down do not."""
CASES = (
    "llama_gqa:q4k",
    "llama_gqa:q4_0",
    "phi3:q5k",
    "phi3:q3k",
    "phi3:q8_0",
    "mixtral:q4k",
    "mixtral:q5_0",
    "mixtral:int4",
    "mixtral, ragged:q4k",
)


def write(model: str, folder: Path) -> Path:
    """A checkpoint of floats."""
    sizes = SIZES[model]
    model = model.partition(",")[0]

    def wide(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        kept = model == "llama_gqa" and ("k_proj" in name or "v_proj" in name)  # as many rows as there were inputs
        return tuple(size if kept and axis == 0 else sizes.get(size, size) for axis, size in enumerate(shape))

    layers = {"num_hidden_layers": 2}
    config = {
        key: sizes.get(value, value) if type(value) is int else value for key, value in tiny_config(model).items()
    }
    shapes = {
        name: wide(name, shape) for name, shape in load_golden(model).tensor_shapes.items() if "layers.2." not in name
    }
    packing = packings.gptq(4, 128, symmetric=True)
    return packings.write(packing, config | layers, draw_weights(model, shapes), folder)[1]


def logits(path: Path, ids: list[int], kernels: Kernels = INTERPRETED, **options: Any) -> np.ndarray:
    """Of a prompt in parts, one of them more than few rows, and of a decode."""
    checkpoint = open_checkpoint(path)
    kinds = KindChooser(checkpoint, model_spec(checkpoint).names, **options)
    model = Harness(path, kinds=kinds, **({"kernels": kernels} if "gpu_tiles" in options else {}))
    parts = [model.run([ids], [Chunk(0, a, b)])[0] for a, b in pairwise([0, 3, len(ids) - 1])]
    return np.concatenate([*parts, model.decode(ids[-1], len(ids) - 1)[None]])


@pytest.mark.parametrize("case", CASES)
def test_tiles_give_the_logits_of_what_they_hold(case: str, tmp_path: Path) -> None:
    """Products of few and many rows, embeddings, fused projections, experts; what fits into no tile stays beside."""
    model, scheme = case.split(":")
    path = write(model, tmp_path)
    ids = np.random.default_rng().integers(130, size=24).tolist()
    expected = logits(path, ids, isq=scheme)
    found = logits(path, ids, isq=scheme, gpu_tiles=True)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("case", ["llama_gqa:q4_0", "mixtral:q4_0"])
def test_parts_of_rows_are_added_up_by_who_reads_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and what goes back to the residual stream by the next norm; queries, keys and values before attention."""
    monkeypatch.setattr(packed, "FEW", replace(packed.FEW, least=64))
    counts = []

    def noted(x: Any, out: Any, norm: Any) -> Any:
        counts.append(len(out.parts) if isinstance(out, Unsummed) else 1)
        assert INTERPRETED.add_norm is not None
        return INTERPRETED.add_norm(x, out, norm)

    model, scheme = case.split(":")
    path = write(model, tmp_path)
    ids = np.random.default_rng().integers(130, size=6).tolist()
    expected = logits(path, ids, isq=scheme)
    found = logits(path, ids, replace(INTERPRETED, add_norm=noted), isq=scheme, gpu_tiles=True)
    assert max(counts) > 1
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_gpu_is_given_tiles(tmp_path: Path) -> None:
    """As the engine chooses; also weights whose 96 inputs are no whole tiles of 64."""
    path = write_gguf("llama_gqa", tmp_path / "model.gguf", types=lambda name: "Q4_1")
    config = EngineConfig(model=str(path), dtype="float32")
    found = {
        platform: {
            param.path: param.abstract()
            for param in make_blueprint(config, open_checkpoint(path), Platform(platform, 1, None, 2**33)).params
        }
        for platform in ("gpu", "cpu")
    }
    tiled = {path for path, value in found["gpu"].items() if isinstance(value, GpuTiles)}
    assert {"embed.weight", "layers.0.attention.qkv.weight", "layers.2.mlp.gate_up.weight"} <= tiled
    assert "layers.0.mlp.down.weight" in tiled
    assert not any(isinstance(value, GpuTiles) for value in found["cpu"].values())
