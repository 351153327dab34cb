"""Which process of a group this one is, by its settings and by its launcher. JAX is not needed for it."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError

DEFAULT_PORT = 8476
_FIRST_PORT, _PORTS = 61_440, 4_096  # ports that jobs on one machine take by their names where no port is given

Variables = Mapping[str, str]
Config = TypeVar("Config", bound=EngineConfig)


class Launcher(NamedTuple):
    """Variables for the `total` number of processes and the `number` of this one, and the address of process 0."""

    total: str
    number: str
    address: Callable[[Variables], str | None]


def _slurm_address(variables: Variables) -> str | None:
    """Worked example: 'node[003-004,7],x1' begins with node003."""
    nodes = variables.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if first is None:
        return None
    return f"{first[1]}{first[2] or ''}:{_port_of(variables.get('SLURM_JOB_ID', ''))}"


def _ompi_address(variables: Variables) -> str | None:
    """Open MPI 4 says where mpirun runs, and puts process 0 there; 5 says nothing of other machines."""
    port = _port_of(variables.get("PMIX_NAMESPACE", ""))
    if variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == variables["OMPI_COMM_WORLD_SIZE"]:
        return f"127.0.0.1:{port}"
    launcher = re.search(r"tcp://([^,:]+)", variables.get("OMPI_MCA_orte_hnp_uri", ""))
    return f"{launcher[1]}:{port}" if launcher else None


def _lws_address(variables: Variables) -> str | None:
    host = variables.get("LWS_LEADER_ADDRESS")
    return f"{host}:{DEFAULT_PORT}" if host else None


LAUNCHERS = {  # the launchers that `auto` looks for, by the names that `cluster` gives them
    "slurm": Launcher("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", _slurm_address),
    "ompi": Launcher("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", _ompi_address),
    "lws": Launcher("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", _lws_address),
}


def settled(config: Config, *, looks: bool = False, variables: Variables = os.environ) -> Config:
    """`config` with its place in the group said in full, or unchanged if the process is alone.

    With `looks`, `auto` asks the environment; without it only a named cluster, or the settings, make a group. With
    multi_process the place is not known yet: the engine's own process will start the others.
    Raises ConfigError if a part of the place is missing, or contradicts the others.
    """
    found: dict[str, object] = {}
    if config.cluster in ("mpi4py", "k8s"):
        from jaxllm.compat import cluster_place  # JAX comes with it

        found = dict(zip(_FIELDS, cluster_place(config.cluster), strict=True))
    elif config.cluster in LAUNCHERS:
        found = _told_by(LAUNCHERS[config.cluster], variables)
        if not found:
            launcher = LAUNCHERS[config.cluster]
            raise ConfigError(f"cluster is {config.cluster!r}, but {launcher.total} and {launcher.number} are not set")
    elif config.cluster == "auto" and looks and config.num_processes is None:
        found = next((told for told in (_told_by(one, variables) for one in LAUNCHERS.values()) if told), {})
    if config.multi_process:
        if found.get("num_processes", 1) != 1:
            raise ConfigError(
                f"multi_process is true, but this is process {found['process_id']} of {found['num_processes']} that "
                "were started together: leave it out, or set cluster to off where each is to have an engine of its own"
            )
        return config.model_copy(update={"engine_process": True})
    stated = {name: value for name in _FIELDS if (value := getattr(config, name)) is not None}
    place = found | stated
    if place.get("num_processes", 1) == 1:
        if "num_processes" not in stated and stated:
            name, value = next(iter(stated.items()))
            raise ConfigError(f"{name} is {value!r}, but num_processes is missing: say how many processes there are")
        if stated.get("process_id"):
            raise ConfigError(f"process_id is {stated['process_id']}, but num_processes is 1: accepted is 0")
        return config
    _check(config, place)
    return config.model_copy(update={**place, "cluster": "off"})


_FIELDS = ("coordinator_address", "num_processes", "process_id")


def _told_by(launcher: Launcher, variables: Variables) -> dict[str, object]:
    """The place that the environment gives; empty where it is not that launcher's."""
    count, number = variables.get(launcher.total, ""), variables.get(launcher.number, "")
    if not (count.isdecimal() and number.isdecimal()):
        return {}
    address = launcher.address(variables)
    told: dict[str, object] = {"num_processes": int(count), "process_id": int(number)}
    return told if address is None else told | {"coordinator_address": address}


def _check(config: EngineConfig, place: Mapping[str, object]) -> None:
    for name in _FIELDS:
        if name not in place:
            raise ConfigError(
                f"num_processes is {place['num_processes']}, but {name} is missing: set it, or name the cluster that "
                f"says it (slurm, ompi, mpi4py, k8s, lws)"
            )
    count, number = int(str(place["num_processes"])), int(str(place["process_id"]))
    if number >= count:
        raise ConfigError(f"process_id is {number}, but num_processes is {count}: accepted is 0 to {count - 1}")
    split_address(str(place["coordinator_address"]))
    _check_devices(config, count)
    if config.num_engines > 1:
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size}, but num_processes is {count}: engines side by side "
            "are for one process; start several groups instead, or set enable_dp_attention"
        )


def _check_devices(config: EngineConfig, count: int) -> None:
    """Each process must have equally many devices: whole stages, or a part of one stage."""
    tp, stages, batches = config.tensor_parallel_size, config.pipeline_parallel_size, config.num_batches
    ending = "set cluster to off where each process is to have an engine of its own"
    if batches > 1:
        if tp * batches % count:
            raise ConfigError(
                f"data_parallel_size is {batches} and tensor_parallel_size is {tp}, and {count} processes share the "
                f"model: accepted are products of the two that are multiples of {count}; {ending}"
            )
        return
    if stages == 1 and tp % count:
        raise ConfigError(
            f"tensor_parallel_size is {tp}, and {count} processes share the model: accepted are multiples of {count}; "
            f"{ending}"
        )
    if (stages % count and count % stages) or tp * stages % count:
        fitting = [n for n in range(2, tp * stages + 1) if tp * stages % n == 0 and not (stages % n and n % stages)]
        accepted = " or ".join(map(str, fitting))
        raise ConfigError(
            f"pipeline_parallel_size is {stages} and tensor_parallel_size is {tp}, and {count} processes share the "
            f"model: each is to have whole stages, or an equal part of one; accepted are {accepted} "
            f"processes; {ending}"
        )


def split_address(address: str) -> tuple[str, int]:
    """('10.0.0.1', 8476) of '10.0.0.1:8476', and ('::1', 8476) of '[::1]:8476'. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"coordinator_address is {address!r}: accepted is a host and a port, as 10.0.0.1:8476")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _port_of(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
