"""Pallas kernels for NVIDIA GPUs, through the Triton lowering."""
