"""Whether the tests of the kernels for NVIDIA GPUs have one to run on."""

from __future__ import annotations

import jax

INTERPRET = jax.default_backend() != "gpu"
"""Kernels are interpreted where there is no GPU, and compiled for it and run where there is one."""
