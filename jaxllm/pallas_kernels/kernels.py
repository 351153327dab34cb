"""The operations that a platform may run in its own way, as one record, and the choice of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import cpu_kernels
from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import cpu, pages, products, reference, ssd, tpu
from jaxllm.pallas_kernels.delta_rule import delta_rule
from jaxllm.pallas_kernels.gpu import products as gpu_products
from jaxllm.pallas_kernels.matrices import KernelMatrix
from jaxllm.pallas_kernels.pages import Lacks, PageLayout, Pages, PageUse
from jaxllm.pallas_kernels.products import Mixture, SoftmaxSums
from jaxllm.pallas_kernels.states import causal_conv

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """What runs a model's products and attention: chosen once, with the plan, and handed to every layer.

    Those that may be absent give None, or are None; the layer then does the same with others.

    Attributes:
        name: of the attention, for people.
        attention: writes new keys and values into their pages, then attends; see `reference.paged_attention`.
        linear: `(x [T, i], weight [o, i], norm, residual, dtype) -> [T, o]`: `norm(x) @ weight.T + residual`, of which
            norm and residual may be None; summed in float32, which is also the result unless `dtype` is given. With
            `LATER` for a residual, which those that have an `add_norm` take, it may be `Unsummed`.
        grouped_matmul: `(x [N, i], weights [X, o, i], group_sizes [X]) -> [N, o]`, float32; see `products.tiles`.
        page_dtype: the type that pages of a float type are kept in.
        page_layout: the shapes of their buffers.
        segments: `(x, weight, norm)` -> the parts of a fused product, where they need not be joined to be parted.
        gated_mlp: `(x, gate_up, down, activation, norm, residual, dtype, adapters)` -> `down(act(gate) * up) +
            residual` of `norm(x)`; may be absent. `adapters`, if there are any, are the `AdapterArrays` of both weights
            and the step's `AdapterUses`.
        most_likely: `(x, weight, rows)` -> each row's greatest product among the first `rows`; may be absent.
        experts: `(x, logits, bias, gate_up, down, *, routing, first, here, activation, gate, biases, meta)` -> a
            `Mixture` of what the experts `first … first + here - 1` give; may be absent. Tokens choose by `routing`, a
            `models.layers.experts.MoEConfig`; padding chooses none. `gate` is applied to what the first product gives,
            gate and up side by side, in place of `activation(gate) * up`, and `biases` are those of both products;
            each may be None.
        chosen_experts: `(x [T, E], group [P], gate_up, down, *, activation, gate, biases) -> [P, E]`, float32: what
            pairs of tokens and experts give, as many in turn of each row of `x`; may be absent. `group` is the expert
            of each pair; pairs of the expert after the last give zeros. The rest is as of `experts`.
        add_norm: `(x, out, norm)` -> `x + out` and its norm; may be absent. `out` may be a `Mixture` or `Unsummed`.
        latent_attention: `(q [T, H, d], latent [T, D], weight, norm, angles, pages, meta, *, scale, one_product)` ->
            latent attention and the pages, between the projections; may be absent. A head's first rows of the weight,
            `[o, L]`, make its keys of the normed latent, the others its values. `one_product` says that queries and
            latents are projected from the same.
        adapted: `(x, weight, norm, residual, AdapterArrays, AdapterUses)` -> the parts of a product with what adapters
            add to them; may be absent.
        sums: a sampler's, over rows of logits.
        native: these are the C++ kernels of a CPU, for which weights go into tiles where there are kernels for them.
        gpu_tiles: these are kernels of NVIDIA GPUs, for which weights of few bits go into tiles of theirs.
        rotates_heads: attention takes the heads' norms and angles, and applies them itself; and with an `add_norm`,
            the `Unsummed` that queries, keys and values are the sum of, to read it in their place.
        wide_sums: devices add up their parts of a sum in float32; else in the model's own type, half as much to send.
        smallest_rows: that a decode is padded to; one alone would leave XLA's fast matrix products.
    """

    name: str
    attention: Callable[..., tuple[jax.Array, Pages]]
    linear: Callable[..., jax.Array]
    grouped_matmul: Callable[[jax.Array, Any, jax.Array], jax.Array]
    page_dtype: Callable[[Any], np.dtype]
    page_layout: PageLayout = pages.BY_HEAD
    segments: Callable[..., Sequence[jax.Array] | None] = lambda x, weight, norm: None
    gated_mlp: Callable[..., jax.Array | None] = lambda x, *rest: None
    most_likely: Callable[..., jax.Array | None] = lambda x, weight, rows: None
    experts: Callable[..., Mixture | None] = lambda *arrays, **options: None
    chosen_experts: Callable[..., jax.Array | None] = lambda *arrays, **options: None
    add_norm: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    latent_attention: Callable[..., tuple[jax.Array, Pages] | None] = lambda *arrays, **options: None
    causal_conv: Callable[..., tuple[jax.Array, jax.Array]] = causal_conv
    delta_rule: Callable[..., tuple[jax.Array, jax.Array]] = delta_rule
    ssd: Callable[..., tuple[jax.Array, jax.Array]] = ssd.recurrent
    low_rank: Callable[..., tuple[jax.Array, ...]] = products.low_rank
    adapted: Callable[..., tuple[jax.Array, ...] | None] = lambda x, *rest: None
    packed_attention: Callable[..., jax.Array] = reference.packed_attention
    normalise: Callable[..., jax.Array] = products.normalise
    sums: SoftmaxSums = products.PLAIN_SUMS
    native: bool = False
    gpu_tiles: bool = False
    rotates_heads: bool = False
    wide_sums: bool = True
    smallest_rows: int = 2


def _gpu(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that imports Pallas, which takes half a second: not before it is called."""

    def call(*arrays: Any, **options: Any) -> Any:
        return getattr(import_module(f"jaxllm.pallas_kernels.gpu.{module}"), name)(*arrays, **options)

    return call


