"""An engine's use of host memory: the room for it, and the tiers that pages and states leave the devices for."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.saved import fingerprint
from jaxllm.engine.features.offload.offload import PageBlocks
from jaxllm.engine.features.offload.pages import DiskPages
from jaxllm.engine.features.offload.tiers import PageTiers
from jaxllm.engine.start.agreement import files_digest
from jaxllm.engine.start.plan import PROCESS_BYTES, Blueprint, EnginePlan
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.prepared import step_manifest
from jaxllm.errors import ConfigError
from jaxllm.folders import in_home
from jaxllm.sharding.wire import group_secret

NOT_IN_PAGES = ("sizes", "process", "compiler", "python")
"""Parts of a manifest that say nothing of what is in a page: how many there are, and how steps are compiled."""
NOT_ELSEWHERE = ("processor",)
"""Parts that may differ between two machines that exchange pages: another processor rounds alike, or nearly so."""


def check_offload(config: EngineConfig, blueprint: Blueprint, platform: Platform) -> None:
    """Raises ConfigError where pages are to be kept of a model that has none, or states of one that keeps none, or more
    than the host has room for.
    """
    if config.kv_offload_memory is None:
        return
    size, sizes = format_bytes(config.kv_offload_memory), blueprint.sizes
    if blueprint.plan.buckets.encodes:
        raise ConfigError(f"kv_offload_memory is {size}, and this model keeps no KV pages that it could hold")
    if sizes.keeps_by_slot and not sizes.num_snapshots:
        raise ConfigError(
            f"kv_offload_memory is {size}, and this model has recurrent layers, of which no state of a prefix is kept "
            "(state_cache_memory): no prompt could go on from a prefix"
        )
    rooms = {"kv_offload_memory": config.kv_offload_memory}
    if config.kv_offload_dir is not None:
        rooms["kv_offload_disk"] = config.kv_offload_disk
    state = PageBlocks(sizes.buffers_of(paged=False)).nbytes
    for name, room in rooms.items():
        if state > room:
            raise ConfigError(
                f"{name} is {format_bytes(room)}, which does not hold the state of one prefix: {format_bytes(state)}"
            )
    if platform.host_memory is not None and config.kv_offload_memory > platform.host_memory:
        host = format_bytes(platform.host_memory)
        raise ConfigError(f"kv_offload_memory is {size}, and this process may have {host} of host memory")


def page_tiers(
    config: EngineConfig, blueprint: Blueprint, mesh: Mesh, checkpoint: Path, pool: PagePool
) -> PageTiers | None:
    """The tiers that keep the pages of `pool` and the states of its prefixes; None if there are none.

    Raises:
        ConfigError: kv_offload_dir cannot be used, or no port is free where others would fetch pages.
    """
    if config.kv_offload_memory is None:
        return None
    sizes, disk = blueprint.sizes, None
    page_bytes, state_bytes = (PageBlocks(sizes.buffers_of(paged)).nbytes for paged in (True, False))
    if config.kv_offload_dir is not None:
        name = contents_digest(config, blueprint, mesh, checkpoint)
        lengths = [length for length in (page_bytes, state_bytes) if length]
        disk = DiskPages(in_home(config.kv_offload_dir), name, config.kv_offload_disk, lengths)
    has = {"has_states": state_bytes > 0, "has_pages": page_bytes > 0}
    tiers = PageTiers(pool, config.kv_offload_memory, disk, **has)
    if config.kv_transfer_config is not None:
        contents = contents_digest(config, blueprint, mesh, checkpoint, ignored=NOT_ELSEWHERE)
        secret = group_secret(config.cluster_secret)
        tiers.join(config.kv_transfer_config, secret, contents, page_bytes, state_bytes)
    return tiers


def contents_digest(
    config: EngineConfig, blueprint: Blueprint, mesh: Mesh, checkpoint: Path, ignored: Sequence[str] = ()
) -> str:
    """The digest of all that decides what is in a page, and in the state of a prefix: engines with the same one may use
    each other's.

    `ignored` are parts of a manifest that are left out besides those that say nothing of pages.
    """
    manifest = step_manifest(blueprint, mesh)
    kept = {name: value for name, value in manifest.items() if name not in (*NOT_IN_PAGES, *ignored)}
    buffers = [buffer for paged in (True, False) for buffer in blueprint.sizes.buffers_of(paged)]
    shapes = [(buffer.shape[1:], buffer.dtype.name, buffer.axes) for buffer in buffers]
    kept |= {
        "page": fingerprint((blueprint.sizes.page_size, shapes)),
        "files": files_digest(checkpoint, config.imatrix),
        "weights": f"random, seed {config.seed}" if config.load_format == "dummy" else "of the files",
    }
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32]


logger = logging.getLogger(__name__)


def check_host_memory(plan: EnginePlan, platform: Platform) -> None:
    """Raises ConfigError where the plan needs more than this process may ever use of the host: on a CPU all of it, and
    elsewhere experts that are left in host memory.

    The system would end the process without a word. Memory in use now may be given back until then, which is a warning.
    """
    if platform.host_memory is None:
        return
    if platform.memory_limit is not None:
        if plan.host_weight_bytes and PROCESS_BYTES + plan.host_weight_bytes > platform.host_memory:
            raise ConfigError(
                f"{plan.model} needs {format_bytes(plan.host_weight_bytes)} of host memory for experts, and this "
                f"process may have {format_bytes(platform.host_memory)}; lower num_experts_offload_per_rank, or "
                "quantize the weights (isq)"
            )
        return
    needed = PROCESS_BYTES + plan.planned_bytes + plan.host_weight_bytes
    weights = format_bytes(plan.weight_bytes + plan.host_weight_bytes)
    room = f"{format_bytes(PROCESS_BYTES)} for the program itself, {weights} of weights, "
    room += f"{format_bytes(plan.kv_bytes)} of KV cache and {format_bytes(plan.workspace_bytes)} to compute in"
    if needed > platform.host_memory:
        raise ConfigError(
            f"{plan.model} needs {format_bytes(needed)} of memory ({room}), and this process may have "
            f"{format_bytes(platform.host_memory)}; raise the container's limit, lower kv_cache_memory, max_model_len "
            "or max_num_seqs, or quantize the weights (isq)"
        )
    if needed > platform.free_host_memory:
        free = format_bytes(platform.free_host_memory)
        logger.warning("%s of memory are free, and %s will be needed: %s", free, format_bytes(needed), room)
