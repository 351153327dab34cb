"""How fast attention falls with distance, against the paper's words and llama.cpp's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxllm.models.layers.attention import alibi_slopes


def llama_cpps(head: int, heads: int, steepness: float) -> float:
    """The slope of a head as `ggml_compute_forward_soft_max` has it."""
    power = 1 << math.floor(math.log2(heads))
    m0, m1 = 2 ** (-steepness / power), 2 ** (-(steepness / 2) / power)
    return m0 ** (head + 1) if head < power else m1 ** (2 * (head - power) + 1)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 16, 32, 40, 71, 112])
@pytest.mark.parametrize("steepness", [8.0, 12.0])
def test_slopes_are_llama_cpps(heads: int, steepness: float) -> None:
    expected = [llama_cpps(head, heads, steepness) for head in range(heads)]
    np.testing.assert_allclose(alibi_slopes(heads, steepness), expected, rtol=1e-12)


def test_slopes_of_the_paper() -> None:
    """Of eight heads: 1/2, 1/4, … 1/256; of six: those of four, and every second one of eight."""
    np.testing.assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])
