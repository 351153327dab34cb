"""The operations that a platform may run in its own way, as one record, and the choice of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import cpu, gpu_products, reference
from jaxllm.pallas_kernels.grouped_matmul import ragged_dot, sort_by_group, tiles
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import QUANTIZED, Pages, stored_as_bits, stored_as_is
from jaxllm.pallas_kernels.products import linear


@runtime_checkable
class PagedAttention(Protocol):
    """Write new keys and values into their pages, then attend to everything each token may see.

    Args:
        q, k, v: the new tokens' queries `[T, H, D]`, keys and values `[T, K, D]`; query head `h` uses KV head
            `h // (H // K)`. Without `v` the values are the first `value_dim` channels of the keys, which is how latent
            attention caches them.
        pages: `(k_pages, v_pages)`, or `(latent_pages,)` without `v`; each `[N, K, page_size, D]`, updated in place
            when donated.
        meta: which token belongs where.
        scale: factor on the logits.
        window: a token at position `i` sees positions `j` with `i - window < j <= i`.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        sinks: `[H]`, one more logit a head that takes softmax mass and has no value.
        value_dim: with latent pages, how many channels of a key are its value; all of them if not given.

    Returns:
        The attention output `[T, H, Dv]` in `q`'s dtype (padding rows are zero) and the new pages. Sums run in float32.
    """

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"] | None,
        pages: Pages,
        meta: StepMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
        value_dim: int | None = None,
    ) -> tuple[Float[Array, "T H Dv"], Pages]: ...


@dataclass(frozen=True)
class Kernels:
    """What runs a model's products and attention: chosen once, with the plan, and handed to every layer.

    Attributes:
        name: of the attention, for people.
        linear: `(x [T, i], weight [o, i], norm, residual) -> [T, o]`: float32 `norm(x) @ weight.T + residual`, of
            which the last two may be None.
        segments: `(x, weight, norm)` -> the parts of a fused product, where they need not be joined to be parted.
        most_likely: `(x, weight, rows)` -> each row's greatest product among the first `rows`, where there is a kernel.
        gated: `(x, weight, activation, norm)` -> `act(gate) * up`, where there is a kernel for that.
        grouped_matmul: `(x [N, i], weights [X, o, i], group_sizes [X]) -> [N, o]`, float32; see `grouped_matmul.py`.
        sort_by_group: `(group [N], X)` -> order, places and sizes; see `grouped_matmul.py`.
        page_dtype: the type that pages of a float type are kept in.
        tiles: weights go into tiles for the C++ kernels, where those have them.
        turns_heads: attention takes the heads' norms and angles, and applies them itself.
    """

    name: str
    attention: PagedAttention
    linear: Callable[..., jax.Array]
    grouped_matmul: Callable[[jax.Array, Any, jax.Array], jax.Array]
    page_dtype: Callable[[Any], np.dtype]
    segments: Callable[..., Sequence[jax.Array] | None] = lambda x, weight, norm: None
    gated: Callable[..., jax.Array | None] = lambda x, weight, activation, norm: None
    most_likely: Callable[..., jax.Array | None] = lambda x, weight, rows: None
    sort_by_group: Callable[[jax.Array, int], tuple[jax.Array, jax.Array, jax.Array]] = sort_by_group
    tiles: bool = False
    turns_heads: bool = False


def _gpu_attention(*args: Any, **options: Any) -> tuple[jax.Array, Pages]:
    from jaxllm.pallas_kernels.gpu import paged_attention  # Pallas takes half a second to import

    return paged_attention(*args, **options)


REFERENCE = Kernels("reference", reference.paged_attention, linear, tiles, stored_as_bits)
"""Plain XLA, as CPUs like it, and the oracle of the others."""

COMPILED = replace(REFERENCE, grouped_matmul=ragged_dot, page_dtype=stored_as_is)
"""Plain XLA, as accelerators like it."""

COMPILED_GPU = replace(
    COMPILED,
    linear=gpu_products.linear,
    grouped_matmul=gpu_products.grouped_matmul,
    sort_by_group=gpu_products.sort_by_group,
)
"""Attention in plain XLA, products as NVIDIA GPUs like them."""

GPU = replace(COMPILED_GPU, name="gpu", attention=_gpu_attention)
"""Pallas, through its Triton lowering."""

CPU = Kernels(
    "cpu", cpu.attention, cpu.linear, cpu.grouped_matmul, stored_as_bits,
    segments=cpu.segments, gated=cpu.gated, most_likely=cpu.most_likely, tiles=True, turns_heads=True,
)  # fmt: skip
"""C++, compiled for this host's processor; what it has no kernel for runs as the reference does."""

