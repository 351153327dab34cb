"""The one place that touches what differs between JAX releases or is private to JAX (0.10 … 0.12)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar


def prepare_virtual_devices() -> None:
    """Give XLA's CPU thread pool room for virtual devices; to be called before jax is imported.

    Several of them on few cores deadlock in a collective unless the pool, sized by NPROC, has twice as many threads.
    """
    count = int(os.environ.get("JAX_NUM_CPU_DEVICES") or 0)
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    count = max(count, int(forced.group(1)) if forced else 0)
    if count > 1:
        os.environ.setdefault("NPROC", str(max(16, 2 * count)))


prepare_virtual_devices()
import jaxllm.threads  # noqa: E402, F401  before jax, so that what it does at exit comes after what JAX does

logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # else it tells of every platform that is not there
logging.getLogger("jax._src.distributed").setLevel(logging.WARNING)  # else it tells of every step of joining others

import jax  # noqa: E402
from jax._src import compiler, core, distributed, hardware_utils, xla_bridge  # noqa: E402
from jax._src import config as jax_config  # noqa: E402
from jax._src.clusters import ClusterEnv  # noqa: E402
from jax.experimental import serialize_executable  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402
from jaxlib import xla_client  # noqa: E402

from jaxllm.errors import ConfigError  # noqa: E402

logger = logging.getLogger(__name__)


def check_cpu_targets_at_once() -> None:
    """Let XLA check FFI targets of CPUs as they are registered, with JaxRuntimeError, and not as the backend starts."""
    xla_client.register_custom_call_handler("cpu", xla_client._xla.register_custom_call_target)


OWN_SETTINGS: dict[str, Any] = {
    "jax_check_tracer_leaks": False, "jax_debug_infs": False, "jax_debug_key_reuse": False, "jax_debug_nans": False,
    "jax_default_device": None, "jax_default_matmul_precision": None, "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": False, "jax_enable_checks": False, "jax_enable_custom_prng": False, "jax_enable_x64": False,
    "jax_no_tracing": False, "jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow",
    "jax_random_seed_offset": 0, "jax_softmax_custom_jvp": False, "jax_threefry_partitionable": True,
    "jax_transfer_guard_device_to_device": "allow", "jax_transfer_guard_device_to_host": "allow",
    "jax_transfer_guard_host_to_device": "allow",
}  # fmt: skip
"""What an engine is built, traced and run under, whatever the program around it has told JAX."""

P = ParamSpec("P")
R = TypeVar("R")


def under_own_settings(function: Callable[P, R]) -> Callable[P, R]:
    """`function` under OWN_SETTINGS and without the program's mesh, in this thread while it runs."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            for name, value in OWN_SETTINGS.items():
                stack.enter_context(jax_config.config_states[name](value))
            if core.trace_state_clean():  # a mesh cannot be changed while something is traced
                stack.enter_context(jax.set_mesh(None))
            return function(*args, **kwargs)

    return call


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...], devices: Any = None) -> Mesh:
    """A mesh whose axes are all Auto (jax.make_mesh defaults to Explicit)."""
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def enable_compile_cache(directory: Path) -> None:
    """Keep every compiled executable under `directory`, however small or quick to compile."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_cache() -> Path | None:
    """Where compiled executables are kept, if anywhere."""
    directory = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return Path(directory) if directory else None


def compile_options_digest(devices: list[jax.Device]) -> str:
    """Of what XLA is told by flags, variables and JAX's configuration, but for where its caches are."""
    options = compiler.get_compile_options(num_replicas=1, num_partitions=len(devices), backend=devices[0].client)
    debug = options.executable_build_options.debug_options
    for name in ("xla_gpu_kernel_cache_file", "xla_gpu_per_fusion_autotune_cache_dir"):
        setattr(debug, name, "")
    return hashlib.sha256(options.SerializeAsString()).hexdigest()[:16]


def save_executable(compiled: jax.stages.Compiled) -> tuple[bytes, Any]:
    """An executable as bytes, and the tree of what it returns. The bytes are code to whoever loads them."""
    payload, _, out_tree = serialize_executable.serialize(compiled)
    return payload, out_tree


def load_executable(payload: bytes, in_tree: Any, out_tree: Any, devices: list[jax.Device]) -> Any:
    """What `save_executable` made bytes of, ready to be called on these devices."""
    load = serialize_executable.deserialize_and_load
    return load(payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices)


