"""The memory that an engine's parts take of a device, and the pages and states that fit into the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.features.drafts.rules import DraftRule, ModuleDrafts
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import DoesNotFitError
from jaxllm.models.config import DecoderConfig, MixerKind
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec, abstract_model
from jaxllm.pallas_kernels.matrices import EXPANDED_BYTES
from jaxllm.quantization.gpu_tiles import GpuTiledKind
from jaxllm.sharding.mesh import num_pieces
from jaxllm.weights.loader import ParamSpec

CPU_KV_BYTES = 2 * 2**30
COUNT_BITS = 6
"""The significant bits of a number of pages or states: at most 1/32 of the memory is left out for it."""
RUNNING_SHARE = 2
"""If the number of sequences is not set, states of running ones take at most one part in this many of the memory."""
STATE_SHARE = 8
"""One part in this many of the caches' memory goes to states that others can go on from, if nothing else is set."""


@dataclass(frozen=True)
class Caches:
    """The numbers of pages and kept states, and the longest context that fits."""

    num_pages: int
    num_snapshots: int
    max_model_len: int
    notes: tuple[str, ...] = ()


def plan_caches(
    config: EngineConfig, budget: int, weights: int, page_bytes: int, state_bytes: int, wanted: int, max_num_seqs: int
) -> Caches:
    """Share out `budget` bytes of a device: states of running sequences, then kept ones, then pages.

    Args:
        weights: bytes of the device that its weights take.
        page_bytes: what a page takes in all layers; 0 where no layer has pages.
        state_bytes: what the states of one sequence take in all layers.
        wanted: the context's length in tokens, if it fits.

    Raises:
        DoesNotFitError: not even a page fits, or not the states of the running sequences.
    """
    page, notes = config.block_size, []
    slots = (max_num_seqs + 1) * state_bytes
    if state_bytes and slots > budget:
        raise DoesNotFitError(
            f"KV memory of {format_bytes(max(budget, 0))} a device does not hold the states of {max_num_seqs} "
            f"sequences ({format_bytes(state_bytes)} each); raise kv_cache_memory or lower max_num_seqs"
        )
    num_snapshots = 0
    if state_bytes and config.enable_prefix_caching:
        asked = budget // STATE_SHARE if config.state_cache_memory is None else config.state_cache_memory
        num_snapshots = min(asked, budget - slots) // state_bytes
        num_snapshots = _rounded(num_snapshots) if config.state_cache_memory is None else num_snapshots
        if not num_snapshots:
            notes.append(
                f"no prefix is shared: {format_bytes(asked)} for states (state_cache_memory) do not hold one of "
                f"{format_bytes(state_bytes)}"
            )
    left = budget - slots - num_snapshots * state_bytes
    pages_per_seq = math.ceil(wanted / page)
    fit = left // page_bytes if page_bytes else max_num_seqs * pages_per_seq + 1
    num_pages = _page_count(fit, pages_per_seq, max_num_seqs)
    capacity = (num_pages - 1) * page
    if capacity < page:
        raise DoesNotFitError(
            f"KV memory of {format_bytes(max(left, 0))} a device holds no page of {page} tokens "
            f"({format_bytes(page_bytes)}) besides the weights ({format_bytes(weights)}); "
            "raise kv_cache_memory or gpu_memory_utilization, or lower max_num_batched_tokens"
        )
    if capacity < wanted:
        notes.append(
            f"max_model_len shrunk from {wanted} to {capacity}: KV memory of {format_bytes(left)} "
            f"holds no longer context"
        )
    return Caches(num_pages, min(num_snapshots, num_pages - 1), min(wanted, capacity), tuple(notes))


def least_caches(of_stages: Sequence[Caches], state_bytes: Sequence[int]) -> Caches:
    """The caches that every stage of a model has room for; each takes `state_bytes` for the states of one sequence.

    Stages that take none have no say in how many states are kept.
    """
    num_pages = min(caches.num_pages for caches in of_stages)
    kept = (caches.num_snapshots for caches, nbytes in zip(of_stages, state_bytes, strict=True) if nbytes)
    notes = dict.fromkeys(note for caches in of_stages for note in caches.notes)
    longest = min(caches.max_model_len for caches in of_stages)
    return Caches(num_pages, min(*kept, num_pages - 1) if any(state_bytes) else 0, longest, tuple(notes))


def fewer_sequences(max_num_seqs: int, budget: int, state_bytes: int) -> int:
    """`max_num_seqs`, or the power of two of sequences whose states leave enough of `budget` to the rest."""
    most = budget // RUNNING_SHARE // state_bytes - 1 if state_bytes else max_num_seqs
    return max_num_seqs if most >= max_num_seqs else 1 << (max(most, 1).bit_length() - 1)


def _page_count(fit: int, a_sequence: int, max_num_seqs: int) -> int:
    """Pages to make where `fit` fit and a sequence at full length takes `a_sequence`; page 0 is padding's.

    The count is rounded down, but not below one full sequence. More than all sequences can use would never be touched.
    """
    most, one = max_num_seqs * a_sequence + 1, a_sequence + 1
    if fit >= most:
        return most
    return max(_rounded(fit), one) if fit >= one else _rounded(fit)


def _rounded(count: int) -> int:
    """A count that is a shape of every compiled step, rounded down to COUNT_BITS significant bits.

    Memory that differs by little makes the same count. Worked example: 4,000 and 4,030 (111110100000b,
    111110111110b) both make 3,968 (111110000000b).
    """
    low_bits = max(count.bit_length() - COUNT_BITS, 0)
    return count >> low_bits << low_bits


