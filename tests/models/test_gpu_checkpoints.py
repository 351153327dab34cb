"""Quantized checkpoints on the kernels of NVIDIA GPUs, interpreted or on one: the logits of what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from tests.models.harness import Chunk, Harness
from tests.models.packed_models import prompt, write
from tests.models.test_gpu_kernels import INTERPRETED

pytestmark = pytest.mark.hardware

CASES = (
    "llama:gptq_sorted", "llama:gptq_sorted_each", "phi3:gptq_sorted", "mixtral:gptq_sorted_each",
    "mixtral:bitsandbytes_nf4", "llama:modelopt_nvfp4", "mixtral:nvfp4",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_packed_checkpoint_gives_the_logits_of_its_numbers(case: str, tmp_path: Path) -> None:
    """Few rows in a decode, many in a prompt."""
    packed, plain = write(case, tmp_path)
    ids = prompt()
    model = Harness(packed, kernels=INTERPRETED, kinds=kinds(packed))
    expected = Harness(plain).run([ids], [Chunk(0, 0, len(ids))])[0]
    found = [model.run([ids], [Chunk(0, 0, len(ids) - 1)])[0], model.decode(ids[-1], len(ids) - 1)[None]]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def kinds(path: Path) -> KindChooser:
    checkpoint = open_checkpoint(path)
    return KindChooser(checkpoint, model_spec(checkpoint).names)


@pytest.mark.parametrize("case", ["llama:fp8_blocks", "deepseek_v3:fp8_blocks", "llama:mxfp8"])
def test_bfloat16_is_as_close_as_in_plain_xla(case: str, tmp_path: Path) -> None:
    """To the numbers that a checkpoint stands for, in float32."""
    packed, plain = write(case, tmp_path)
    ids = prompt()
    expected = Harness(plain).run([ids], [Chunk(0, 0, len(ids))])[0]

    def error(**options: Any) -> float:
        model = Harness(packed, dtype=jnp.bfloat16, kinds=kinds(packed), **options)
        found = [model.run([ids], [Chunk(0, 0, len(ids) - 1)])[0], model.decode(ids[-1], len(ids) - 1)[None]]
        return float(np.sqrt(((np.concatenate(found) - expected) ** 2).mean()))

    assert error(kernels=INTERPRETED) < 1.3 * error() < 0.1 * expected.std()


@pytest.mark.parametrize("case", ["llama:compressed_w8a8", "mixtral:compressed_w8a8"])
def test_rounded_inputs_give_the_logits_of_plain_xla(case: str, tmp_path: Path) -> None:
    """But for inputs that lie between two codes, which are rounded to either; what rounding as such does is more."""
    packed, plain = write(case, tmp_path)
    ids = prompt()
    model = Harness(packed, kernels=INTERPRETED, kinds=kinds(packed))
    found = np.concatenate(
        [model.run([ids], [Chunk(0, 0, len(ids) - 1)])[0], model.decode(ids[-1], len(ids) - 1)[None]]
    )
    expected = Harness(packed, kinds=kinds(packed)).run([ids], [Chunk(0, 0, len(ids))])[0]
    exact = Harness(plain).run([ids], [Chunk(0, 0, len(ids))])[0]
    differences = [np.sqrt(((other - expected) ** 2).mean()) for other in (found, exact)]
    assert differences[0] < 0.01 * differences[1]
