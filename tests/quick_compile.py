"""What the tests compile, with few passes: it is so small that its speed does not matter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

QUICK_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""The arithmetic is the same."""

LONG_ROWS = 2**15
"""Of a matrix: a real vocabulary's, whose logits take longer than the passes that make code for them."""

TINY = 32 * 2**20
"""Numbers that a step takes, pages and all: the real models' weights alone are four times as many."""

_compile = jax.stages.Lowered.compile


def _quickly(lowered: jax.stages.Lowered, compiler_options: Any = None, **more: Any) -> jax.stages.Compiled:
    """What `lowered.compile()` does in the tests."""
    shapes = [argument.shape for argument in jax.tree.leaves(lowered.args_info)]
    if sum(map(math.prod, shapes)) < TINY:
        level = int(any(len(shape) == 2 and max(shape) >= LONG_ROWS for shape in shapes))
        compiler_options = QUICK_COMPILE | {"xla_backend_optimization_level": level} | (compiler_options or {})
    return _compile(lowered, compiler_options, **more)


@contextmanager
def quick_compile() -> Iterator[None]:
    """Few passes for steps of tiny models, which are compiled ahead of time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", _quickly)
        yield


@contextmanager
def quick_jit() -> Iterator[None]:
    """Few passes for all that is compiled when it is called: not where it takes long to run, as encoders do."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
