"""Which kernels a backend's name means, on which platform and over which pages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import REFERENCE, choose_kernels
from jaxllm.pallas_kernels.kernels import COMPILED_GPU
from jaxllm.pallas_kernels.pages import PageUse
from jaxllm.pallas_kernels.products import ragged_dot, tiles
from tests.pallas_kernels.oracle import ragged_batch


@pytest.mark.parametrize(
    ("backend", "platform", "chosen"),
    [
        ("auto", "cpu", "reference"),
        ("auto", "gpu", "gpu"),
        ("auto", "tpu", "tpu"),
        ("tpu", "tpu", "tpu"),
        ("reference", "tpu", "reference"),
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
        assert choose_kernels(backend, "gpu").experts is COMPILED_GPU.experts
        assert choose_kernels(backend, "gpu").page_dtype(jnp.bfloat16) == jnp.bfloat16


@pytest.mark.parametrize(
    ("backend", "platform", "words"),
    [
        ("flash", "cpu", ("attention_backend is 'flash'", "accepted are auto, reference, gpu, tpu")),
        ("gpu", "cpu", ("attention_backend is 'gpu'", "needs a GPU", "runs on cpu")),
        ("tpu", "gpu", ("attention_backend is 'tpu'", "needs a TPU", "runs on gpu")),
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
    assert chosen.attention is REFERENCE.attention and not chosen.rotates_heads
    (record,) = caplog.records
    assert "plain XLA" in record.message and "\n" not in record.message
    with pytest.raises(ConfigError, match=r"kernel for .* with dtype 'float32'; accepted are .* or a dtype of 16 bits"):
        choose_kernels("gpu", "gpu", kv_cache_dtype=kind, dtype=jnp.float32)


FITS = PageUse(heads=8, dims=(128, 128), sequences=256, pages_per_seq=896)


@pytest.mark.parametrize(
    ("kind", "dtype", "use", "what"),
    [
        ("int8", jnp.bfloat16, FITS, "kv_cache_dtype 'int8'"),
        ("auto", jnp.float16, FITS, "dtype 'float16'"),
        ("auto", jnp.bfloat16, FITS._replace(heads=1, dims=(576,)), "latent attention"),
        ("auto", jnp.bfloat16, FITS._replace(sinks=True), "attention sinks"),
        ("auto", jnp.bfloat16, FITS._replace(alibi=True), "biases by distance (ALiBi)"),
        ("auto", jnp.bfloat16, FITS._replace(dims=(256, 256)), "heads of 256 channels"),
        ("auto", jnp.bfloat16, FITS._replace(heads=3), "3 KV heads a device"),
        ("auto", jnp.float32, FITS, "8 KV heads a device in float32"),
        ("auto", jnp.bfloat16, FITS._replace(pages_per_seq=897), "256 sequences and 897 pages of each"),
    ],
)
def test_what_the_tpus_kernel_does_not_take_is_left_to_the_compiler(kind, dtype, use, what, caplog):
    """As libtpu says where it compiles them: see tests/tpu/test_compiled_for_v5e.py."""
    assert choose_kernels("auto", "tpu", dtype=jnp.bfloat16, uses=[FITS]).name == "tpu"
    assert not caplog.records
    chosen = choose_kernels("auto", "tpu", kv_cache_dtype=kind, dtype=dtype, uses=[] if use is None else [use])
    assert chosen.name == "reference" and chosen.grouped_matmul is ragged_dot
    assert len(chosen.page_layout.shapes(4, 16, 2, (128, 128))) == 2
    (record,) = caplog.records
    assert what in record.message and "plain XLA" in record.message and "\n" not in record.message
    with pytest.raises(ConfigError, match="accepted are attention_backend 'auto' or 'reference'"):
        choose_kernels("tpu", "tpu", kv_cache_dtype=kind, dtype=dtype, uses=[] if use is None else [use])


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
