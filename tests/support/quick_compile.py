"""What the tests compile, with few passes: it is so small that its speed does not matter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import pytest
from jax._src import compiler

from jaxllm import compat
from jaxllm.quantization import gguf_encode

QUICK_COMPILE = {
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,  # gone in JAX 0.12
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""The arithmetic is the same."""

AS_ALWAYS = "as_always"
"""An option that stands for what XLA does by itself."""

LONG_ROWS = 2**15
"""Of a matrix: a real vocabulary's, whose logits take longer than the passes that make code for them."""

TINY = 32 * 2**20
"""Numbers that a step takes, pages and all: the real models' weights alone are four times as many."""

ENCODED = 2**15
"""Weights encoded at a time: what is encoded here is small, and would be filled up to what real matrices have."""

_compile = jax.stages.Lowered.compile
_options = compiler.get_compile_options


def _quickly(lowered: jax.stages.Lowered, compiler_options: Any = None, **more: Any) -> jax.stages.Compiled:
    """What `lowered.compile()` does in the tests."""
    options = compiler_options or {}
    shapes = [argument.shape for argument in jax.tree.leaves(lowered.args_info)]
    if sum(map(math.prod, shapes)) < TINY:
        if any(len(shape) == 2 and max(shape) >= LONG_ROWS for shape in shapes):
            options = {"xla_backend_optimization_level": 1} | options
        return _compile(lowered, options, **more)
    return _compile(lowered, options | {AS_ALWAYS: True}, **more)


@cache
def _known_quick_compile() -> dict[str, Any]:
    """Those options that this XLA knows, found by compiling next to nothing with them."""
    compat.compile_lowered(jax.jit(lambda x: x).lower(0.0), QUICK_COMPILE)
    return {name: value for name, value in QUICK_COMPILE.items() if name not in compat._unknown_options}


@cache
def _encoders() -> dict[str, Any]:
    """With the passes that fuse multiplications and additions, wherever they are called: ties depend on them."""
    options = {"xla_backend_optimization_level": 1}
    return {
        name: jax.jit(encoder.__wrapped__, compiler_options=options) for name, encoder in gguf_encode.ENCODERS.items()
    }


@contextmanager
def quick_compile() -> Iterator[None]:
    """Few passes for all that is called, and for steps of tiny models, which are compiled ahead of time."""
    quick = _known_quick_compile()

    def options_quickly(*arguments: Any, env_options_overrides: dict[str, Any] | None = None, **more: Any) -> Any:
        """What JAX compiles with: what is only called is small, and called a few times."""
        options = dict(env_options_overrides or {})
        if not options.pop(AS_ALWAYS, False):
            options = quick | {"xla_backend_optimization_level": 0} | options
        return _options(*arguments, env_options_overrides=options, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", _quickly)
        patch.setattr(compiler, "get_compile_options", options_quickly)
        patch.setattr(gguf_encode, "_CHUNK", ENCODED)
        patch.setattr(gguf_encode, "ENCODERS", _encoders())
        yield