def count_parameters(spec: ModelSpec, params: list[ParamSpec] | None = None) -> int:
    """Parameters as published: without padding or replication. `params` saves work where they are of one device."""
    if params is None:
        _, params = abstract_model(spec, BuildOptions())
    padding = (p for p in params if p.layout is not None and p.layout.pad_to)
    extra = sum((p.shape[0] - p.layout.segments[0].rows) * math.prod(p.shape[1:]) for p in padding if p.layout)
    return sum(math.prod(p.shape) for p in params) - extra


def weight_bytes(params: list[ParamSpec], tp: int, dp: int = 1) -> int:
    """Bytes of the weights that one device of a `(data=dp, tensor=tp)` mesh holds."""
    return _leaf_bytes(params, tp, dp, on_host=False)


def host_weight_bytes(params: list[ParamSpec], tp: int, dp: int = 1) -> int:
    """Bytes of the weights that its host has for it."""
    return _leaf_bytes(params, tp, dp, on_host=True)


def _leaf_bytes(params: list[ParamSpec], tp: int, dp: int, *, on_host: bool) -> int:
    leaves = (leaf for param in params for leaf in param.leaves() if leaf.on_host is on_host)
    return sum(leaf.array.size * leaf.array.dtype.itemsize // num_pieces(leaf.axes, tp, dp) for leaf in leaves)


def workspace_bytes(
    c: DecoderConfig, options: BuildOptions, max_num_seqs: int, tokens: int, num_drafts: int = 0
) -> int:
    """An upper estimate of a step's temporaries: one layer's activations and the sampler's rows of logits.

    If drafts are tried, `num_drafts` with each sequence, it includes what layers with a state keep of these tokens.
    """
    tp, itemsize = options.tp, jnp.dtype(options.dtype).itemsize
    attention = (
        c.num_heads // tp * (group.dims[0] + (c.head_dim if c.mla else group.dims[-1]))
        + 2 * max(group.heads, tp) // tp * group.dims[0]
        for group in c.page_groups
    )
    recurrent = matrices = 0
    if c.conv:
        recurrent = 3 * c.hidden_size
    if c.delta:
        recurrent, matrices = 6 * c.delta.channels, math.prod(c.delta.cache.shapes[1]) // tp
    if c.ssd:
        recurrent, matrices = 4 * c.ssd.inner + 2 * c.ssd.shared * tp, math.prod(c.ssd.cache.shapes[1]) // tp
    among_texts = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim // tp if c.encoder else 0
    mixer = max([*attention, among_texts, recurrent // tp])
    # A token has a row for each expert that it uses; experts that all batches share are given the tokens of all.
    batches = options.dp if options.expert_parallel else 1
    experts = batches * c.moe.top_k * (c.hidden_size + c.moe.hidden) + c.moe.shared_hidden if c.moe else 0
    width = max(experts, *map(c.intermediate_size_of, c.layers))
    layer = tokens * (4 * c.hidden_size + 3 * width // tp + 2 * mixer) * 4
    tried = max_num_seqs * (1 + num_drafts)
    logits = max(tried, 2) * c.vocab_size * 4 * 4
    states = 3 * max_num_seqs * matrices * 4
    tentative = tried * _tentative_width(c, tp) * 4 if num_drafts else 0
    return layer + states + tentative + logits + tokens * c.hidden_size * (4 if options.kernels.native else itemsize)


def read_bytes(drafts: DraftRule | None, c: DecoderConfig, options: BuildOptions, tokens: int) -> int:
    """Bytes that a step keeps of the model's states for a module that reads them: side by side, and joined."""
    if not isinstance(drafts, ModuleDrafts):
        return 0
    return tokens * (2 * len(drafts.layers) * c.hidden_size + drafts.size) * jnp.dtype(options.dtype).itemsize


def _tentative_width(c: DecoderConfig, tp: int) -> int:
    """Numbers that a device keeps of a token until it is known whether it stays: what goes into states."""
    widths: dict[MixerKind, int] = {}
    if c.conv:
        widths["conv"] = c.hidden_size // tp
    if c.delta:
        widths["delta"] = 2 * (c.delta.channels + c.delta.value_heads) // tp
    if c.ssd:
        widths["ssd"] = (2 * c.ssd.inner + c.ssd.heads) // tp + 2 * c.ssd.shared
    return sum(widths.get(mixer, 0) for layer in c.layers for mixer in layer.mixers)


def expanded_bytes(params: list[ParamSpec], tp: int, tokens: int) -> int:
    """Bytes that a step of `tokens` expands of one weight at a time, of those in tiles for GPUs."""
    whole = (
        math.prod(param.shape) // num_pieces(param.axes, tp) * param.dtype.itemsize
        for param in params
        for kind in param.kinds
        if isinstance(kind, GpuTiledKind) and len(param.shape) == 2 and tokens >= kind.format.expanded_from
    )
    return min(EXPANDED_BYTES, max(whole, default=0))


def cache_budget(config: EngineConfig, platform: Platform, weights: int, workspace: int) -> int:
    """Bytes of a device that pages and states may take together; negative where the weights leave nothing."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if platform.memory_limit is None:
        return min(CPU_KV_BYTES, (platform.free_host_memory - weights) // 4)
    wanted = int((platform.memory or platform.memory_limit) * config.gpu_memory_utilization)
    return min(wanted, platform.memory_limit) - weights - workspace
