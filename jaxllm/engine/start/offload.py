"""Where an engine's pages go when their place on the devices is given away."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.engine.device.page_blocks import PageBlocks
from jaxllm.engine.device.saved import fingerprint
from jaxllm.engine.offload.disk_pages import DiskPages
from jaxllm.engine.offload.tiers import PageTiers
from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.start.agreement import files_digest
from jaxllm.engine.start.manifest import step_manifest
from jaxllm.engine.start.plan import Blueprint
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import ConfigError
from jaxllm.folders import in_home
from jaxllm.setting_values import format_bytes
from jaxllm.sharding.secret import group_secret

NOT_IN_PAGES = ("sizes", "process", "compiler", "python")
"""Parts of a manifest that say nothing of what is in a page: how many there are, and how steps are compiled."""
NOT_ELSEWHERE = ("processor",)
"""Parts that may differ between two machines that exchange pages: another processor rounds alike, or nearly so."""


def check_offload(config: EngineConfig, blueprint: Blueprint, platform: Platform) -> None:
    """Raises ConfigError where pages are to be kept of a model that has none, or more than the host has room for."""
    if config.kv_offload_memory is None:
        return
    size = format_bytes(config.kv_offload_memory)
    if blueprint.plan.buckets.encodes or not blueprint.sizes.paged_buffers:
        raise ConfigError(f"kv_offload_memory is {size}, and this model keeps no KV pages that it could hold")
    if blueprint.sizes.has_states:
        raise ConfigError(
            f"kv_offload_memory is {size}, and this model has recurrent layers: pages alone would not let it go on "
            "from a prefix; state_cache_memory says how many of its prefixes are kept"
        )
    if platform.host_memory is not None and config.kv_offload_memory > platform.host_memory:
        host = format_bytes(platform.host_memory)
        raise ConfigError(f"kv_offload_memory is {size}, and this process may have {host} of host memory")


def page_tiers(
    config: EngineConfig, blueprint: Blueprint, mesh: Mesh, checkpoint: Path, pool: PagePool
) -> PageTiers | None:
    """What keeps the pages of `pool`; None where nothing does.

    Raises:
        ConfigError: kv_offload_dir cannot be used, or nobody can listen where others would fetch pages.
    """
    if config.kv_offload_memory is None:
        return None
    disk, page_bytes = None, PageBlocks(blueprint.sizes).nbytes
    if config.kv_offload_dir is not None:
        name = contents_digest(config, blueprint, mesh, checkpoint)
        disk = DiskPages(in_home(config.kv_offload_dir), name, config.kv_offload_disk, page_bytes)
    tiers = PageTiers(pool, config.kv_offload_memory, disk)
    if config.kv_transfer_config is not None:
        contents = contents_digest(config, blueprint, mesh, checkpoint, ignored=NOT_ELSEWHERE)
        tiers.join(config.kv_transfer_config, group_secret(config.cluster_secret), contents, page_bytes)
    return tiers


def contents_digest(
    config: EngineConfig, blueprint: Blueprint, mesh: Mesh, checkpoint: Path, ignored: Sequence[str] = ()
) -> str:
    """Of all that decides what is in the page of a prefix: engines with the same one may use each other's.

    `ignored` are parts of a manifest that are left out besides those that say nothing of pages.
    """
    manifest = step_manifest(blueprint, mesh)
    kept = {name: value for name, value in manifest.items() if name not in (*NOT_IN_PAGES, *ignored)}
    shapes = [(buffer.shape[1:], buffer.dtype.name, buffer.axes) for buffer in blueprint.sizes.paged_buffers]
    kept |= {
        "page": fingerprint((blueprint.sizes.page_size, shapes)),
        "files": files_digest(checkpoint, config.imatrix),
        "weights": f"random, seed {config.seed}" if config.load_format == "dummy" else "of the files",
    }
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32]
