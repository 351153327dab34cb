"""Towers and the models that see through them, against what transformers computes at float32."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxllm import cpu_kernels
from jaxllm.models.registry import model_spec
from jaxllm.models.vision.processor import Expanded, rope_places, visible_until
from jaxllm.models.vision.spec import vision_spec
from jaxllm.pallas_kernels.kernels import CPU
from jaxllm.quantization.tiles import tiled
from jaxllm.quantization.weight import DenseKind, WeightKind
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import ParamSpec
from tests.models.harness import Chunk
from tests.models.vision_harness import TowerHarness, VisionHarness, encode, write_options
from tests.reference.vision import PREPARATIONS, images, load_vision, write_vision_checkpoint

PATCHES = 1200


class Model:
    def __init__(self, name: str, folder: Path):
        kind, settings = PREPARATIONS[name]
        self.name, self.golden = name, load_vision(name)
        self.theirs = getattr(transformers, kind)(**settings)
        self.path = write_options(write_vision_checkpoint(name, folder), self.theirs)
        self.tower = TowerHarness(self.path)
        self.processor = self.tower.spec.processor(encode)
        self.images = self.tower.prepared(self.processor, images())


@pytest.fixture(scope="module", params=PREPARATIONS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def test_rows_are_those_of_transformers(model: Model) -> None:
    rows = model.tower.rows(model.images, PATCHES)
    assert [model.processor.rows(grid) for _, grid in model.images] == model.golden["counts"].tolist()
    assert rows.shape == (model.golden["counts"].sum(), model.tower.config.row_size)
    assert np.abs(rows - model.golden["rows"]).max() < 1e-4 * max(1, np.abs(model.golden["rows"]).max())


def test_each_image_alone_has_the_same_rows(model: Model) -> None:
    """Whatever else is in the batch, and however long it is."""
    parts = [model.tower.rows([image], PATCHES) for image in model.images]
    assert np.abs(np.concatenate(parts) - model.golden["rows"]).max() < 1e-4 * max(1, np.abs(parts[0]).max())


def in_tiles(spec: ParamSpec) -> tuple[WeightKind, ...]:
    sizes = [segment.rows for segment in spec.layout.segments] if spec.layout else [spec.shape[0]]
    return (tiled(DenseKind(np.dtype(np.float32)), sizes, spec.shape[-1], stack=False),)


def test_rows_on_the_kernels_of_cpus_and_in_sixteen_bits(model: Model) -> None:
    expected = model.golden["rows"]
    if model.name not in ("qwen2_5_vl", "qwen3_vl", "gemma4_e", "pixtral", "internvl_6b"):
        pytest.skip("one model for each shape of layers and mergers is enough")
    if cpu_kernels.available():
        rows = TowerHarness(model.path, kernels=CPU, kinds=in_tiles).rows(model.images, PATCHES)
        assert np.abs(rows - expected).max() < 1e-4 * max(1, np.abs(expected).max())
    rows = TowerHarness(model.path, dtype=jnp.bfloat16).rows(model.images, PATCHES).astype(np.float32)
    assert np.linalg.norm(rows - expected) < 0.05 * np.linalg.norm(expected)


def test_every_tensor_is_the_towers_or_the_language_models(model: Model) -> None:
    unused = {"post_layernorm", "encoder.layers.2", "encoder.layers.1"} if "llava" in model.name else set()
    checkpoint = open_checkpoint(model.path)
    spec = model_spec(checkpoint)
    text = {name for ways in spec.names.values() for way in ways for source in way for name in source.tensors}
    left = {name for name in checkpoint.tensors if name not in text | model.tower.used}
    assert {name for name in left if not any(part in name for part in unused)} <= {"lm_head.weight"}


def test_the_projection_of_sounds_is_not_taken_for_that_of_images(tmp_path: Path) -> None:
    """Its name has a letter less."""
    folder = write_vision_checkpoint("gemma4_e", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_audio.embedding_projection.weight"] = np.zeros((64, 16), np.float32)
    save_file(weights, folder / "model.safetensors")
    spec = vision_spec(open_checkpoint(folder))
    assert spec is not None
    ((source,),) = spec.names["merger.products.0.weight"]
    assert source.name == "model.embed_vision.embedding_projection.weight"


def test_logits_and_greedy_tokens_are_those_of_transformers(model: Model) -> None:
    golden = model.golden
    ids, image = golden["token_ids"].tolist(), int(golden["image"])
    seen = expanded(model, ids, image)
    harness = VisionHarness(model.path, max_len=160)
    harness.see(golden["rows"], seen)
    (logits,) = harness.run([ids], [Chunk(0, 0, len(ids))])
    assert np.abs(logits - golden["logits"]).max() < 2e-4
    if model.name not in ("qwen2_vl", "qwen3_vl", "gemma4_e", "gemma3"):
        return
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < len(golden["greedy"]):
        tokens.append(int(harness.decode(tokens[-1], len(ids) + len(tokens) - 1).argmax()))
    assert tokens == golden["greedy"].tolist()


def expanded(model: Model, ids: list[int], image: int) -> Expanded:
    """As the processor expands the golden's prompt, which has no tokens of the family's own around the rows."""
    mask, grids = np.array(ids) == image, [grid for _, grid in model.images]
    ends = np.cumsum(golden_counts := model.golden["counts"])
    first = [int(np.flatnonzero(mask)[end - count]) for end, count in zip(ends, golden_counts, strict=True)]
    spans = [(begin, begin + int(count)) for begin, count in zip(first, golden_counts, strict=True)]
    found = model.processor
    places, delta = rope_places(mask, spans, grids, found.merge) if found.axes else (None, 0)
    rows = np.where(mask, np.cumsum(mask) - 1, -1)
    return Expanded(ids, rows, spans, visible_until(mask) if found.both_ways else None, places, delta)
