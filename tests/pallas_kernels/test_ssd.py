"""State-space duality against its recurrence, token by token in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.pallas_kernels import SSDInputs
from jaxllm.pallas_kernels.gpu.states import ssd_decode
from jaxllm.pallas_kernels.kernels import CPU
from jaxllm.pallas_kernels.ssd import CHUNK, chunked, recurrent
from tests.cpu_kernels.weights import ISAS
from tests.pallas_kernels.states import STEPS, Chunk, Step, run_by_token, state_step, used_rows
from tests.support.gpu_here import INTERPRET

SHAPES = {"three groups": (6, 5, 3, 17), "one group": (4, 8, 1, 32)}
"""Heads, the size of what they put into a state, groups, and the numbers that it is put at."""

FORMS: dict[str, Callable[..., Any]] = {
    "recurrent": jax.jit(recurrent), "chunked": jax.jit(chunked), "cpu": jax.jit(CPU.ssd),
    "gpu": jax.jit(partial(ssd_decode, interpret=INTERPRET)),
}  # fmt: skip
NATIVE = pytest.param("cpu", marks=pytest.mark.skipif(not cpu_kernels.available(), reason="no kernels"))


def draw(tokens: int, heads: int, dim: int, groups: int, size: int) -> SSDInputs:
    dice = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return dice.standard_normal(shape).astype(np.float32)

    dt, a = np.abs(normal(tokens, heads)) * np.float32(0.3), -np.exp(normal(heads))
    shared = (normal(tokens, groups, size) for _ in range(2))
    return SSDInputs(normal(tokens, heads, dim), dt, a, *shared, normal(heads))


def states_of(inputs: SSDInputs, rows: int) -> np.ndarray:
    heads, dim = inputs.x.shape[1:]
    return np.random.default_rng(1).standard_normal((rows, heads, dim, inputs.b.shape[2])).astype(np.float32)


def by_definition(step: Step, inputs: SSDInputs, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, dt, a, b, c, skip = (np.asarray(part, np.float64) for part in inputs)
    heads, groups = x.shape[1], b.shape[1]
    of_group = np.arange(heads) // (heads // groups)

    def run(state: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        put = (dt[t][:, None] * x[t])[:, :, None] * b[t][of_group][:, None]
        state = np.exp(dt[t] * a)[:, None, None] * state + put
        return state, np.einsum("hpn,hn->hp", state, c[t][of_group]) + skip[:, None] * x[t]

    return run_by_token(step, buffer, run)


def check(form: str, step: Step, shape: Sequence[int]) -> None:
    inputs = draw(len(step.meta.positions), *shape)
    buffer, used = states_of(inputs, step.rows), used_rows(step)
    expected, expected_rows = by_definition(step, inputs, buffer)
    y, rows = (np.asarray(part) for part in FORMS[form](inputs, buffer, step.meta))
    np.testing.assert_allclose(y[step.live], expected, rtol=1e-4, atol=3e-5)
    np.testing.assert_allclose(rows[used], expected_rows[used], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("form", ["recurrent", "chunked", NATIVE])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STEPS)
def test_tokens_read_what_those_before_them_left(name, shape, form):
    chunks, sizes = STEPS[name]
    check(form, state_step(chunks, **sizes), SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["decodes", "one"])
def test_the_kernel_of_a_gpu(name, shape):
    chunks, sizes = STEPS[name]
    check("gpu", state_step(chunks, **sizes), SHAPES[shape])


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    chunks, sizes = STEPS["mixed"]
    with cpu_kernels.forced(isa, threads=3):
        check("cpu", state_step(chunks, **sizes), SHAPES["three groups"])


def in_steps(form: str, inputs: SSDInputs, cuts: Sequence[int]) -> list[np.ndarray]:
    """What one sequence reads, and its state, in steps that end at `cuts`, each padded to as many tokens."""
    tokens, buffer, read = len(inputs.x), states_of(inputs, 13), []
    for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        step = state_step([Chunk(begin, end - begin)], tokens=tokens, seqs=4)
        padding = [(0, tokens - end + begin)]
        here = {
            name: value if name in ("a", "skip") else np.pad(value[begin:end], padding + [(0, 0)] * (value.ndim - 1))
            for name, value in inputs._asdict().items()
        }
        y, buffer = FORMS[form](SSDInputs(**here), buffer, step.meta)
        read.append(np.asarray(y)[: end - begin])
    assert step.meta.states is not None
    return [np.concatenate(read), np.asarray(buffer)[int(step.meta.states.written[0])]]


@pytest.mark.parametrize(
    ("form", "cuts"),
    [
        ("recurrent", [1, 7, 64, 100]),
        ("recurrent", [*range(1, 12)]),
        ("chunked", [CHUNK]),
        ("chunked", [CHUNK, 2 * CHUNK]),
    ],
)
def test_where_steps_end_changes_no_bit(form, cuts):
    """Anywhere where one token is run after the other, and at the ends of chunks where chunks are."""
    inputs = draw(150, *SHAPES["three groups"])
    for cut, whole in zip(in_steps(form, inputs, cuts), in_steps(form, inputs, []), strict=True):
        np.testing.assert_array_equal(cut, whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_where_steps_end_changes_no_bit_of_the_native_kernel(shape, isa):
    inputs = draw(60, *SHAPES[shape])
    with cpu_kernels.forced(isa):
        whole = in_steps("cpu", inputs, [])
    for cuts, threads in (([1, 2, 9, 40], 1), ([20], 3)):
        with cpu_kernels.forced(isa, threads=threads):
            for cut, expected in zip(in_steps("cpu", inputs, cuts), whole, strict=True):
                np.testing.assert_array_equal(cut, expected)
