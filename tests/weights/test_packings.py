"""Quantized checkpoints are read as the packages that wrote them meant it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxllm.quantization.coded_kinds import coded_kind
from jaxllm.quantization.stored import Stored
from jaxllm.weights import open_checkpoint
from jaxllm.weights.checkpoint import Checkpoint
from tests.reference import GOLDENS

CASES = sorted(file.stem for file in (GOLDENS / "packings").glob("*.safetensors"))
ROUNDED = {"bitsandbytes_nf4_nested": 2e-3}
"""Relative errors: float16 holds scales that were quantized themselves."""


def opened(case: str, folder: Path) -> tuple[Checkpoint, Stored, np.ndarray]:
    """The checkpoint of a golden, its matrix, and what that stands for."""
    file = GOLDENS / "packings" / f"{case}.safetensors"
    shutil.copy(file, folder / "model.safetensors")
    with safe_open(file, "np") as reader:
        config, expected = reader.metadata()["quantization_config"], reader.get_tensor("expected")
    (folder / "config.json").write_text(json.dumps({"quantization_config": json.loads(config)}))
    checkpoint = open_checkpoint(folder)
    (name,) = set(checkpoint.tensors) - {"expected"}
    return checkpoint, checkpoint.read(name), expected


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_package_that_packed_them(case, tmp_path):
    checkpoint, tensor, expected = opened(case, tmp_path)
    assert tensor.shape == expected.shape
    assert all(info.shape == expected.shape for info in checkpoint.tensors.values())
    np.testing.assert_allclose(tensor.expand(), expected, rtol=ROUNDED.get(case, 2e-6), atol=1e-7)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_kept_packed_they_are_the_same_numbers(case, blocks, tmp_path):
    _, tensor, _ = opened(case, tmp_path)
    coding = tensor.codes.coding
    kind = coded_kind(coding, np.dtype(np.float32), tensor.shape[-2:-1], tensor.shape[-1], blocks=blocks)
    weight = kind.pack([tensor], None)
    shapes = jax.tree.map(lambda array: (array.shape, array.dtype), (weight, kind.abstract(tensor.shape)))
    assert shapes[0] == shapes[1]
    found = jax.jit(lambda w: w.dequantize())(jax.tree.map(jnp.asarray, weight))
    np.testing.assert_allclose(found, tensor.expand(), rtol=2e-7)
