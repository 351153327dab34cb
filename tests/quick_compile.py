"""Steps of tiny models, compiled with few passes."""

from __future__ import annotations

import math
from typing import Any

import jax

QUICK_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""The arithmetic is the same, and so small that its speed does not matter."""

TINY = 32 * 2**20
"""Numbers that a step takes, pages and all: the real models' weights alone are four times as many."""

_compile = jax.stages.Lowered.compile


def quickly(lowered: jax.stages.Lowered, compiler_options: Any = None, **more: Any) -> jax.stages.Compiled:
    """What `lowered.compile()` does in the tests."""
    if sum(math.prod(argument.shape) for argument in jax.tree.leaves(lowered.args_info)) < TINY:
        compiler_options = QUICK_COMPILE | (compiler_options or {})
    return _compile(lowered, compiler_options, **more)
