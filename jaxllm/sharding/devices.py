"""The devices that JAX runs on, over one process or several, and the reason where it does not run on the GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import jax

from jaxllm import compat
from jaxllm.config.values import format_bytes
from jaxllm.errors import ConfigError, one_line
from jaxllm.sharding import nvidia

logger = logging.getLogger(__name__)

ON_THE_CPU = "or set JAX_PLATFORMS=cpu to run on the CPU"
_NO_MEMORY = ("OUT_OF_MEMORY", "RESOURCE_EXHAUSTED", "out of memory", "no supported devices found")

HEARTBEAT_SECONDS = 15  # JAX ends a process whose coordinator, or another process, has been silent for that long
MEETING_SECONDS = 120
CPU_THREADS = 16  # of XLA's pool on a CPU: a collective waits in one of them for the other processes


def find_devices() -> Sequence[jax.Device]:
    """JAX's devices, the accelerator's where there is one.

    Raises ConfigError if there is an NVIDIA GPU, JAX's plugin cannot run on it, and no other platform was chosen; or if
    the platform that JAX_PLATFORMS names cannot be started. Without a plugin there is a warning.
    """
    devices, complaints = compat.start_backends()
    chosen = compat.chosen_platforms()
    wanted = "cuda" in chosen or "gpu" in chosen or not chosen
    lacks_gpu = not devices or devices[0].platform == "cpu"
    if lacks_gpu and wanted and nvidia_gpu_is_here() and not (devices and nvidia.hidden()):
        if not devices or nvidia.installed_cuda() is not None:
            raise ConfigError(why_unused(complaints))
        logger.warning("running on the CPU: %s", why_unused(complaints))
    if not devices:
        raise ConfigError(f"JAX cannot start{f' JAX_PLATFORMS={chosen}' if chosen else ''}: {_last_line(complaints)}")
    for complaint in complaints:
        logger.warning("%s", _last_line([complaint]))
    return devices


def expected_platform() -> str | None:
    """'cpu' or 'gpu', which `find_devices` will find; None where only JAX's backends could tell.

    The backends are not started: they would take memory of the devices, or wait for their user.
    """
    chosen = compat.chosen_platforms().partition(",")[0]
    if chosen == "cpu":
        return "cpu"
    if chosen in ("", "cuda", "gpu") and nvidia.installed_cuda() and not nvidia.hidden() and nvidia_gpu_is_here():
        return "gpu"
    return None if chosen or compat.other_accelerators() else "cpu"


def nvidia_gpu_is_here() -> bool:
    """Whether NVIDIA's driver runs; a device file alone may be another maker's, as under Windows."""
    return compat.nvidia_gpu_is_here() and nvidia.driver_version() is not None


def why_unused(complaints: Sequence[str]) -> str:
    """The reason why JAX does not run on the GPU that is here, and what would help."""
    driver, cuda, said = nvidia.driver_version(), nvidia.installed_cuda(), "\n".join(complaints)
    names = ", ".join(dict.fromkeys(card.name for card in nvidia.cards()))
    about = ", ".join(filter(None, [names, driver and f"driver {driver}"]))
    here = f"an NVIDIA GPU is here{f' ({about})' if about else ''}"
    major = int(driver.split(".")[0]) if driver else None
    fitting = [f"cuda{cuda}" for cuda, least in nvidia.NEEDED_DRIVER.items() if major is None or major >= least]
    oldest = min(nvidia.NEEDED_DRIVER.values())
    if not fitting:
        return f"{here}, but its driver is too old: install {oldest} or newer, {ON_THE_CPU}"
    if cuda is None:
        return f"{here}, but JAX has no CUDA plugin: pip install '.[{fitting[0]}]', {ON_THE_CPU}"
    if nvidia.hidden():
        return f"{here}, but CUDA_VISIBLE_DEVICES hides it: name one there, {ON_THE_CPU}"
    if f"cuda{cuda}" not in fitting or "driver version is insufficient" in said:
        older = f"pip install '.[{fitting[0]}]' in its place, " if f"cuda{cuda}" not in fitting else ""
        least = nvidia.NEEDED_DRIVER[cuda]
        return f"{here}, but CUDA {cuda} needs driver {least} or newer: install that, {older}{ON_THE_CPU}"
    if any(words in said for words in _NO_MEMORY):
        users = nvidia.occupants()
        return f"{here}, but it has no memory left{f': {users}' if users else ''}; end what runs on it, {ON_THE_CPU}"
    return f"{here}, but JAX could not start it: {_last_line(complaints)}; mend that, {ON_THE_CPU}"


def check_free_memory(count: int, utilization: float) -> None:
    """Raises ConfigError if the first `count` GPUs lack the memory that will be planned with; run before JAX starts."""
    if compat.chosen_platforms() == "cpu" or not compat.nvidia_gpu_is_here() or compat.backends_run():
        return
    for card in nvidia.cards()[:count] if nvidia.installed_cuda() else []:
        if card.free < card.total * utilization:
            users, possible = nvidia.occupants(), int(100 * card.free / card.total) / 100
            raise ConfigError(
                f"gpu_memory_utilization is {utilization:g}, {format_bytes(int(card.total * utilization))} of the "
                f"{card.name}'s {format_bytes(card.total)}, but {format_bytes(card.free)} are free"
                f"{f', for others run on it: {users}' if users else ''}; "
                + (f"end them or accept {possible:g}" if possible else "end what runs on it")
            )


def no_room(wanted: int, utilization: float) -> str:
    """The message where the device refused memory that the plan counted on."""
    users = nvidia.occupants() if nvidia_gpu_is_here() else ""
    others = f"; these run on it: {users}" if users else ""
    return (
        f"the device refused memory: {format_bytes(wanted)} were planned with gpu_memory_utilization {utilization:g}"
        f"{others}; lower it, kv_cache_memory or max_num_batched_tokens"
    )


def _last_line(complaints: Sequence[str]) -> str:
    lines = [line for complaint in complaints for line in complaint.splitlines() if line.strip()]
    return one_line(lines[-1] if lines else "it did not say why")


def join_processes(address: str, number: int, count: int, devices: list[int], shares_steps: bool) -> None:
    """Make this process one of several for JAX; its backends must not have started. Returns when all have come.

    `devices` are those of its machine that it uses, see `local_devices`. With `shares_steps` several processes have
    devices of one mesh. Raises ConfigError if JAX has started already, or its coordinator cannot be reached.
    """
    if compat.backends_run():
        raise ConfigError(
            f"num_processes is {count}, but JAX has started in this process: make the engine before you compute"
        )
    if expected_platform() == "cpu":
        os.environ.setdefault("NPROC", str(CPU_THREADS))
    seconds = {"heartbeat_seconds": HEARTBEAT_SECONDS, "meeting_seconds": MEETING_SECONDS}
    try:
        compat.join_processes(address, number, count, devices, shares_steps=shares_steps, **seconds)
    except RuntimeError as error:
        raise ConfigError(f"JAX's coordinator at {address} cannot be used: {one_line(error)}") from None


def local_devices(each: int, place: int, neighbours: int) -> list[int]:
    """The `each` devices of the `place`th process on its machine; the first ones if it sees only its own GPUs."""
    cards = len(nvidia.cards()) if nvidia.installed_cuda() is not None else 0
    first = each * place if cards >= each * neighbours else 0
    return list(range(first, first + each))
