"""C++ kernels for CPU hosts, called through XLA's FFI.

Compiled into the wheel, or with the host's compiler on first use (`build.py`), one set of sources for each instruction
set, and the best that the machine has is chosen at run time. Where there is neither, `available()` is False, `reason()`
says why, and the caller runs plain XLA.

Weights lie in *tiles* of 16 output rows by one block of inputs, `uint8 [ceil(o / 16), i / block, tile_bytes]`; see
`src/formats.h`. Formats: q4_0, q4_1, q5_0, q5_1, q8_0 (32 inputs a block), q4_k, q5_k, q6_k (256), bf16, f32 (32);
u4, four bits about a zero of the block's own; i8 and e4m3, whose float32 scales lie beside the tiles (32).

On the host, with NumPy:

    repack(type, blocks) -> tiles        GGUF bytes uint8 [*stack, o, i / block, bytes], or floats [*stack, o, i]
    unpack(format, tiles, rows, scales=None) -> float32 [rows, i]
    lanes(scales [*stack, o, runs]) -> scales as Tiles has them, [*stack, ceil(o / 16), runs, 16]

While tracing, `x` float32 or bfloat16 `[..., i]`, results float32 (see `products.py`):

    linear(x, tiles, format, rows, norm=None, residual=None) -> [..., rows]
    linears(x, (Tiles(tiles, format, rows), ...), norm=None) -> a result a matrix; formats may differ (q, k, v)
    mlp(x, gate, up, down: Tiles, activation, norm=None, residual=None) -> (activation(x gate) * (x up)) down
              Both take `adapters` too, which add to their products
    low_rank(parts ([T, ...], ...), x [T, i], AdapterArrays, AdapterUses) -> as `parts`
    argmax(x, head: Tiles, norm=None) -> int32 [...], the greedy token of each row
    embed(ids, table: Tiles, inputs) -> [..., inputs]

    grouped_matmul(x [N, i], weights: Tiles with [X, ...] tiles, group_sizes [X]) -> [N, o]
    attention(q, k, v, pages, positions, seq_ids, page_table, *, scale, window, softcap, sinks,
              value_dim, rotary, norms) -> (out [T, H, Dv], pages); see `attention.py`
    causal_conv(x [T, C], taps [C, k], bias, buffer [N, k - 1, C], runs, silu) -> (out [T, C], buffer)
    delta_rule(qkv [T, C], decay [T, H], beta [T, H], buffer [N, H, Dk, Dv], runs, *, key_heads, epsilon)
              -> (out [T, H, Dv], buffer); see `states.py`
    normalise(x, weight, bias, epsilon, centred) -> x's shape and dtype
    log_sum_exp(logits [R, V]) -> [R]
    running_weights(logits [R, V], most [R], threshold [R], block) -> [R, V / block]
    zeros(shape, dtype) -> [*shape], in huge pages

`norm` is `RowNorm(weight [i], epsilon, weight_offset)`: x is RMS-normalised first.
"""

from jaxllm.cpu_kernels.attention import HeadNorms, Rotary, attention
from jaxllm.cpu_kernels.huge_pages import zeros
from jaxllm.cpu_kernels.library import available, forced, isa, reason, rounds_to_bf16, runnable_isas, set_threads
from jaxllm.cpu_kernels.products import (
    ACTIVATIONS,
    AdapterArrays,
    AdapterUses,
    RowNorm,
    Tiles,
    argmax,
    embed,
    grouped_matmul,
    linear,
    linears,
    log_sum_exp,
    low_rank,
    mlp,
    normalise,
    running_weights,
)
from jaxllm.cpu_kernels.states import Runs, causal_conv, delta_rule, ssd
from jaxllm.cpu_kernels.tiles import FORMATS, GROUP, SCALED, lanes, repack, tile_bytes, tile_inputs, unpack

__all__ = [
    "ACTIVATIONS",
    "FORMATS",
    "GROUP",
    "SCALED",
    "AdapterArrays",
    "AdapterUses",
    "HeadNorms",
    "Rotary",
    "RowNorm",
    "Runs",
    "Tiles",
    "argmax",
    "attention",
    "available",
    "causal_conv",
    "delta_rule",
    "embed",
    "forced",
    "grouped_matmul",
    "isa",
    "lanes",
    "linear",
    "linears",
    "log_sum_exp",
    "low_rank",
    "mlp",
    "normalise",
    "reason",
    "repack",
    "rounds_to_bf16",
    "runnable_isas",
    "running_weights",
    "set_threads",
    "ssd",
    "tile_bytes",
    "tile_inputs",
    "unpack",
    "zeros",
]
