"""Files of real shapes with random weights: complete, of the sizes that models have, and readable."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import shapes
from benchmarks.peers.install import JAXLLM
from benchmarks.shape_files import SHAPES, Shape, bytes_a_token, tensors, write_file
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.pallas_kernels.kernels import REFERENCE
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import load_parameters

PARAMETERS = {
    "qwen3-0.6b": 596_049_920, "llama-3.2-1b": 1_235_814_400, "gemma-3-1b": 999_885_952, "lfm2-1.2b": 1_170_340_608,
    "qwen3-4b": 4_022_468_096, "llama-3.1-8b": 8_030_261_248, "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
}  # fmt: skip
"""As the models' pages on Hugging Face state them."""
FAMILIES = {shape.arch: name for name, shape in reversed(SHAPES.items())}


def tiny(name: str) -> Shape:
    shape = SHAPES[name]
    return replace(
        shape, hidden=256, mlp=256, layers=4, heads=4, kv_heads=2, head_dim=64, vocab=512,
        experts=4 * bool(shape.experts), top=2 * bool(shape.top), attending=shape.attending and frozenset({3}),
    )  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_model(name: str) -> None:
    whole = replace(SHAPES[name], layers=SHAPES[name].of or SHAPES[name].layers)
    assert sum(math.prod(tensor.dims) for tensor in tensors(whole, whole.kinds[0])) == PARAMETERS[name]


def test_a_file_has_the_size_of_a_published_one() -> None:
    """Llama-3.1-8B's Q4_K_M is 4.92 GB, and its Q8_0 8.54, with a tokenizer of some megabytes."""
    for kind, size in (("q4_k_m", 4.92e9), ("q8_0", 8.54e9)):
        found = sum(tensor.nbytes for tensor in tensors(SHAPES["llama-3.1-8b"], kind))
        assert size - 12e6 < found < size


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in FAMILIES.values() for kind in SHAPES[name].kinds])
def test_a_file_is_read_as_it_was_meant(name: str, kind: str, tmp_path: Path) -> None:
    shape, path = tiny(name), tmp_path / "tiny.gguf"
    write_file(shape, kind, path)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    expected = list(tensors(shape, kind))
    assert list(found) == [tensor.name for tensor in expected]
    for tensor in expected:
        stored = found[tensor.name]
        assert (tuple(stored.shape)[::-1], stored.tensor_type, stored.n_bytes) == (*tensor[1:], tensor.nbytes)
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        assert np.isfinite(values).all() and 0 < values.std() < 0.1
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint)
    _, params = abstract_model(
        spec, BuildOptions(jnp.bfloat16, 1, REFERENCE, False), KindChooser(checkpoint, spec.names, 1)
    )
    loaded = load_parameters(checkpoint, params, spec.names, build_meshes(1)[0], ignored=spec.ignored)
    checkpoint.close()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(loaded)) > 0.9 * sum(
        tensor.nbytes for tensor in expected if tensor.type != gguf.GGMLQuantizationType.F32
    )


def test_a_token_reads_its_experts_and_one_row_of_an_embedding(tmp_path: Path) -> None:
    write_file(tiny("qwen3-30b-a3b"), "q8_0", tmp_path / "x.gguf")
    sizes = {tensor.name: tensor.nbytes for tensor in tensors(tiny("qwen3-30b-a3b"), "q8_0")}
    experts = sum(size for name, size in sizes.items() if "_exps" in name)
    embedding = sizes["token_embd.weight"]
    assert bytes_a_token(tmp_path / "x.gguf") == sum(sizes.values()) - experts // 2 - embedding + embedding // 512
    write_file(tiny("gemma-3-1b"), "q8_0", tmp_path / "y.gguf")
    assert bytes_a_token(tmp_path / "y.gguf") == sum(t.nbytes for t in tensors(tiny("gemma-3-1b"), "q8_0"))


def test_the_table_has_medians_and_ratios_to_the_best_peer() -> None:
    about = {"processor": "P", "cores": 2, "vector_units": ["avx2"], "shape": "s", "kind": "q8_0"}

    def row(engine: str, decode: float, load: float) -> dict[str, Any]:
        return about | {"engine": engine, "decode ×1": decode, "load first": load, "memory GB/s": 40.0}

    rows = [row(JAXLLM.name, 10.0, 4.0), row(JAXLLM.name, 30.0, 4.0), row("a", 10.0, 1.0), row("b", 5.0, 2.0)]
    rows += [about | {"engine": "c", "cannot run": "ended with 1"}]
    rows = list(map(json.loads, map(json.dumps, rows)))
    columns = shapes.columns_of(rows)
    assert columns == ["decode ×1", "load first"]
    table = shapes.markdown(rows, columns)
    assert "| s q8_0: jaxllm | 20.0 | 4.00 |" in table and "| **jaxllm / best peer** | 2.00 | 0.25 |" in table
    assert "- s q8_0: c ended with 1" in table and "| s q8_0: c | – | – |" in table
