"""Which kernels a backend's name means, on which platform and over which pages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import REFERENCE, choose_kernels, gpu_products
from jaxllm.pallas_kernels.grouped_matmul import ragged_dot, tiles
from tests.pallas_kernels.oracle import ragged_batch


@pytest.mark.parametrize(
    ("backend", "platform", "chosen"),
    [
        ("auto", "cpu", "reference"),
        ("auto", "gpu", "gpu"),
        ("auto", "tpu", "reference"),
        ("auto", "a platform of next year", "reference"),
        ("gpu", "gpu", "gpu"),
        ("reference", "gpu", "reference"),
    ],
)
def test_choice(backend, platform, chosen):
    assert choose_kernels(backend, platform).name == chosen


def test_a_platform_gets_its_own_products_and_pages_whatever_the_attention():
    assert choose_kernels("auto", "tpu").grouped_matmul is ragged_dot
    assert choose_kernels("auto", "cpu").grouped_matmul is tiles
    assert choose_kernels("auto", "cpu").page_dtype(jnp.bfloat16) == np.uint16
    for backend in ("auto", "reference", "gpu"):
        assert choose_kernels(backend, "gpu").grouped_matmul is gpu_products.grouped_matmul
        assert choose_kernels(backend, "gpu").page_dtype(jnp.bfloat16) == jnp.bfloat16


@pytest.mark.parametrize(
    ("backend", "platform", "words"),
    [
        ("flash", "cpu", ("attention_backend is 'flash'", "accepted are auto, reference, gpu")),
        ("gpu", "cpu", ("attention_backend is 'gpu'", "needs a GPU", "runs on cpu")),
    ],
)
def test_refusal_is_one_line_with_what_would_do(backend, platform, words):
    with pytest.raises(ConfigError) as error:
        choose_kernels(backend, platform)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_pages_of_a_float32_model_are_left_to_the_compiler(kind, caplog):
    """The kernels would spill: see `SPILLING` in tests/gpu/kernels.py."""
    assert choose_kernels("auto", "gpu", kv_cache_dtype=kind, dtype=jnp.bfloat16).name == "gpu"
    assert not caplog.records
    chosen = choose_kernels("auto", "gpu", kv_cache_dtype=kind, dtype=jnp.float32)
    assert chosen.attention is REFERENCE.attention and not chosen.turns_heads
    (record,) = caplog.records
    assert "plain XLA" in record.message and "\n" not in record.message
    with pytest.raises(ConfigError, match="dtype 'float32' has no GPU kernel; accepted are"):
        choose_kernels("gpu", "gpu", kv_cache_dtype=kind, dtype=jnp.float32)


def test_pages_and_values_must_agree():
    latent = ragged_batch(decodes=(3, 4), kv_heads=1, value_dim=16)
    plain = ragged_batch(decodes=(3, 4))
    attend = REFERENCE.attention
    with pytest.raises(ValueError, match="value_dim is 16"):
        attend(plain.q, plain.k, plain.v, plain.pages, plain.meta, scale=1.0, value_dim=16)
    with pytest.raises(ValueError):
        attend(plain.q, plain.k, None, plain.pages, plain.meta, scale=1.0, value_dim=16)
    with pytest.raises(ValueError):
        attend(latent.q, latent.k, latent.k, latent.pages, latent.meta, scale=1.0)
