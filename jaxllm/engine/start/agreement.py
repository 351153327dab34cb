"""The agreements of a group's processes before they run a step together."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import jax

from jaxllm import compat
from jaxllm.config import EngineConfig
from jaxllm.engine.scale.lockstep.follower import Follower
from jaxllm.engine.scale.lockstep.leader import Leader
from jaxllm.engine.scale.lockstep.meeting import Group, meet
from jaxllm.engine.scale.lockstep.messages import (
    Agreed,
    MemberMemory,
    MemberPlan,
    Refused,
    TransferAddress,
    TransferAddresses,
    difference,
)
from jaxllm.engine.start.draft import draft_config
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.prepared import sources_digest
from jaxllm.errors import ConfigError
from jaxllm.sharding.devices import join_processes, local_devices
from jaxllm.sharding.mesh import Exchange
from jaxllm.weights.source import resolve_model

OF_ONE_PROCESS = (
    "model", "tokenizer", "download_dir", "imatrix", "generation_config", "compile_cache_dir",
    "compile_cache_max", "weight_cache_max", "executables", "engine_process", "coordinator_address", "process_id",
    "cluster", "cluster_secret", "max_num_waiting",
)  # fmt: skip
"""Settings that need not be the same in all processes: where things are on a machine, and what the others have no use
for. The contents of files are compared by themselves."""
_MEMORIES = MemberMemory.__struct_fields__
WEIGHTS = (".safetensors", ".gguf")
SAMPLED = 2**16
"""Bytes at the beginning, in the middle and at the end of a large file that its digest is made of."""
NOT_COMPARED = ("processor", "process")
"""Parts of a manifest that differ between processes whose steps are alike."""


def join_group(
    config: EngineConfig,
    path: Path,
    on_broken: Callable[[str], None],
    on_group: Callable[[Group], None] = lambda group: None,
) -> Group:
    """Meet the other processes, and start JAX together with them.

    `on_group` is called in between: whatever ends a process once JAX has started aborts the others.

    Raises:
        ConfigError: one is missing, or differs; see `meet`. Or `on_group` has raised it, which process 0 is told.
    """
    assert config.num_processes is not None
    agreement = _settings(config) | {
        "the version of jaxllm": f"{version('jaxllm')} ({sources_digest()})",
        "the version of jax": jax.__version__,
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "the model's files": files_digest(path, config.imatrix),
    }
    if (draft := draft_config(config)) is not None:
        found = resolve_model(draft.model, revision=draft.revision, download_dir=draft.download_dir)
        agreement |= {"the draft model's files": files_digest(found)}
    group = meet(config, agreement, on_broken)
    try:
        on_group(group)
    except ConfigError as error:
        if isinstance(group.hold, Follower):
            group.hold.fail(str(error))
        raise
    each = config.num_devices // config.num_processes
    devices = local_devices(each, group.place, group.neighbours)
    shares_steps = config.num_processes > config.pipeline_parallel_size
    join_processes(group.address, group.number, group.count, devices, shares_steps)
    return group


def agree_on_memory(group: Group, platform: Platform) -> Platform:
    """The platform that all plan for: the least memory that any of them has.

    The host's is shared by the processes that run there.
    """
    ours = MemberMemory(
        platform.memory_limit, platform.memory, platform.free_host_memory // group.neighbours,
        None if platform.host_memory is None else platform.host_memory // group.neighbours,
    )  # fmt: skip
    match group.hold:
        case Leader() as leader:
            least = _least([ours, *leader.collect(MemberMemory).values()])
            leader.tell(least)
        case Follower() as follower:
            least = follower.ask(ours, MemberMemory)
    return dataclasses.replace(platform, **{name: getattr(least, name) for name in _MEMORIES})


def _least(told: Sequence[MemberMemory]) -> MemberMemory:
    """The smallest value of each number that any process has said."""
    said = {name: [value for one in told if (value := getattr(one, name)) is not None] for name in _MEMORIES}
    least: dict[str, Any] = {name: min(values, default=None) for name, values in said.items()}
    return MemberMemory(**least)


def agree_on_plan(group: Group, manifest: dict[str, str]) -> None:
    """Raises ConfigError where the steps of one process would not be those of the others."""
    ours = {name: value for name, value in manifest.items() if name not in NOT_COMPARED}
    match group.hold:
        case Leader() as leader:
            for process, planned in leader.collect(MemberPlan).items():
                if problem := difference(ours, planned.manifest, process):
                    leader.tell(Refused(problem))
                    raise ConfigError(problem)
            leader.tell(Agreed())
        case Follower() as follower:
            follower.ask(MemberPlan(ours), Agreed)


def open_exchange(group: Group) -> Exchange | None:
    """The exchange by which processes send each other arrays, if JAX does not copy them between their devices."""
    if compat.copies_between_processes():
        return None
    hosts = group.hold.own_hosts
    server = compat.transfer_server(next((host for host in hosts if not ip_address(host).is_loopback), hosts[0]))
    ours = TransferAddress(server.address())
    match group.hold:
        case Leader() as leader:
            told = leader.collect(TransferAddress).values()
            all_of_them = TransferAddresses([ours.address, *(one.address for one in told)], secrets.randbits(48))
            leader.tell(all_of_them)
        case Follower() as follower:
            all_of_them = follower.ask(ours, TransferAddresses)
    return Exchange(server, all_of_them.addresses, all_of_them.first)


def files_digest(path: Path, *others: Path | None) -> str:
    """The digest of a checkpoint's config and weights, and of other files; of large ones the size and parts."""
    digest = hashlib.sha256()
    for name, file in [*_files(path), *(("", other) for other in others if other is not None)]:
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - SAMPLED)):
                opened.seek(start)
                digest.update(opened.read(SAMPLED))
    return digest.hexdigest()[:16]


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """The files that a checkpoint is read from, by names that are the same wherever it lies."""
    if path.is_file():
        yield "", path
        return
    flat = [file for file in sorted(path.iterdir()) if file.suffix in WEIGHTS or file.name == "config.json"]
    if any(file.suffix in WEIGHTS for file in flat):
        yield from ((file.name, file) for file in flat)
        return
    for folder, _, names in sorted(os.walk(path)):  # what `jaxllm convert` has saved
        yield from ((str((Path(folder) / name).relative_to(path)), Path(folder) / name) for name in sorted(names))


def _settings(config: EngineConfig) -> dict[str, str]:
    names = [name for name in EngineConfig.model_fields if name not in OF_ONE_PROCESS]
    return {name: repr(getattr(config, name)) for name in names}
