"""From a config to a running engine core: resolve, plan, load and compile side by side."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxllm import compat, cpu_kernels, machine
from jaxllm.config import EngineConfig, format_bytes, part_of
from jaxllm.cpu_kernels.huge_pages import use_huge_pages
from jaxllm.engine.core import EngineCore
from jaxllm.engine.device.compiling_process import CompilingProcess
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.executables import Executables
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.device.saved import SavedExecutables
from jaxllm.engine.device.step import StepFunctions
from jaxllm.engine.messages import EngineInfo
from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.start.checkpoint import open_model
from jaxllm.engine.start.host_memory import check_host_memory
from jaxllm.engine.start.manifest import step_manifest
from jaxllm.engine.start.options import wants_cpu_kernels
from jaxllm.engine.start.plan import Blueprint, make_blueprint
from jaxllm.engine.start.platform import Platform, prepare_backend
from jaxllm.engine.start.tokenizer import resolve_tokenizer
from jaxllm.engine.state_cache import StateCache
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.folders import unwritable
from jaxllm.models.importance import with_importance
from jaxllm.models.tasks import read_tasks
from jaxllm.progress import Progress, progress_bar, tell
from jaxllm.requests.sampling import SamplingDefaults
from jaxllm.sharding.devices import check_free_memory, no_room
from jaxllm.sharding.mesh import build_mesh
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import dummy_parameters, load_parameters
from jaxllm.weights.read_ahead import reading_ahead
from jaxllm.weights.source import resolve_model

logger = logging.getLogger(__name__)

LAYERS_WORTH_A_PROCESS = 8


@compat.under_own_settings
def build_core(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    """Everything up to the point where requests can run; the log says what took how long.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: one line each.
    """
    clock = Clock()
    tell(f"Finding {config.model}")
    path = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    clock.lap("resolve")
    if config.compile_cache_dir is not None:
        if (reason := unwritable(config.compile_cache_dir)) is None:
            compat.enable_compile_cache(config.compile_cache_dir)
        else:
            place = config.compile_cache_dir
            logger.warning("%s: %s; each start compiles; set compile_cache_dir to another folder", place, reason)
    with nullcontext() if config.load_format == "dummy" else reading_ahead(path):
        return _build(config, path, clock)


def _build(config: EngineConfig, path: Path, clock: Clock) -> tuple[EngineCore, EngineInfo]:
    checkpoint = open_model(config, path)
    tell("Reading the tokenizer")
    tokenizer = resolve_tokenizer(config)
    clock.lap("tokenizer")
    check_free_memory(config.tensor_parallel_size, config.gpu_memory_utilization)
    prepare_backend(config.gpu_memory_utilization)
    tell("Looking at the devices and the kernels")
    mesh = build_mesh(config.tensor_parallel_size)
    platform = Platform.of(mesh.devices.flat[0])
    if wants_cpu_kernels(config, platform):
        cpu_kernels.available()
        clock.lap("C++ kernels")
    blueprint = make_blueprint(config, checkpoint, platform)
    if platform.memory is not None:
        logger.info(device_line(mesh, platform.memory, blueprint.plan.planned_bytes))
    for line in machine.limits():
        logger.info(line)
    check_host_memory(blueprint.plan, platform)
    for line in blueprint.plan.summary().splitlines():
        logger.info(line)
    for note in blueprint.plan.notes:
        logger.warning(note)
    functions = StepFunctions(blueprint.model, blueprint.params, mesh, blueprint.sizes)
    saved = saved_executables(config, blueprint, mesh)
    helper = _helper(config, blueprint, saved)
    executables = Executables(functions, blueprint.plan.buckets, eager=config.enforce_eager, saved=saved, helper=helper)
    clock.lap("plan")
    executables.begin()
    try:
        return _assemble(config, checkpoint, tokenizer, mesh, blueprint, functions, executables, clock)
    except BaseException as error:
        executables.close()
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            raise ConfigError(no_room(blueprint.plan.planned_bytes, config.gpu_memory_utilization)) from error
        raise


def saved_executables(config: EngineConfig, blueprint: Blueprint, mesh: Mesh) -> SavedExecutables | None:
    """Those that were made ahead, and those of earlier starts with all the same, beside XLA's own cache.

    Raises:
        ConfigError: config.executables is no folder.
    """
    cache, shipped = compat.compile_cache(), config.executables
    if cache is None and shipped is None:
        return None
    root = None if cache is None else cache / "executables"
    saved = SavedExecutables(root, step_manifest(blueprint, mesh), mesh.devices.flatten().tolist(), shipped)
    saved.touch()
    if shipped is not None:
        if not shipped.is_dir():
            raise ConfigError(f"executables is {str(shipped)!r}, which is no folder; `jaxllm compile` makes one")
        if difference := saved.difference(shipped):
            logger.warning("the executables in %s are not for this engine, which compiles: %s", shipped, difference)
    return saved


def _helper(config: EngineConfig, blueprint: Blueprint, saved: SavedExecutables | None) -> CompilingProcess | None:
    """A process that compiles what nobody waits for: on a CPU, which two processes can compile for at once, and where
    there is so much to trace that it is worth another start of Python."""
    large = blueprint.spec.config.num_layers >= LAYERS_WORTH_A_PROCESS
    if saved is None or saved.root is None or blueprint.plan.platform != "cpu" or not large:
        return None
    plan = blueprint.plan  # not what is free when the process begins
    sizes = {"kv_cache_memory": plan.kv_bytes, "state_cache_memory": plan.state_cache_bytes}
    settings = part_of(config, EngineConfig).model_copy(update=sizes)  # a server's has more, which that process refuses
    return CompilingProcess(settings.model_dump_json(), str(saved.root), saved.name)


def device_line(mesh: Mesh, memory: int, planned: int) -> str:
    """'1 NVIDIA H100 80GB HBM3 of 79.1 GiB: 71.2 GiB planned'."""
    kind = mesh.devices.flat[0].device_kind
    return f"{mesh.size} {kind} of {format_bytes(memory)}: {format_bytes(planned)} planned"


def _assemble(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    mesh: Mesh,
    blueprint: Blueprint,
    functions: StepFunctions,
    executables: Executables,
    clock: Clock,
) -> tuple[EngineCore, EngineInfo]:
    """What goes on while the first executables are compiled, and the core that has them."""
    grammars = None
    if tokenizer is not None:
        from jaxllm.engine.grammar import Grammars

        grammars = Grammars(tokenizer.backend, blueprint.spec.config.vocab_size, tokenizer.eos_token_ids)
        if config.engine_process:  # others' streams would stand still while the first grammar reads the vocabulary
            grammars.prepare()
            clock.lap("vocabulary")
    with progress_bar(f"Loading {config.model}") as on_progress:
        weights = functions.pack_weights(_load(config, checkpoint, blueprint, mesh, on_progress))
    clock.lap("load")
    eos = tokenizer.eos_token_ids if tokenizer else eos_token_ids(checkpoint)
    vocab = blueprint.spec.config.vocab_size
    outputs = blueprint.spec.config.num_outputs
    runner = Runner(Device(executables, weights, functions.new_state()), blueprint.sizes, outputs, eos)
    if mesh.devices.flat[0].platform == "cpu":
        tell("Gathering the weights in large pages of memory")
        use_huge_pages(weights)
        clock.lap("large pages")
    with progress_bar("Compiling what the first request needs") as on_progress:
        executables.wait_until_covered(on_progress)
    clock.lap("compile")
    plan = blueprint.plan
    states = StateCache(plan.num_states - plan.num_snapshots, plan.num_snapshots) if plan.num_snapshots else None
    shares = config.enable_prefix_caching and (states is not None or not blueprint.sizes.has_states)
    pool = PagePool(plan.num_pages, plan.page_size, shares)
    scheduler = Scheduler(
        pool,
        plan.max_num_seqs,
        plan.max_num_batched_tokens,
        plan.max_model_len,
        blueprint.spec.config.length_rule,
        plan.decode_steps,
        states,
        plan.num_drafts,
    )
    core = EngineCore(scheduler, pool, runner, tokenizer.backend if tokenizer else None, eos, config.seed, grammars)
    info = EngineInfo(
        model_name=config.model,
        vocab_size=vocab,
        max_model_len=plan.max_model_len,
        eos_token_ids=eos,
        num_pages=plan.num_pages - 1,
        page_size=plan.page_size,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        kv_cache_memory=plan.kv_bytes,
        state_cache_memory=plan.state_cache_bytes,
        num_parameters=plan.num_parameters,
        hidden_size=blueprint.spec.config.hidden_size,
        tasks=read_tasks(checkpoint),
        default_sampling=_sampling_defaults(checkpoint),
        max_logprobs=config.max_logprobs,
    )
    checkpoint.close()
    logger.info("started: %s", clock)
    executables.announce_end()
    return core, info


class Clock:
    """Laps of the start-up, for the log."""

    def __init__(self) -> None:
        self._laps: list[str] = []
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now = time.perf_counter()
        self._laps.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._laps)


def _sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    try:
        return msgspec.convert(checkpoint.generation_config, SamplingDefaults, strict=False)  # 64.0 means 64
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the generation config of {checkpoint.path}: {error}") from None


def _load(
    config: EngineConfig, checkpoint: Checkpoint, blueprint: Blueprint, mesh: Mesh, on_progress: Progress | None
) -> tuple[Any, ...]:
    if config.load_format == "dummy":
        return dummy_parameters(blueprint.params, mesh, config.seed)
    spec = blueprint.spec
    weighed = with_importance(checkpoint, spec, config.imatrix)
    return load_parameters(weighed, blueprint.params, spec.names, mesh, ignored=spec.ignored, on_progress=on_progress)


def eos_token_ids(checkpoint: Checkpoint) -> list[int]:
    """End-of-sequence ids as the checkpoint's configs give them, where no tokenizer is loaded."""
    sources = (checkpoint.generation_config, checkpoint.config)
    keys = ("eos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids: list[int] = []
    for value in (source[key] for source in sources for key in keys if source.get(key) is not None):
        ids += value if isinstance(value, list) else [value]
    return list(dict.fromkeys(ids))