def _gpu_latent_attention(
    q: Any, latent: Any, weight: Any, *arrays: Any, **options: Any
) -> tuple[jax.Array, Pages] | None:
    """For weights of 16-bit floats: others are expanded and multiplied by XLA, which stores latents as well."""
    matrices = weight.kernel_matrices
    if matrices is None or len(matrices) > 1:
        return None
    (matrix,) = matrices
    if not isinstance(matrix, KernelMatrix) or matrix.scale is not None or matrix.dtype.itemsize != 2:
        return None
    found: tuple[jax.Array, Pages] = _gpu("attention", "latent_attention")(q, latent, matrix.codes, *arrays, **options)
    return found


REFERENCE = Kernels("reference", reference.paged_attention, products.linear, products.tiles, pages.stored_as_bits)
"""Plain XLA, as CPUs like it, and the oracle of the others."""

COMPILED = replace(REFERENCE, grouped_matmul=products.ragged_dot, page_dtype=np.dtype, ssd=ssd.chunked)
"""Plain XLA, as accelerators like it."""

COMPILED_GPU = replace(
    COMPILED,
    linear=gpu_products.linear,
    grouped_matmul=products.tiles,
    experts=_gpu("experts", "experts"),
    chosen_experts=_gpu("experts", "chosen_experts"),
    add_norm=_gpu("experts", "add_norm"),
    wide_sums=False,
    gpu_tiles=True,
)
"""Attention in plain XLA, products as NVIDIA GPUs like them."""

GPU = replace(
    COMPILED_GPU,
    name="gpu",
    attention=_gpu("attention", "paged_attention"),
    latent_attention=_gpu_latent_attention,
    delta_rule=_gpu("states", "delta_rule"),
    ssd=_gpu("states", "ssd"),
    rotates_heads=True,
)
"""Pallas, through its Triton lowering."""

TPU = replace(COMPILED, name="tpu", attention=tpu.paged_attention, page_layout=pages.INTERLEAVED)
"""JAX's own ragged paged attention, in Pallas, asked only for what `tpu.lacks` allows; products in plain XLA."""

