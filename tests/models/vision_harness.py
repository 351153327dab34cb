"""A model that sees images as an engine would run it: processor, tower, rows in the place of embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from PIL import Image

from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_tower
from jaxllm.models.vision.packing import pack
from jaxllm.models.vision.processor import Expanded, Grid, Processor
from jaxllm.models.vision.spec import vision_spec
from jaxllm.models.vision.tower import TowerBatch
from jaxllm.pallas_kernels import REFERENCE, ImageRows, Kernels, StepMetadata
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import load_parameters
from tests.models.harness import Harness


def encode(text: str) -> list[int]:
    """A tokenizer of texts between images: a token for each kind of text, and none for nothing."""
    return [] if not text else [11 + sum(text.encode()) % 100]


class TowerHarness:
    """A checkpoint's tower with its weights, jitted."""

    def __init__(
        self, path: Path, *, dtype: Any = jnp.float32, kernels: Kernels = REFERENCE, kinds: Any = None, tp: int = 1
    ):
        checkpoint = open_checkpoint(path)
        spec = vision_spec(checkpoint)
        assert spec is not None
        self.spec, self.config = spec, spec.tower
        model, params = abstract_tower(spec.tower, BuildOptions(dtype, tp, kernels), kinds)
        mesh = build_meshes(tp)[0]
        loaded = load_parameters(checkpoint, params, spec.names, mesh, ignored=("*",))
        self._weights = tuple(jax.tree.leaves(loaded))
        self.used = {name for param in params for ways in [spec.names[param.path]] for way in ways for source in way
                     for name in source.tensors}  # fmt: skip
        checkpoint.close()
        graph, state = nnx.split(model)

        def run(weights: Any, batch: TowerBatch) -> jax.Array:
            return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), weights))(batch)

        specs = (tuple(P(*leaf.axes) for param in params for leaf in param.leaves()), P())
        mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        self._run = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})

    def rows(self, images: Sequence[tuple[np.ndarray, Grid]], patches: int) -> np.ndarray:
        """The rows of images, in a batch of that many patches."""
        count = sum(grid.patches for _, grid in images) // self.config.patches_per_row
        return np.asarray(self._run(self._weights, pack(self.config, images, patches)))[:count]

    def prepared(self, processor: Processor, images: Sequence[Image.Image]) -> list[tuple[np.ndarray, Grid]]:
        return [(processor.patches(image), processor.grid(image.height, image.width)) for image in images]


class VisionHarness(Harness):
    """A language model that is given rows of images."""

    tokens = 144
    rows: np.ndarray
    expanded: Expanded

    def see(self, rows: np.ndarray, expanded: Expanded) -> None:
        """What the next steps, all of sequence 0, are about."""
        self.rows, self.expanded = rows, expanded

    def _call(self, tokens: np.ndarray, meta: StepMetadata) -> np.ndarray:
        seen, positions = self.expanded, np.asarray(meta.positions)
        live = np.asarray(meta.seq_ids) < len(meta.context_len)
        inside = live & (positions < len(seen.ids))
        index = np.minimum(positions, len(seen.ids) - 1)
        row_of = np.where(inside, seen.rows[index], -1).astype(np.int32)
        fields: dict[str, Any] = {"images": ImageRows(jnp.asarray(self.rows), jnp.asarray(row_of))}
        if seen.places is not None:
            places = np.where(inside, seen.places[:, index], positions + seen.delta)
            fields["rope_places"] = jnp.asarray(places.astype(np.int32))
        if seen.visible_until is not None:
            fields["visible_until"] = jnp.asarray(np.where(inside, seen.visible_until[index], positions))
        return super()._call(tokens, replace(meta, **fields))


def write_options(folder: Path, processor: Any) -> Path:
    (folder / "preprocessor_config.json").write_text(processor.to_json_string())
    return folder


def stated(processor: Any) -> dict[str, Any]:
    return json.loads(processor.to_json_string())
