"""The devices that JAX runs on, and one line that says why where it does not run on the GPU that is here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax

from jaxllm import compat
from jaxllm.config.values import format_bytes
from jaxllm.errors import ConfigError, one_line
from jaxllm.sharding import nvidia

logger = logging.getLogger(__name__)

ON_THE_CPU = "or set JAX_PLATFORMS=cpu to run on the CPU"
_NO_MEMORY = ("OUT_OF_MEMORY", "RESOURCE_EXHAUSTED", "out of memory", "no supported devices found")


def find_devices() -> Sequence[jax.Device]:
    """JAX's devices, the accelerator's where there is one.

    Raises:
        ConfigError: there is an NVIDIA GPU, JAX's plugin cannot run on it, and nobody chose another platform; or the
            platform that JAX_PLATFORMS names cannot be started. Without a plugin there is a warning.
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
    """'cpu' or 'gpu', what `find_devices` is going to find; None where only JAX's backends could tell.

    Those are not started: they would take memory of the devices, or wait for who has them.
    """
    chosen = compat.chosen_platforms().partition(",")[0]
    if chosen == "cpu":
        return "cpu"
    has_plugin = nvidia.installed_cuda() is not None and not nvidia.hidden()
    if chosen in ("", "cuda", "gpu") and has_plugin and nvidia_gpu_is_here():
        return "gpu"
    return None if chosen or compat.other_accelerators() else "cpu"


def nvidia_gpu_is_here() -> bool:
    """Whether NVIDIA's driver runs; a file of a device alone may be another maker's, as under Windows."""
    return compat.nvidia_gpu_is_here() and nvidia.driver_version() is not None


def why_unused(complaints: Sequence[str]) -> str:
    """Why JAX does not run on the GPU that is here, by what is installed and what JAX said, and what would help."""
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
    """Before the backend starts: whether the first `count` GPUs have what is to be planned with.

    Raises:
        ConfigError: other processes take too much; the line says which, where that can be seen.
    """
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
    """What to say where the device refused memory that the plan counted on."""
    users = nvidia.occupants() if nvidia_gpu_is_here() else ""
    others = f"; these run on it: {users}" if users else ""
    return (
        f"the device refused memory: {format_bytes(wanted)} were planned with gpu_memory_utilization {utilization:g}"
        f"{others}; lower it, kv_cache_memory or max_num_batched_tokens"
    )


def _last_line(complaints: Sequence[str]) -> str:
    lines = [line for complaint in complaints for line in complaint.splitlines() if line.strip()]
    return one_line(lines[-1] if lines else "it did not say why")
