"""Steps of which some tokens are refused: all of them are computed, and states are those after the tokens that stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cpu_kernels import available
from jaxllm.pallas_kernels import SSDInputs, Tentative, run_states, settle, staying
from jaxllm.pallas_kernels.delta_rule import delta_rule
from jaxllm.pallas_kernels.gpu.states import delta_rule as gpu_delta_rule
from jaxllm.pallas_kernels.kernels import CPU
from jaxllm.pallas_kernels.ssd import chunked, recurrent
from jaxllm.pallas_kernels.states import causal_conv
from tests.pallas_kernels import test_delta_rule, test_ssd
from tests.pallas_kernels.states import Chunk, Step, run_by_token, state_step, used_rows
from tests.support.gpu_here import INTERPRET

TRIED = (Chunk(5, 4), Chunk(0, 1), Chunk(13, 4, resumes=True), Chunk(30, 3), Chunk(62, 4), Chunk(7, 1))
STAY = (
    Chunk(5, 2),
    Chunk(0, 1),
    Chunk(13, 4, kept=3, resumes=True),
    Chunk(30, 1),
    Chunk(62, 3, kept=2),
    Chunk(7, 1, kept=1),
)
"""Of each sequence's tokens the first ones, with a state that is kept among them."""
SIZES = {"tokens": 40, "seqs": 8}
ON_CPU = pytest.mark.skipif(not available(), reason="no kernels")


def steps() -> tuple[Step, Step, np.ndarray]:
    """The step that is tried, the same with the tokens that stay, and where those are among all that are tried."""
    tried, stays = (state_step(chunks, **SIZES) for chunks in (TRIED, STAY))
    tried, stays = (Step(replace(s.meta, num_decodes=jnp.int32(0)), s.rows) for s in (tried, stays))
    begins = np.asarray(tried.meta.query_start)
    places = [begins[i] + j for i, chunk in enumerate(STAY) for j in range(chunk.length)]
    return tried, stays, np.asarray(places)


def check(
    kernel: Callable[..., Any],
    tokens: list[np.ndarray],
    constants: tuple[Any, ...],
    buffer: np.ndarray,
    by_definition: Callable[[Step, list[np.ndarray]], tuple[np.ndarray, np.ndarray]],
) -> None:
    tried, stays, places = steps()

    @jax.jit
    def run(tokens: Any, constants: Any, buffer: Any, tried: Any, stays: Any) -> Any:
        meta = replace(tried, tentative=True)
        out, state = run_states(kernel, tuple(tokens), constants, buffer, meta)
        assert isinstance(state, Tentative)
        return out, *settle((state,), staying(meta, stays), stays)

    out, rows = run(tokens, constants, buffer, tried.meta, stays.meta)
    expected, _ = by_definition(tried, tokens)
    np.testing.assert_allclose(np.asarray(out)[tried.live], expected, rtol=1e-4, atol=3e-5)
    padding = np.zeros(SIZES["tokens"] - len(places), np.int64)
    _, expected_rows = by_definition(stays, [part[np.append(places, padding)] for part in tokens])
    used = used_rows(stays)
    np.testing.assert_allclose(np.asarray(rows)[used], expected_rows[used], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("kind", ["reference", pytest.param("cpu", marks=ON_CPU)])
def test_convolutions(kind):
    dice, channels = np.random.default_rng(1), 24
    u = dice.standard_normal((SIZES["tokens"], channels)).astype(np.float32)
    taps = dice.standard_normal((channels, 4)).astype(np.float32)
    buffer = dice.standard_normal((steps()[0].rows, 3, channels)).astype(np.float32)

    def by_definition(step: Step, tokens: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        def run(state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
            seen = np.concatenate([state, tokens[0][token][None]])
            return seen[1:], (seen * taps.T).sum(0)

        return run_by_token(step, buffer, run)

    check({"reference": causal_conv, "cpu": CPU.causal_conv}[kind], [u], (taps, None), buffer, by_definition)


@pytest.mark.parametrize("kind", ["reference", pytest.param("cpu", marks=ON_CPU), "gpu"])
def test_the_gated_delta_rule(kind):
    heads = test_delta_rule.HEADS["shared"]
    *tokens, buffer = test_delta_rule.inputs(steps()[0], *heads, slowest=1e-3)
    rule = {"reference": delta_rule, "cpu": CPU.delta_rule, "gpu": partial(gpu_delta_rule, interpret=INTERPRET)}[kind]

    def by_definition(step: Step, tokens: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return test_delta_rule.by_definition(step, [*tokens, buffer], heads[0])

    check(partial(rule, key_heads=heads[0]), tokens, (), buffer, by_definition)


@pytest.mark.parametrize("kind", ["recurrent", "chunked", pytest.param("cpu", marks=ON_CPU)])
def test_state_space_duals(kind):
    x, dt, a, b, c, skip = test_ssd.draw(SIZES["tokens"], *test_ssd.SHAPES["three groups"])
    buffer = test_ssd.states_of(SSDInputs(x, dt, a, b, c, skip), steps()[0].rows)
    kernel = {"recurrent": recurrent, "chunked": chunked, "cpu": CPU.ssd}[kind]

    def with_constants_last(x: Any, dt: Any, b: Any, c: Any, a: Any, skip: Any, buffer: Any, meta: Any) -> Any:
        return kernel(SSDInputs(x, dt, a, b, c, skip), buffer, meta)

    def by_definition(step: Step, tokens: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        x, dt, b, c = tokens
        return test_ssd.by_definition(step, SSDInputs(x, dt, a, b, c, skip), buffer)

    check(with_constants_last, [x, dt, b, c], (a, skip), buffer, by_definition)
