"""C++ kernels for CPU hosts, called through XLA's FFI.

They are compiled into the wheel, or with the host's compiler on first use (`library.py`), one set of sources for each
instruction set, and the best that the machine has is chosen at run time. Where there is neither, `available()` is
False, `reason()` says why, and the caller runs plain XLA.

Weights lie in *tiles* of 16 output rows by one block of inputs, `uint8 [ceil(o / 16), i / block, tile_bytes]`; see
`src/formats.h`. Formats: q4_0, q4_1, q5_0, q5_1, q8_0, mxfp4, iq4_nl (32 inputs a block), q4_k, q5_k, q6_k, iq4_xs
(256), bf16, f32 (32); u4, four bits about a zero of the block's own; i8, e4m3 and nvfp4, whose float32 scales lie
beside the tiles (32). `repack`, `unpack` and `lanes` make and read them on the host; the other functions are called
while tracing.
"""

from jaxllm.cpu_kernels.attention import HeadNorms, Rotary, Runs, attention, run_states
from jaxllm.cpu_kernels.library import available, forced, isa, keep_to_threads, reason, rounds_to_bf16, runnable_isas
from jaxllm.cpu_kernels.products import (
    ACTIVATIONS,
    AdapterArrays,
    AdapterUses,
    RowNorm,
    Tiles,
    argmax,
    embed,
    grouped_matmul,
    linears,
    log_sum_exp,
    low_rank,
    mlp,
    normalise,
    running_weights,
)
from jaxllm.cpu_kernels.tiles import FORMATS, GROUP, SCALED, lanes, repack, tile_bytes, tile_inputs, unpack, zeros

__all__ = [
    "ACTIVATIONS", "FORMATS", "GROUP", "SCALED", "AdapterArrays", "AdapterUses", "HeadNorms", "Rotary", "RowNorm",
    "Runs", "Tiles", "argmax", "attention", "available", "embed", "forced", "grouped_matmul", "isa", "keep_to_threads",
    "lanes", "linears", "log_sum_exp", "low_rank", "mlp", "normalise", "reason", "repack", "rounds_to_bf16",
    "run_states", "runnable_isas", "running_weights", "tile_bytes", "tile_inputs", "unpack", "zeros",
]  # fmt: skip
