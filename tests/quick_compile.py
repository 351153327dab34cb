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

FULL_COMPILE = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""XLA's own defaults, which `jax_disable_most_optimizations` takes away."""

TINY = 32 * 2**20
"""Numbers that a step takes, pages and all: the real models' weights alone are four times as many."""

_compile = jax.stages.Lowered.compile


def _quickly(lowered: jax.stages.Lowered, compiler_options: Any = None, **more: Any) -> jax.stages.Compiled:
    """What `lowered.compile()` does in the tests."""
    size = sum(math.prod(argument.shape) for argument in jax.tree.leaves(lowered.args_info))
    options = QUICK_COMPILE if size < TINY else FULL_COMPILE
    return _compile(lowered, options | (compiler_options or {}), **more)


@contextmanager
def quick_compile() -> Iterator[None]:
    """Few passes for steps of tiny models, and for whatever is called without being compiled ahead."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.stages.Lowered, "compile", _quickly)
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
