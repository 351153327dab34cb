"""A tiny model of each family written as GGUF is the same model as its Hugging Face checkpoint."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.config import DecoderConfig
from jaxllm.models.layers.rope import RopeConfig, inverse_frequencies
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import FAMILIES, abstract_model, model_spec
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import load_parameters
from tests.reference.tiny import write_checkpoint
from tests.reference.tiny_gguf import GGUF_MODELS, OLDER_MODELS, gguf_architecture, gguf_config, write_gguf


@pytest.fixture(params=GGUF_MODELS)
def files(request, tmp_path) -> tuple[Path, Path]:
    """The same model as a GGUF file and as a checkpoint directory."""
    return write_gguf(request.param, tmp_path / "model.gguf"), hf_checkpoint(request.param, tmp_path / "hf")


def hf_checkpoint(name: str, directory: Path) -> Path:
    write_checkpoint(name, directory)
    (directory / "config.json").write_text(json.dumps(gguf_config(name)))
    return directory


def parameters(path: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint)
    _, specs = abstract_model(spec, BuildOptions(dtype=jnp.float32))
    arrays = load_parameters(checkpoint, specs, spec.names, one_device(), ignored=spec.ignored)
    return {s.path: np.asarray(array) for s, array in zip(specs, jax.tree.leaves(arrays), strict=True)}


@cache
def one_device() -> Any:
    return build_meshes(1)[0]


def assert_same_parameters(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        np.testing.assert_array_equal(ours[key], expected, err_msg=key)


def config_of(path: Path) -> DecoderConfig:
    return model_spec(open_checkpoint(path)).config


def differences(ours: Any, theirs: Any, name: str = "config") -> list[str]:
    """Where two configs differ, by field. Numbers may by float32's rounding; rotations only in how they are spelled."""
    if isinstance(ours, RopeConfig) and isinstance(theirs, RopeConfig):
        return [] if same_rotation(ours, theirs) else [f"{name}: {ours} is not {theirs}"]
    if is_dataclass(ours) and type(ours) is type(theirs):
        named = [f.name for f in fields(ours) if f.name != "sees_images"]  # a GGUF file without a tower has none
        pairs = [(field, getattr(ours, field), getattr(theirs, field)) for field in named]
        return [found for field, a, b in pairs for found in differences(a, b, f"{name}.{field}")]
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = zip(range(len(ours)), ours, theirs, strict=True)
        return [found for index, a, b in pairs for found in differences(a, b, f"{name}[{index}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        return [] if ours == pytest.approx(theirs, rel=1e-6) else [f"{name}: {ours} is not {theirs}"]
    return [] if ours == theirs else [f"{name}: {ours!r} is not {theirs!r}"]


def same_rotation(ours: RopeConfig, theirs: RopeConfig) -> bool:
    """Whether they rotate the same channels by the same angles, however they spell it."""

    def kind(rope: RopeConfig) -> tuple[int, bool, int | None]:
        return rope.dim, rope.interleaved, rope.original_length if rope.depends_on_length else None

    if kind(ours) != kind(theirs):
        return False
    lengths = (False, True) if ours.depends_on_length else (False,)
    pairs = [(inverse_frequencies(ours, long=long), inverse_frequencies(theirs, long=long)) for long in lengths]
    pairs.append((np.array(ours.attention_factor), np.array(theirs.attention_factor)))
    return all(np.allclose(a, b, rtol=1e-5, atol=0) for a, b in pairs)


def test_gguf_loads_to_the_same_parameters(files):
    ours, theirs = map(parameters, files)
    assert_same_parameters(ours, theirs)


def test_gguf_metadata_gives_the_same_config(files):
    ours, theirs = map(config_of, files)
    assert differences(ours, theirs) == []


@pytest.mark.parametrize("name", OLDER_MODELS)
def test_files_of_earlier_conversions_load_alike(name, tmp_path):
    older = write_gguf(name, tmp_path / "older.gguf", older=True)
    newer = write_gguf(name, tmp_path / "newer.gguf")
    assert_same_parameters(parameters(older), parameters(newer))
    assert differences(config_of(older), config_of(newer)) == []


def test_every_architecture_is_tried():
    every = {a for family in FAMILIES for a in family.gguf_architectures}
    assert every - set(map(gguf_architecture, GGUF_MODELS)) == {"baichuan"}, "test_baichuan.py has that"
