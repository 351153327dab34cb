"""What every fuzzer asks of an input: it works, or one line says what is wrong with it, soon and in little memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import JaxLLMError

SEED = 20_26
SECONDS = 5.0
"""Of processor time for one input, whatever else the machine does; the slowest take a tenth."""
MEMORY_BYTES = 512 * 2**20
"""By which the process may grow while all inputs of a fuzzer pass."""

_MANY = pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7_200)])
COUNTS = pytest.mark.parametrize("count", [300, pytest.param(1_000, marks=pytest.mark.thorough), _MANY])


def fuzz(count: int, attempt: Callable[[np.random.Generator], Any]) -> int:
    """Run `attempt` with `count` generators, each of its own seed; returns how many inputs were refused.

    Raises:
        AssertionError: an input took too long or too much memory, or was refused otherwise than in one short line.
        Whatever else an attempt raises, with the seed as a note.
    """
    refused, before = 0, _peak_memory()
    for number in range(count):
        began = time.process_time()
        try:
            attempt(np.random.default_rng((SEED, number)))
        except JaxLLMError as error:
            check_message(str(error))
            refused += 1
        except BaseException as error:
            error.add_note(f"input {number}: np.random.default_rng(({SEED}, {number}))")
            raise
        took = time.process_time() - began
        assert took < SECONDS, f"input {number} took {took:.1f} s"
        assert _peak_memory() - before < MEMORY_BYTES, f"input {number} made the process grow beyond bounds"
    return refused


def check_message(message: str) -> None:
    """One line that can be printed anywhere."""
    assert message and message.isprintable() and len(message) < 2_000, repr(message)


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