PLATFORM_KERNELS: dict[str, tuple[Kernels, ...]] = {
    "cpu": (REFERENCE,),
    "gpu": (GPU, COMPILED_GPU),
    "cuda": (GPU, COMPILED_GPU),
    "tpu": (COMPILED,),
}
"""The sets of each platform, the best first; a platform not listed takes the reference."""

NAMES = ("reference", "gpu")

LATENT = ("reference",)
"""Attention that serves latent pages. The GPU kernels do not: their tiles hold all channels of a key, padded to a power
of two, and a DeepSeek latent of 576 channels would pad to 1024."""


QUANTIZED_PAGES = ("reference",)
"""Attention that reads quantized pages."""


def choose_kernels(
    attention_backend: str,
    platform: str,
    *,
    latent: bool = False,
    kv_cache_dtype: str = "auto",
    native: bool = False,
) -> Kernels:
    """The kernels that `--attention-backend attention_backend` means on `platform`, over `latent` pages or plain ones.

    With a `kv_cache_dtype` of "int8" or "fp8" pages are quantized. `native` says that the C++ kernels may be used on a
    CPU: `auto` takes them then; quantized pages they leave to the reference.

    Raises:
        ConfigError: the backend is unknown, cannot run there, or does not serve such pages.
    """
    if attention_backend == "auto" and platform == "cpu" and native:
        return (
            CPU
            if kv_cache_dtype == "auto"
            else _with_pages(replace(CPU, attention=REFERENCE.attention, turns_heads=False), kv_cache_dtype)
        )
    if kv_cache_dtype == "auto":
        return _choose(attention_backend, platform, latent)
    if attention_backend not in ("auto", *QUANTIZED_PAGES):
        raise ConfigError(
            f"attention_backend is {attention_backend!r}, which does not read {kv_cache_dtype} KV pages; "
            f"kv_cache_dtype {kv_cache_dtype} accepts auto, {', '.join(QUANTIZED_PAGES)}"
        )
    return _with_pages(_choose(QUANTIZED_PAGES[0], platform, latent), kv_cache_dtype)


def _with_pages(kernels: Kernels, kv_cache_dtype: str) -> Kernels:
    stored = QUANTIZED[kv_cache_dtype]
    return replace(kernels, page_dtype=lambda dtype: stored)


def _choose(attention_backend: str, platform: str, latent: bool) -> Kernels:
    here = {kernels.name: kernels for kernels in PLATFORM_KERNELS.get(platform, (REFERENCE,))}
    if attention_backend == "auto":
        return next(kernels for name, kernels in here.items() if name in LATENT or not latent)
    if attention_backend not in NAMES:
        raise ConfigError(f"attention_backend is {attention_backend!r}; accepted are auto, {', '.join(NAMES)}")
    if attention_backend not in here:
        raise ConfigError(
            f"attention_backend is {attention_backend!r}, which needs a GPU; this machine runs on {platform}"
        )
    if latent and attention_backend not in LATENT:
        raise ConfigError(
            f"attention_backend is {attention_backend!r}, which does not serve latent attention (MLA); "
            f"this model accepts auto, {', '.join(LATENT)}"
        )
    return here[attention_backend]