_of_thread = threading.local()


def _note_event(event: str, **details: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _of_thread.from_cache = True


jax.monitoring.register_event_listener(_note_event)


def compile_to_save(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> tuple[Any, bool]:
    """`compile_lowered` without XLA's cache, whose entries lack code that saving needs, and whether it can be saved."""
    with jax_config.persistent_cache_min_compile_time_secs(math.inf):
        return compile_noting_cache(lowered, options)


def compile_noting_cache(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> tuple[Any, bool]:
    """`compile_lowered`, and whether it was compiled anew, not found in XLA's cache."""
    _of_thread.from_cache = False
    compiled = compile_lowered(lowered, options)
    return compiled, not _of_thread.from_cache


_UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w+)'")
_unknown_options: set[str] = set()
"""Compiler options that this XLA has refused; each has been logged once."""


def compile_lowered(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """Compile, leaving out each option that this release of XLA does not know, with one line in the log for each."""
    while True:
        known = {name: value for name, value in (options or {}).items() if name not in _unknown_options}
        try:
            return lowered.compile(compiler_options=known or None)
        except jax.errors.JaxRuntimeError as error:
            refused = _UNKNOWN_OPTION.search(str(error))
            if refused is None or refused[1] not in known:
                raise
            _unknown_options.add(refused[1])
            logger.warning("the XLA of JAX %s has no compiler option %s: left out", jax.__version__, refused[1])


def start_backends() -> tuple[list[jax.Device], list[str]]:
    """The default platform's devices, and what JAX said of platforms that it could not start; it is not logged."""
    log, heard = logging.getLogger(xla_bridge.__name__), BufferingHandler(capacity=10_000)
    heard.setLevel(logging.WARNING)
    passed_on, log.propagate = log.propagate, False
    log.addHandler(heard)
    devices: list[jax.Device] = []
    gave_up: list[str] = []
    try:
        devices = jax.devices()
    except RuntimeError as error:
        gave_up.append(str(error))
    except AssertionError:  # JAX skips "cuda" where it sees no device of NVIDIA's, and is left with no platform
        gave_up.append("no NVIDIA GPU is here, or none that this process may see; unset JAX_PLATFORMS, or name cpu")
    finally:
        log.removeHandler(heard)
        log.propagate = passed_on
    return devices, [*map(logging.Formatter("%(message)s").format, heard.buffer), *gave_up]


def backends_run() -> bool:
    return xla_bridge.backends_are_initialized()


def chosen_platforms() -> str:
    return jax.config.values["jax_platforms"] or ""


def nvidia_gpu_is_here() -> bool:
    """Whether the system has devices of NVIDIA's driver, by JAX's own test."""
    return hardware_utils.has_visible_nvidia_gpu()


def other_accelerators() -> bool:
    """Whether JAX may find devices that are neither a CPU nor NVIDIA's: TPU chips, or those of another plugin."""
    plugins = [plugin.name for plugin in entry_points(group="jax_plugins")]
    return bool(hardware_utils.num_available_tpu_chips_and_device_id()[0]) or any(
        "cuda" not in name for name in plugins
    )


def join_processes(
    address: str,
    number: int,
    count: int,
    devices: list[int],
    *,
    shares_steps: bool,
    heartbeat_seconds: int,
    meeting_seconds: int,
) -> None:
    """Make this process the `number`th of `count` for JAX. Raises RuntimeError where the coordinator is not reached.

    SIGTERM stays the program's own. The compile cache works in every process and has the same keys in all: JAX would
    let the first alone write. On a CPU each has as many virtual devices as it is to use.

    With `shares_steps` processes of CPUs run one step at a time: two that do not wait for each other could begin their
    collectives in another order than in the next process, which ends both.
    """
    if shares_steps:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_num_cpu_devices", len(devices))
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        count,
        number,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=meeting_seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=LEAVING_SECONDS,
    )
    if number == 0:
        distributed.global_state.client.key_value_set("jaxllm", "")  # type: ignore[union-attr]
    alone = SimpleNamespace(process_id=0, client=None)
    compiler.distributed = SimpleNamespace(global_state=alone)  # type: ignore[assignment]


def coordinator_answers(seconds: float) -> bool:
    """Whether JAX's coordinator answers: in C++, also while process 0 loads a library and no thread of Python runs."""
    client = distributed.global_state.client
    try:
        return client is not None and client.blocking_key_value_get("jaxllm", int(seconds * 1000)) == ""
    except jax.errors.JaxRuntimeError:
        return False


LEAVING_SECONDS = 3
"""How long a process that leaves waits for the others to leave too."""


def leave_processes() -> None:
    """Leave the others, where this process has joined any, once they do so too; what JAX says of it is of no use."""
    try:
        jax.distributed.shutdown()
    except RuntimeError as error:
        logger.debug("JAX's coordinator was left out of order: %s", error)


def copies_between_processes() -> bool:
    """Whether `jax.device_put` reaches devices of other processes: those of GPUs, by NCCL, and not those of CPUs."""
    return bool(getattr(jax.local_devices()[0].client, "supports_cross_host_transfers", False))


def transfer_server(host: str) -> Any:
    """A server at this address of the machine, from which other processes take arrays of this one."""
    from jax.experimental import transfer

    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    return transfer.start_transfer_server(jax.local_devices()[0].client, address, [address])


def cluster_place(name: str) -> tuple[str, int, int]:
    """Where process 0 is, how many processes there are, and which this is. Raises ConfigError: that is not known."""
    package = {"mpi4py": "mpi4py", "k8s": "kubernetes"}[name]
    if find_spec(package) is None:
        raise ConfigError(f"cluster is {name!r}, which needs the package {package}: pip install {package}")
    cluster = next(one for one in ClusterEnv._cluster_types if one.name == name)
    if not cluster.is_env_present():
        raise ConfigError(f"cluster is {name!r}, but this process was not started by it")
    try:
        address = cluster.get_coordinator_address(timeout_secs=60, override_coordinator_port=None)
        return address, cluster.get_process_count(), cluster.get_process_id()
    except (RuntimeError, KeyError, OSError) as error:
        raise ConfigError(f"cluster is {name!r}, which does not say where this process is: {error}") from None


_MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_DEFAULT_SHARE = 0.75
SPARE_SHARE = 0.05
"""For what XLA's allocator loses between buffers."""


def share_device_memory(share: float) -> None:
    """Let this process take `share` of an accelerator's memory and a little more, before its backend starts."""
    if not any(name in os.environ for name in _MEMORY_SHARES) and not xla_bridge.backends_are_initialized():
        os.environ[_MEMORY_SHARES[0]] = f"{min(share + SPARE_SHARE, 1):.2f}"


def keep_to_cores(count: int) -> None:
    """Let XLA's pools have `count` threads, where no variable says how many; as above, before its backend starts."""
    if "NPROC" not in os.environ and not xla_bridge.backends_are_initialized():
        os.environ["NPROC"] = str(count)


def device_memory(device: jax.Device) -> tuple[int, int] | None:
    """(bytes this process may use, all bytes it could have asked for) of `device`; None if it does not say (CPU)."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    share = next((float(os.environ[name]) for name in _MEMORY_SHARES if name in os.environ), _DEFAULT_SHARE)
    return int(stats["bytes_limit"]), int(stats["bytes_limit"] / share)


def triton_compiler_params(num_warps: int, num_stages: int) -> Any:
    """Pallas compiler parameters for the Triton lowering (deprecated from jax 0.11, present in 0.12)."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def triton_load(ref: Any, mask: jax.Array, other: Any) -> jax.Array:
    """A masked load from an indexed reference; masked-off elements read as `other`."""
    from jax.experimental.pallas import triton

    return triton.load(ref, mask=mask, other=other)


def triton_store(ref: Any, value: jax.Array, mask: jax.Array) -> None:
    from jax.experimental.pallas import triton

    triton.store(ref, value, mask=mask)


def triton_elementwise_asm(
    asm: str, arguments: Sequence[jax.Array], *, constraints: str, pack: int, dtype: Any
) -> jax.Array:
    """PTX that makes one array of others of its shape, `pack` elements at a time."""
    from jax.experimental.pallas import triton

    result = jax.ShapeDtypeStruct(arguments[0].shape, dtype)
    (made,) = triton.elementwise_inline_asm(
        asm, args=list(arguments), constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )
    return made
