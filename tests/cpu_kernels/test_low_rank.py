"""What adapters add to products, by itself and in one call with them, against float64 and bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels import ACTIVATIONS, AdapterArrays, AdapterUses, RowNorm
from jaxllm.pallas_kernels.products import low_rank as reference
from tests.cpu_kernels.weights import ISAS, needs_kernels, random_weights

pytestmark = needs_kernels


@partial(jax.jit, static_argnames=("parts", "run"))
def low_rank(out, x, arrays, uses, *, parts, run=cpu_kernels.low_rank):
    """Of all parts side by side."""
    return jnp.concatenate(run(jnp.split(out, np.cumsum(parts)[:-1], axis=1), x, arrays, uses), axis=1)


class Given(NamedTuple):
    out: np.ndarray
    x: np.ndarray
    arrays: AdapterArrays
    uses: AdapterUses

    def of(self, rows) -> Given:
        uses = self.uses._replace(scales=self.uses.scales[rows])
        return self._replace(out=self.out[rows], x=self.x[rows], uses=uses)


def given(tokens: int, inputs: int, parts: tuple[int, ...], rank: int, places: int, seed: int = 0) -> Given:
    """Half of the adapters have gains; some leave a part alone, and some the whole product."""
    dice = np.random.default_rng(seed)
    outputs = sum(parts)
    out, x = dice.normal(size=(tokens, outputs)), dice.normal(size=(tokens, inputs))
    a = dice.normal(size=(places, len(parts) * rank, inputs)) / np.sqrt(inputs)
    b = dice.normal(size=(places, rank, outputs))
    scales = dice.normal(size=(tokens, places)) * (dice.random((tokens, places)) < 0.5)
    ranks = dice.integers(0, rank + 1, size=(places, len(parts))).astype(np.int32)
    gains = (np.arange(places) % 2).astype(np.int32)
    gain = dice.normal(size=(places, outputs)) * gains[:, None]
    ends = np.cumsum(parts)
    for place, part in np.ndindex(ranks.shape):  # as tables have them: zeros behind an adapter's own rank
        own, columns = ranks[place, part], slice(ends[part] - parts[part], ends[part])
        a[place].reshape(len(parts), rank, inputs)[part, own:] = 0
        b[place, own:, columns] = 0
        gain[place, columns] *= own > 0
    tables = (jnp.asarray(table, jnp.bfloat16) for table in (a, b, gain))
    return Given(
        out.astype(np.float32),
        x.astype(np.float32),
        AdapterArrays(*tables, jnp.asarray(ranks)),
        AdapterUses(scales.astype(np.float32), gains),
    )


def in_float64(out, x, arrays, uses, *, parts) -> np.ndarray:
    out, x, a, b, gain, scales = (np.asarray(array, np.float64) for array in (out, x, *arrays[:3], uses.scales))
    rank, added, first = b.shape[1], out * (scales @ gain), 0
    for index, rows in enumerate(parts):
        inner = np.einsum("ti,nki->tnk", x, a[:, index * rank : (index + 1) * rank]) * scales[:, :, None]
        added[:, first : first + rows] += np.einsum("tnk,nko->to", inner, b[:, :, first : first + rows])
        first += rows
    return out + added


SHAPES = [
    (1, 64, (64,), 16, 1),
    (1, 576, (576, 192, 192), 16, 8),
    (7, 33, (5, 130), 3, 2),
    (9, 100, (1,), 1, 4),
    (150, 64, (96, 32), 8, 3),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("tokens", "inputs", "parts", "rank", "places"), SHAPES)
def test_adapters_add_up(isa, tokens, inputs, parts, rank, places):
    some = given(tokens, inputs, parts, rank, places)
    expected = in_float64(*some, parts=parts)
    for threads in (1, 3):
        with cpu_kernels.forced(isa, threads):
            found = low_rank(*some, parts=parts)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "inputs", "parts", "rank", "places"), SHAPES)
def test_plain_xla_gives_the_same(tokens, inputs, parts, rank, places):
    some = given(tokens, inputs, parts, rank, places)
    some = some._replace(
        arrays=AdapterArrays(*(table.astype(jnp.float32) for table in some.arrays[:3]), some.arrays.ranks)
    )
    found = low_rank(*some, parts=parts, run=reference)
    np.testing.assert_allclose(found, in_float64(*some, parts=parts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_gets_the_same_bits_in_any_batch(isa):
    parts = (70, 20)
    some = given(150, 90, parts, 4, 3)
    with cpu_kernels.forced(isa):
        together = np.asarray(low_rank(*some, parts=parts))
        for rows in ([0], [5, 6, 7], list(range(3, 150, 2))):
            np.testing.assert_array_equal(low_rank(*some.of(rows), parts=parts), together[rows])


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_without_adapters_is_left_as_it_is(isa):
    some = given(6, 64, (48,), 4, 3)
    some.uses.scales[:2], some.uses.scales[2:4] = 1, 0
    some.x[3] = np.nan
    with cpu_kernels.forced(isa):
        found = np.asarray(low_rank(*some, parts=(48,)))
    np.testing.assert_array_equal(found[2:4], some.out[2:4])
    assert (found[:2] != some.out[:2]).any(axis=1).all()


class Call(NamedTuple):
    """A product, or a gated MLP, in one call with what adapters add, and the same without."""

    tables: tuple[AdapterArrays, ...]
    uses: AdapterUses
    x: np.ndarray
    residual: np.ndarray
    run: Callable[..., jax.Array]

    def __call__(self, rows=slice(None), adapted=True) -> np.ndarray:
        uses = self.uses._replace(scales=self.uses.scales[rows])
        adapters = (*self.tables, uses) if adapted else None
        return np.asarray(jax.jit(self.run)(self.x[rows], self.residual[rows], adapters))


SIZE, HIDDEN = 96, 160
NORM = RowNorm(np.random.default_rng(9).normal(size=SIZE).astype(np.float32), 1e-5)
FORMATS_OF_CALLS = ("q4_1", "q8_0", "bf16")


def of_adapters(tokens: int, inputs: int, parts: tuple[int, ...], seed: int) -> tuple[AdapterArrays, AdapterUses]:
    some = given(tokens, inputs, parts, 6, 3, seed)
    some.uses.scales[1::4] = 0
    return some.arrays._replace(b=0.1 * some.arrays.b), some.uses


def linear_call(format: str, tokens: int) -> Call:
    weight = random_weights(format, SIZE, SIZE, 1).tiles
    tables, uses = of_adapters(tokens, SIZE, (SIZE,), 2)
    x, residual = np.random.default_rng(3).normal(size=(2, tokens, SIZE)).astype(np.float32)

    def run(x, residual, adapters):
        return cpu_kernels.linears(x, (weight,), norm=NORM, residual=residual, adapters=adapters)[0]

    return Call((tables,), uses, x, residual, run)


def parts_call(format: str, tokens: int) -> Call:
    weights = tuple(random_weights(format, rows, SIZE, rows).tiles for rows in (80, 48, 16))
    tables, uses = of_adapters(tokens, SIZE, (80, 48, 16), 4)
    x = np.random.default_rng(3).normal(size=(tokens, SIZE)).astype(np.float32)

    def run(x, residual, adapters):
        return jnp.concatenate(cpu_kernels.linears(x, weights, norm=NORM, adapters=adapters), axis=1)

    return Call((tables,), uses, x, x, run)


def mlp_call(format: str, tokens: int, activation: str = "silu") -> Call:
    gate, up = (random_weights(format, HIDDEN, SIZE, seed).tiles for seed in (3, 4))
    down = random_weights(format, SIZE, HIDDEN, 5).tiles
    first, uses = of_adapters(tokens, SIZE, (HIDDEN, HIDDEN), 6)
    second, _ = of_adapters(tokens, HIDDEN, (SIZE,), 6)
    x, residual = np.random.default_rng(3).normal(size=(2, tokens, SIZE)).astype(np.float32)

    def run(x, residual, adapters):
        return cpu_kernels.mlp(x, gate, up, down, activation, norm=NORM, residual=residual, adapters=adapters)

    return Call((first, second), uses, x, residual, run)


GATES = {
    "silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu, "relu2": lambda x: jax.nn.relu(x) ** 2,
}  # fmt: skip
CALLS = {"linear": linear_call, "parts": parts_call, "mlp": mlp_call}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS_OF_CALLS)
@pytest.mark.parametrize("name", CALLS)
def test_one_call_gives_a_token_the_same_bits_in_any_batch(name, format, isa):
    call = CALLS[name](format, 150)
    with cpu_kernels.forced(isa, 3):
        together = call()
        for rows in ([0], [2, 3, 4, 5], list(range(3, 150, 2))):
            np.testing.assert_array_equal(call(rows), together[rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS_OF_CALLS)
@pytest.mark.parametrize("name", CALLS)
def test_one_call_leaves_tokens_without_adapters_as_they_are(name, format, isa):
    call = CALLS[name](format, 70)
    acts = np.any([np.asarray(table.ranks).any(axis=1) for table in call.tables], axis=0)
    without = ~(call.uses.scales * acts).any(axis=1)
    assert 10 < without.sum() < 60
    with cpu_kernels.forced(isa):
        found, plain = call(), call(adapted=False)
    np.testing.assert_array_equal(found[without], plain[without])
    assert (found[~without] != plain[~without]).any(axis=1).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["linear", "parts"])
def test_one_call_adds_what_adapters_give_of_the_normed_inputs(name, isa):
    call = CALLS[name]("q8_0", 70)
    x = call.x.astype(np.float64)
    x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + NORM.epsilon) * NORM.weight
    parts = (SIZE,) if name == "linear" else (80, 48, 16)
    with cpu_kernels.forced(isa):
        found, plain = call(), call(adapted=False)
    added = call.residual if name == "linear" else 0
    expected = in_float64(plain - added, x, call.tables[0], call.uses, parts=parts) + added
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_mlp_adds_to_gates_ups_and_what_comes_of_them(isa, activation):
    call = mlp_call("q8_0", 9, activation)
    first, second = call.tables
    gate, up = (random_weights("q8_0", HIDDEN, SIZE, seed).tiles for seed in (3, 4))
    down = random_weights("q8_0", SIZE, HIDDEN, 5).tiles

    def parted(x, residual):
        gates, ups = cpu_kernels.linears(x, (gate, up), norm=NORM, adapters=(first, call.uses))
        inner = GATES[activation](gates) * ups
        return cpu_kernels.linears(inner, (down,), residual=residual, adapters=(second, call.uses))[0]

    with cpu_kernels.forced(isa):
        expected = np.asarray(jax.jit(parted)(call.x, call.residual))
        found = call()
    # The gates' last bits differ between C++ and XLA, and rounding to int8 makes steps of them.
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02 * np.abs(expected).max())
