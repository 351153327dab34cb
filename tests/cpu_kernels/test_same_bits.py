"""A token has the same bits however it is computed: alone or in a run of any length, with any number of threads."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels.attention import PAGE_DTYPES
from tests.cpu_kernels.weights import ISAS, needs_bf16, needs_kernels, random_weights

pytestmark = needs_kernels
every_isa = pytest.mark.parametrize("isa", ISAS)

TOKENS = 600
"""Of one sequence: two edges of segments and nine of blocks lie between them."""


def cut(*lengths: int) -> np.ndarray:
    """Runs of the given lengths in turn, and which of the tokens between them are left out: one after each run."""
    kept = np.ones(TOKENS, bool)
    at = 0
    for length in itertools.cycle(lengths):
        at += length + 1
        if at > TOKENS:
            return kept
        kept[at - 1] = False


SCHEDULES = {
    "every other token alone": cut(1),
    "the others alone": ~cut(1),
    "runs of 2": cut(2),
    "runs of 7 and 64": cut(7, 64),
    "runs of 1, 130 and 3": cut(1, 130, 3),
    "the last alone": np.arange(TOKENS) == TOKENS - 1,
}

CASES: dict[str, dict[str, Any]] = {
    "groups of 3": {"heads": 9, "kv_heads": 3},
    "one head for four, a window": {"heads": 4, "kv_heads": 1, "dim": 256, "window": 300},
    "each its own, a window within a block": {"heads": 2, "kv_heads": 2, "window": 37},
    "groups of 5, softcap, sinks": {"heads": 5, "kv_heads": 1, "softcap": 3.0, "sinks": True},
    "sinks, a window": {"heads": 6, "kv_heads": 2, "sinks": True, "window": 129, "page_size": 8},
    "slopes, softcap": {"heads": 6, "kv_heads": 2, "slopes": True, "softcap": 3.0},
    "slopes, a window": {"heads": 3, "kv_heads": 3, "slopes": True, "window": 129},
    "80 channels": {"heads": 4, "kv_heads": 2, "dim": 80, "page_size": 32},
    "12 channels": {"heads": 3, "kv_heads": 3, "dim": 12, "page_size": 4},
    "a group of 20": {"heads": 20, "kv_heads": 1, "dim": 32},
    "latent": {"heads": 6, "kv_heads": 1, "dim": 96, "value_dim": 64},
}


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "value_dim"))
def attend(q, k, v, pages, seq_ids, table, of_heads, **options):
    positions = jnp.arange(TOKENS, dtype=jnp.int32)
    return cpu_kernels.attention(q, k, v, pages, positions, seq_ids, table, **of_heads, **options)[0]


def attention_of(
    pages: np.dtype,
    *,
    heads: int,
    kv_heads: int,
    dim: int = 64,
    page_size: int = 16,
    sinks: bool = False,
    slopes: bool = False,
    **options: Any,
) -> Any:
    """A function from the tokens that a step has to its result, [T, H, Dv]."""
    rng = np.random.default_rng(heads + dim)
    dtype = np.float32 if pages == np.float32 else jnp.bfloat16
    q, k, v = (
        jnp.asarray(rng.normal(size=(TOKENS, n, dim)) * s, dtype) for n, s in ((heads, 3), (kv_heads, 1), (kv_heads, 1))
    )
    count = -(-TOKENS // page_size)
    table = jnp.asarray(rng.permutation(np.arange(1, count + 1)), jnp.int32)[None]
    width = dim + (4 if pages.itemsize == 1 else 0)
    empty = jnp.zeros((count + 1, kv_heads, page_size, width), pages)
    latent = "value_dim" in options
    buffers = (empty,) if latent else (empty, empty)
    more = {"sinks": jnp.linspace(-3.0, 3.0, heads)} if sinks else {}
    more |= {"slopes": jnp.linspace(0.5, 0.01, heads)} if slopes else {}
    options["scale"] = dim**-0.5

    def run(kept: np.ndarray, buffers: Any = buffers) -> Any:
        return attend(q, k, None if latent else v, buffers, jnp.where(kept, 0, 1), table, more, **options)

    positions = jnp.arange(TOKENS, dtype=jnp.int32)
    filled = jax.jit(
        lambda: cpu_kernels.attention(
            q, k, None if latent else v, buffers, positions, jnp.zeros(TOKENS, jnp.int32), table, **options
        )[1]
    )()
    return lambda kept: np.asarray(run(kept, filled)).astype(np.float32)


@every_isa
@pytest.mark.parametrize("pages", PAGE_DTYPES, ids=["bf16", "f32", "int8", "e4m3"])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, pages, isa):
    run = attention_of(pages, **CASES[case])
    with cpu_kernels.forced(isa, threads=2):
        together = run(np.ones(TOKENS, bool))
    for index, (name, kept) in enumerate(SCHEDULES.items()):
        with cpu_kernels.forced(isa, threads=1 + index % 4):
            np.testing.assert_array_equal(run(kept)[kept], together[kept], err_msg=name)


ROWS = 70


def rows_alike(function: Any, isa: str) -> None:
    """Each row of `function(rows [R, 256])` is the same among all and among a few, at any number of threads."""
    x = np.random.default_rng(3).normal(size=(ROWS, 256)).astype(np.float32)
    with cpu_kernels.forced(isa, threads=2):
        together = np.asarray(function(x))
    for threads, rows in ((1, slice(1)), (3, slice(5, 6)), (2, slice(5, 7)), (4, slice(3, 14)), (1, slice(0, 66))):
        with cpu_kernels.forced(isa, threads=threads):
            np.testing.assert_array_equal(function(x[rows]), together[rows], err_msg=f"{rows}, {threads} threads")


@every_isa
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(isa, dtype, centred):
    weight, bias = np.random.default_rng(1).normal(size=(2, 256)).astype(np.float32)
    norm = jax.jit(lambda x: cpu_kernels.normalise(x.astype(dtype), weight, bias, 1e-6, centred).astype(jnp.float32))
    rows_alike(norm, isa)


@every_isa
@pytest.mark.parametrize("format", ["q4_1", "q8_0", "bf16", "f32", "q4_1 in bf16"])
def test_products_between_norms_and_activations(isa, format):
    format, *in_bf16 = format.split(" in ")
    if in_bf16:
        needs_bf16(isa)
    shapes = (64, 256, 0), (64, 256, 1), (256, 64, 2)
    gate, up, down = (random_weights(format, *shape).tiles._replace(in_bf16=bool(in_bf16)) for shape in shapes)
    norm = cpu_kernels.RowNorm(jnp.asarray(np.random.default_rng(1).normal(size=256), jnp.float32))
    rows_alike(jax.jit(lambda x: cpu_kernels.mlp(x, gate, up, down, "silu", norm=norm, residual=x)), isa)
    rows_alike(jax.jit(lambda x: cpu_kernels.linears(x, (gate,), norm=norm)[0]), isa)
    rows_alike(jax.jit(lambda x: cpu_kernels.argmax(x, gate, norm=norm)), isa)
