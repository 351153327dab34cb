"""Rotary embeddings against float64 arithmetic on complex numbers, and how configs spell them."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.family import hf_rope
from jaxllm.models.layers.rope import RopeConfig, inverse_frequencies, rope_angles, rotate

DIM, HEADS, CHANNELS = 12, 3, 20
POSITIONS = np.array([0, 1, 7, 63, 64, 200])


def exactly_rotated(x: np.ndarray, frequencies: np.ndarray, interleaved: bool, factor: float = 1.0) -> np.ndarray:
    """Every pair as a complex number, times `e^(i * position * frequency)`. frequencies: `[T, half]` or `[half]`."""
    x = np.array(x, np.float64)
    part = x[..., :DIM]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else np.split(part, 2, axis=-1)
    rotation = factor * np.exp(1j * POSITIONS[:, None] * frequencies)
    z = (a + 1j * b) * rotation[:, None, :]
    if interleaved:
        x[..., 0:DIM:2], x[..., 1:DIM:2] = z.real, z.imag
    else:
        x[..., :DIM] = np.concatenate([z.real, z.imag], axis=-1)
    return x


def rotated(rope: RopeConfig, x: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
    lengths = POSITIONS + 1 if lengths is None else lengths
    angles = rope_angles(rope, jnp.asarray(POSITIONS), jnp.asarray(lengths))
    return np.asarray(rotate(jnp.asarray(x), angles))


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(len(POSITIONS), HEADS, CHANNELS)).astype(np.float32)


def base(theta: float = 10_000.0) -> np.ndarray:
    return theta ** (-np.arange(0, DIM, 2) / DIM)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_first_channels_are_rotated_and_the_rest_are_not(x, interleaved):
    rope = RopeConfig(dim=DIM, theta=500.0, interleaved=interleaved)
    out = rotated(rope, x)
    np.testing.assert_allclose(out, exactly_rotated(x, base(500.0), interleaved), atol=2e-5)
    np.testing.assert_array_equal(out[..., DIM:], x[..., DIM:])


def test_scores_depend_on_the_distance_alone(x):
    rope = RopeConfig(dim=DIM)
    q, k = x[0, 0, :DIM], x[1, 0, :DIM]

    def score(at: int, other: int) -> float:
        pair = [rotate(jnp.asarray(v)[None, None], rope_angles(rope, jnp.array([p]), jnp.array([p + 1])))[0, 0]
                for v, p in ((q, at), (k, other))]  # fmt: skip
        return float(np.asarray(pair[0]) @ np.asarray(pair[1]))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_linear_scaling_divides_positions(x):
    rope = RopeConfig(dim=DIM, kind="linear", factor=4.0)
    np.testing.assert_allclose(rotated(rope, x), exactly_rotated(x, base() / 4, False), atol=2e-5)


def test_dynamic_scaling_goes_by_each_tokens_length(x):
    rope = RopeConfig(dim=DIM, kind="dynamic", factor=3.0, original_length=64)
    lengths = np.array([10, 64, 65, 100, 400, 400])
    thetas = [10_000.0 * (3 * max(n, 64) / 64 - 2) ** (DIM / (DIM - 2)) for n in lengths]
    np.testing.assert_allclose(
        rotated(rope, x, lengths), exactly_rotated(x, np.stack([base(t) for t in thetas]), False), atol=2e-5
    )


def test_longrope_takes_one_set_of_divisors_or_the_other(x):
    short, long = np.linspace(1, 2, DIM // 2), np.linspace(3, 9, DIM // 2)
    rope = RopeConfig(
        dim=DIM, kind="longrope", original_length=64, attention_factor=1.25,
        short_divisors=tuple(short), long_divisors=tuple(long),
    )  # fmt: skip
    lengths = np.array([64, 65, 64, 65, 1, 1000])
    frequencies = np.stack([base() / (long if n > 64 else short) for n in lengths])
    np.testing.assert_allclose(rotated(rope, x, lengths), exactly_rotated(x, frequencies, False, 1.25), atol=2e-5)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    rope = RopeConfig(dim=64, kind="yarn", factor=8.0, original_length=4096)
    plain, scaled = inverse_frequencies(RopeConfig(dim=64)), inverse_frequencies(rope)
    rotations = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[rotations > 40], plain[rotations > 40], rtol=1e-6)
    np.testing.assert_allclose(scaled[rotations < 0.7], plain[rotations < 0.7] / 8, rtol=1e-6)
    assert (np.diff(scaled / plain) <= 1e-7).all()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(dim=16, theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(dim=16, theta=5e5)),
        ({"partial_rotary_factor": 0.25}, RopeConfig(dim=4)),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, RopeConfig(dim=8)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(dim=16, kind="linear", factor=2.0)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 100},
            RopeConfig(
                dim=16, kind="yarn", factor=4.0, original_length=100, attention_factor=1 + 0.1 * math.log(4)
            ),
        ),
        (
            {
                "rope_scaling": {"type": "su", "short_factor": [1] * 8, "long_factor": [2] * 8},
                "max_position_embeddings": 400, "original_max_position_embeddings": 100,
            },
            RopeConfig(
                dim=16, kind="longrope", factor=4.0, original_length=100, short_divisors=(1.0,) * 8,
                long_divisors=(2.0,) * 8, attention_factor=math.sqrt(1 + math.log(4) / math.log(100)),
            ),
        ),
    ],
)  # fmt: skip
def test_configs_old_and_new(config, expected):
    assert hf_rope(config, 16) == expected


def test_an_unknown_kind_is_refused_with_those_that_are_known():
    with pytest.raises(CheckpointError, match="the rope type is 'ntk'; supported are default, linear, dynamic"):
        hf_rope({"rope_scaling": {"type": "ntk"}}, 16)