CPU = Kernels(
    "cpu", cpu.attention, cpu.linear, cpu.grouped_matmul, pages.stored_as_bits, packed_attention=cpu.packed_attention,
    segments=cpu.segments, gated_mlp=cpu.gated_mlp, adapted=cpu.adapted, most_likely=cpu.most_likely,
    causal_conv=cpu.causal_conv, delta_rule=cpu.delta_rule, ssd=cpu.ssd,
    low_rank=cpu_kernels.low_rank, normalise=cpu_kernels.normalise, sums=products.CPU_SUMS, native=True,
    rotates_heads=True, page_layout=pages.BY_HEAD._replace(zeros=cpu_kernels.zeros), smallest_rows=1,
)  # fmt: skip
"""C++, compiled for this host's processor; what it has no kernel for runs as the reference does."""

PLATFORM_KERNELS: dict[str, tuple[Kernels, ...]] = {
    "cpu": (REFERENCE,),
    "gpu": (GPU, COMPILED_GPU),
    "cuda": (GPU, COMPILED_GPU),
    "tpu": (TPU, COMPILED),
}
"""The sets of each platform, the best first and plain XLA's last; a platform not listed takes the reference."""

NAMES = ("reference", "gpu", "tpu")


def choose_kernels(
    attention_backend: str,
    platform: str,
    *,
    kv_cache_dtype: str = "auto",
    dtype: Any = jnp.bfloat16,
    native: bool = False,
    uses: Sequence[PageUse] = (),
) -> Kernels:
    """The kernels that `--attention-backend attention_backend` means on `platform`.

    With a `kv_cache_dtype` of "int8" or "fp8" pages are quantized. `native` says that the C++ kernels may be used on a
    CPU: `auto` takes them then. `uses` are what the layers of a model will ask for; what an accelerator's attention
    cannot do is left to plain XLA, and the log says so.

    Raises ConfigError: the backend is unknown, or cannot run there, or not this model.
    """
    kernels = _choose(attention_backend, platform, native)
    lacks = _lacks(kernels, kv_cache_dtype, np.dtype(dtype), uses)
    if lacks is not None:
        said = f"{kernels.name.upper()}s have no attention kernel for {lacks.what}"
        if attention_backend == kernels.name:
            instead = f", or {lacks.instead}" if lacks.instead else ""
            raise ConfigError(f"{said}; accepted are attention_backend 'auto' or 'reference'{instead}")
        instead = f" (they have one for {lacks.instead})" if lacks.instead else ""
        logger.warning("%s%s: it runs as plain XLA, which is slower and takes more memory", said, instead)
        kernels = PLATFORM_KERNELS[platform][-1]
    if kv_cache_dtype == "auto":
        return kernels
    stored = pages.QUANTIZED[kv_cache_dtype]
    return replace(kernels, page_dtype=lambda dtype: stored)


def _lacks(kernels: Kernels, kv_cache_dtype: str, dtype: np.dtype, uses: Sequence[PageUse]) -> Lacks | None:
    """What the attention of an accelerator's `kernels` would be asked for and cannot do."""
    if kernels is GPU and kv_cache_dtype != "auto" and dtype == np.float32:
        # Codes expanded to floats of four bytes are more than registers hold.
        return Lacks(f"kv_cache_dtype {kv_cache_dtype!r} with dtype 'float32'", "a dtype of 16 bits")
    if kernels is not TPU:
        return None
    found = (tpu.lacks(kv_cache_dtype, dtype, use) for use in uses or (None,))
    return next((lacks for lacks in found if lacks is not None), None)


def _choose(attention_backend: str, platform: str, native: bool) -> Kernels:
    here = {kernels.name: kernels for kernels in PLATFORM_KERNELS.get(platform, (REFERENCE,))}
    if attention_backend == "auto":
        return CPU if platform == "cpu" and native else next(iter(here.values()))
    if attention_backend not in NAMES:
        raise ConfigError(f"attention_backend is {attention_backend!r}; accepted are auto, {', '.join(NAMES)}")
    if attention_backend not in here:
        raise ConfigError(
            f"attention_backend is {attention_backend!r}, which needs a {attention_backend.upper()}; "
            f"this machine runs on {platform}"
        )
    return here[attention_backend]
