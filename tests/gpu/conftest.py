"""What the GPU kernels were lowered with, said at the end of `make check-gpu`."""

from __future__ import annotations

import jax
import pytest

from jaxllm import compat


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lowering = type(compat.triton_compiler_params(num_warps=4, num_stages=1)).__module__
    terminalreporter.write_line(f"GPU kernels: lowered by {lowering}, JAX {jax.__version__}")
