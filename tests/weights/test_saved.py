"""Weights as `jaxllm convert` saves them: what is restored is what the source would have given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxllm.cli.convert.conversion import convert_model
from jaxllm.config import EngineConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.models.tasks import read_tasks
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.quantization.weight import DenseKind
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import read_parameters
from jaxllm.weights.saved import SAVED_KINDS, SavedCheckpoint, describe
from tests.reference.tiny import TINY_MODELS, write_checkpoint
from tests.reference.tiny_gguf import write_gguf

Change = Callable[[dict[str, Any]], object]


def config_of(path: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", skip_tokenizer_init=True, **fields)


def saved(source: Path, target: Path, **fields: Any) -> Path:
    convert_model(config_of(source, **fields), target, "orbax")
    return target


def parameters(path: Path, tp: int = 1, *, tiles: bool = False, dtype: Any = jnp.float32, **chosen: Any) -> list:
    """What a device mesh of `tp` would be given, in host memory."""
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint)
    kinds = KindChooser(checkpoint, spec.names, tp, tiles=tiles, **chosen)
    _, params = abstract_model(spec, BuildOptions(dtype, tp), kinds)
    return list(read_parameters(checkpoint, params, spec.names, spec.ignored))


def assert_equal(found: list, expected: list) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(mine).view(np.uint8), np.asarray(other).view(np.uint8))


@pytest.mark.parametrize("name", ["llama_tp3", "gemma3_small", "qwen2_moe", "deepseek_v2_lite", "phi", "mixtral"])
def test_a_model_comes_back_as_it_was(name, tmp_path):
    source = write_checkpoint(name, tmp_path / "source")
    target = saved(source, tmp_path / "saved")
    assert_equal(parameters(target), parameters(source))
    before, after = open_checkpoint(source), open_checkpoint(target)
    assert model_spec(after).config == model_spec(before).config
    assert model_spec(after).family is model_spec(before).family
    assert read_tasks(after) == read_tasks(before)


@pytest.mark.parametrize("scheme", ["q4_0", "q8_0", "int8", "int4", "fp8", "w8a8"])
def test_every_kind_comes_back_as_it_was(scheme, tmp_path):
    source = write_checkpoint("llama_tp3", tmp_path / "source")
    target = saved(source, tmp_path / "saved", isq=scheme)
    assert_equal(parameters(target), parameters(source, isq=scheme))
    if open_checkpoint(target).kinds["layers.0.mlp.down.weight"] != DenseKind(np.dtype(np.float32)):
        with pytest.raises(ConfigError, match="is quantized already"):
            parameters(target, isq="q8_0")


def test_segments_of_several_kinds_come_back_as_they_were(tmp_path):
    types = {"attn_q": "Q5_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "F16"}
    source = write_gguf("llama_gqa", tmp_path / "m.gguf", types=lambda name: types.get(name.split(".")[-2], "Q4_0"))
    target = saved(source, tmp_path / "saved")
    assert_equal(parameters(target), parameters(source))
    assert_equal(parameters(target, packed=False), parameters(source, packed=False))
    assert_equal(parameters(target, packed=False, isq="q8_0"), parameters(source, packed=False, isq="q8_0"))


@pytest.mark.parametrize("fields", [{}, {"isq": "q4_0", "isq_map": {"*.v_proj.weight": "int4"}}, {"isq": "int8"}])
def test_another_number_of_devices_takes_it(fields, tmp_path):
    source = write_checkpoint("llama_tp3", tmp_path / "source")
    target = saved(source, tmp_path / "saved", tensor_parallel_size=3, **fields)
    for tp in (1, 3):
        assert_equal(parameters(target, tp), parameters(source, tp, **fields))


def test_a_kernels_tiles_are_made_when_it_is_loaded(tmp_path):
    pytest.importorskip("jaxllm.cpu_kernels").available() or pytest.skip("no compiler")
    source = write_checkpoint("llama_mha8", tmp_path / "source")
    target = saved(source, tmp_path / "saved", isq="q8_0", isq_map={"*.o_proj.weight": "none"})
    chosen = {"isq": "q8_0", "isq_map": {"*.o_proj.weight": "none"}}
    found = parameters(target, tiles=True, dtype=jnp.bfloat16)
    assert {type(value).__name__ for value in found} >= {"Tiled", "Fused"}
    assert_equal(found, parameters(source, tiles=True, dtype=jnp.bfloat16, **chosen))


def test_other_programs_read_the_arrays(tmp_path):
    """With Orbax alone: a dictionary of parameters, each of one array a part."""
    import orbax.checkpoint as ocp

    source = write_checkpoint("llama_gqa", tmp_path / "source")
    target = saved(source, tmp_path / "saved", isq="int8")
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore((target / "weights").absolute())
    codes, scale = (np.asarray(found["layers.1.mlp.down.weight"][name]) for name in ("codes", "scale"))
    from safetensors.numpy import load_file

    expected = load_file(source / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(codes * scale[:, None], expected, atol=np.abs(expected).max() / 127)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_familys_config_survives_json(name, tmp_path):
    config = model_spec(open_checkpoint(write_checkpoint(name, tmp_path))).config
    assert msgspec.convert(json.loads(msgspec.json.encode(config)), DecoderConfig) == config


def test_every_kind_that_isq_makes_has_a_name():
    assert {describe(make(np.dtype(np.float32)))["name"] for make in SCHEMES.values()} <= SAVED_KINDS.keys()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    return saved(write_checkpoint("llama_gqa", directory / "source"), directory / "saved", isq="q4_0")


def changed(whole: Path, target: Path, change: Change) -> Path:
    """A copy whose manifest is another; its arrays are those of `whole`."""
    manifest = json.loads((whole / "jaxllm.json").read_text())
    change(manifest)
    target.mkdir()
    (target / "jaxllm.json").write_text(json.dumps(manifest))
    (target / "weights").symlink_to(whole / "weights")
    return target


DOWN = "layers.1.mlp.down.weight"
LIES: dict[str, tuple[Change, str]] = {
    "version": (lambda m: m.update(version=2), "version is 2; this jaxllm reads 1"),
    "field": (lambda m: m.update(extra=1), "unknown field `extra`"),
    "family": (lambda m: m.update(family="Lama"), "family is 'Lama'; supported are .*did you mean 'Llama'"),
    "decoder": (lambda m: m["decoder"].update(num_heads="many"), r"decoder: Expected `int`, got `str`.*num_heads"),
    "sizes": (lambda m: m["decoder"].update(layers=[]), "decoder: the number of layers is 0"),
    "tasks": (lambda m: m["tasks"].update(pooling="most"), "tasks: Invalid enum value 'most'"),
    "kind": (lambda m: m["tensors"][DOWN].update(kind={"name": "q9"}), "kind name is 'q9'; accepted is one of dense"),
    "type": (lambda m: m["tensors"][DOWN]["kind"].update(type="Q9"), "kind type is 'Q9'; accepted is one of Q4_0"),
    "fields": (lambda m: m["tensors"][DOWN]["kind"].pop("type"), "accepted are type"),
    "shape": (lambda m: m["tensors"][DOWN].update(shape=[2**60, 4]), "shape is"),
    "blocks": (lambda m: m["tensors"][DOWN].update(shape=[64, 100]), "100 inputs are no whole blocks of 32"),
    "rows": (lambda m: m["tensors"][DOWN].update(shape=[96, 96]), r"layers\.1\.mlp\.down\.weight.blocks is uint8"),
    "missing": (lambda m: m["tensors"].pop(DOWN), r"tensor 'layers\.1\.mlp\.down\.weight' is missing|no 'layers"),
    "unused": (
        lambda m: m["tensors"].update(odd=m["tensors"]["norm.weight"]),
        "tensor 'odd' is stored there, but this model does not use it|incomplete",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie, whole, tmp_path):
    change, message = LIES[lie]
    path = changed(whole, tmp_path / "changed", change)
    with pytest.raises(CheckpointError, match=message) as refused:
        parameters(path)
        read_tasks(open_checkpoint(path))
    assert "\n" not in str(refused.value)


def test_arrays_that_are_cut_off_are_refused(tmp_path):
    target = saved(write_checkpoint("llama_gqa", tmp_path / "source"), tmp_path / "saved")
    for file in target.glob("weights/**/d/*"):
        with open(file, "r+b") as stream:
            stream.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"weights: damaged or incomplete: ") as refused:
        parameters(target)
    assert "\n" not in str(refused.value)


def test_load_format_may_insist(whole, tmp_path):
    assert isinstance(open_checkpoint(whole, "orbax"), SavedCheckpoint)
    with pytest.raises(CheckpointError, match=r"load_format is 'orbax', but there is no directory with jaxllm\.json"):
        open_checkpoint(write_checkpoint("llama_gqa", tmp_path), "orbax")


def test_what_was_asked_for_is_kept_where_a_gguf_would_be_expanded(whole):
    checkpoint = open_checkpoint(whole)
    assert checkpoint.is_requantized
    assert checkpoint.kinds[DOWN] == GgufKind("Q4_0", np.dtype(np.float32))
