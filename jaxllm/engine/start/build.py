"""From a config to a running engine core: resolve, plan, load and compile side by side."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxllm import compat, cpu_kernels, machine
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.cpu_kernels.tiles import use_huge_pages
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.device_state import Kept
from jaxllm.engine.core.encoder import EncoderRunner, EncoderScheduler
from jaxllm.engine.core.feature import Surroundings
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.runner import Runner
from jaxllm.engine.core.saved import make_room
from jaxllm.engine.core.scheduler import Scheduler
from jaxllm.engine.features.adapters.adapters import AdapterStore
from jaxllm.engine.features.adapters.reading import AdapterReader, BaseWeights
from jaxllm.engine.features.logits import processors_of
from jaxllm.engine.features.offload.offload import OffloadFeature, transfer_of
from jaxllm.engine.messages import EngineInfo, MemoryRoom
from jaxllm.engine.scale.data_parallel import Core, DataParallelCore, RankDevice, Ranks
from jaxllm.engine.scale.kv_events import EventPublisher, KVEvents
from jaxllm.engine.scale.lockstep.leader import Leader
from jaxllm.engine.scale.lockstep.meeting import Group
from jaxllm.engine.start.agreement import agree_on_memory, agree_on_plan, join_group, open_exchange
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.draft import check_draft_vocabulary, load_draft
from jaxllm.engine.start.foresight import foresee
from jaxllm.engine.start.leave import die
from jaxllm.engine.start.new_weights import WeightReader
from jaxllm.engine.start.offload import check_host_memory, check_offload, page_tiers
from jaxllm.engine.start.options import wants_cpu_kernels
from jaxllm.engine.start.plan import Blueprint
from jaxllm.engine.start.platform import Platform, prepare_backend
from jaxllm.engine.start.prepared import (
    Clock,
    Prepared,
    PreparedStage,
    Weights,
    new_device,
    prepare_stages,
    step_manifest,
)
from jaxllm.engine.start.tokenizer import open_model, resolve_tokenizer
from jaxllm.engine.start.tower import load_tower
from jaxllm.engine.start.weight_cache import QUICK, WeightCache, identity, last_kept
from jaxllm.errors import CheckpointError, ConfigError, one_line
from jaxllm.folders import unwritable
from jaxllm.models.registry import LiveModel, ModelParts, adapter_names, with_importance
from jaxllm.models.tasks import read_tasks
from jaxllm.progress import Progress, progress_bar, tell
from jaxllm.requests.logits_processors import LogitsProcessor
from jaxllm.requests.sampling import SamplingDefaults
from jaxllm.sharding.devices import check_free_memory, no_room
from jaxllm.sharding.mesh import build_meshes, local_device
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.folder import reading_ahead
from jaxllm.weights.loader import ParamSpec, dummy_parameters, load_parameters
from jaxllm.weights.source import resolve_model

if TYPE_CHECKING:
    from jaxllm.engine.features.grammar.grammar import Grammars


logger = logging.getLogger(__name__)


@compat.under_own_settings
def build_core(
    config: EngineConfig,
    room: MemoryRoom | None = None,
    kept: Kept | None = None,
    on_group: Callable[[Group], None] = lambda group: None,
    on_broken: Callable[[str], None] = die,
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[Core, EngineInfo]:
    """Everything up to the point where requests can run; the log says what took how long.

    With `room` the engine is planned first, and asks for its place before it touches a device. Weights that another
    engine has left in `kept` are taken from there. `on_group` is told of the group that this process leads, if it
    leads one, and `on_broken` why that is over, in any thread: it ends the process. `processors` are functions of
    logits that requests may use.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: one line each.
    """
    machine.use_threads(config.threads)
    clock = Clock()
    path = find_model(config, clock)
    files = identity([path])
    unread = config.load_format == "dummy" or (kept is not None and kept.is_there)
    with nullcontext() if unread else reading_ahead(last_kept(config, files) or path):
        checkpoint = open_model(config, path)
        tell("Reading the tokenizer")
        tokenizer = resolve_tokenizer(config)
        if tokenizer is not None:
            check_draft_vocabulary(config, tokenizer)
        clock.lap("tokenizer")
        if room is not None:
            config, needed = foresee(config, checkpoint, room.budget)
            clock.lap("foresight")
            tell("Waiting for room")
            room.ask(needed)
            clock.lap("room")
        group = join_group(config, path, on_broken) if config.in_group else None
        if group is not None:
            on_group(group)
            clock.lap("the other processes")
        leader = None if group is None else group.leader
        with _telling_the_others(leader):
            prepared = plan_and_compile(config, checkpoint, files, group, clock, processors)
            with closing_at_failure(prepared):
                return _assemble(prepared, tokenizer, kept, leader)


@contextmanager
def _telling_the_others(leader: Leader | None) -> Iterator[None]:
    """An error that keeps process 0 from starting ends the group."""
    try:
        yield
    except BaseException as error:
        if leader is not None:
            leader.fail(f"process 0 did not start: {one_line(error)}")
        raise


def find_model(config: EngineConfig, clock: Clock) -> Path:
    """The path of the model's files; whatever is compiled from now on is kept where the config says."""
    tell(f"Finding {config.model}")
    path = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    clock.lap("resolve")
    if config.compile_cache_dir is not None:
        if (reason := unwritable(config.compile_cache_dir)) is None:
            compat.enable_compile_cache(config.compile_cache_dir)
        else:
            place = config.compile_cache_dir
            logger.warning("%s: %s; each start compiles; set compile_cache_dir to another folder", place, reason)
    return path


def plan_and_compile(
    config: EngineConfig,
    checkpoint: Checkpoint,
    files: str,
    group: Group | None,
    clock: Clock,
    processors: Sequence[LogitsProcessor] = (),
) -> Prepared:
    """Choose all sizes, in a group together with the other processes, and begin to compile."""
    here = config.num_devices // (1 if group is None else group.count)
    check_free_memory(here, config.gpu_memory_utilization)
    prepare_backend(config.gpu_memory_utilization)
    tell("Looking at the devices and the kernels")
    meshes = build_meshes(config.tensor_parallel_size, config.pipeline_parallel_size, config.num_batches)
    platform = Platform.of(local_device(meshes))
    if group is not None:
        platform = agree_on_memory(group, platform)
    if wants_cpu_kernels(config, platform):
        cpu_kernels.available()
        clock.lap("C++ kernels")
    blueprint = make_blueprint(config, checkpoint, platform)
    if platform.memory is not None:
        logger.info(device_line(meshes, platform.memory, blueprint.plan.planned_bytes))
    for line in machine.limits():
        logger.info(line)
    check_host_memory(blueprint.plan, platform)
    check_offload(config, blueprint, platform)
    for line in blueprint.plan.summary().splitlines():
        logger.info(line)
    for note in blueprint.plan.notes:
        logger.warning(note)
    exchange = open_exchange(group) if group is not None and len(meshes) > 1 else None
    stages = prepare_stages(config, blueprint, meshes, None if group is None else group.hold, processors)
    if group is not None:
        agree_on_plan(group, step_manifest(blueprint, meshes[0]))
    clock.lap("plan")
    for stage in stages:
        stage.executables.begin()
    return Prepared(config, checkpoint, blueprint, stages, meshes, exchange, clock, files)


@contextmanager
def closing_at_failure(prepared: Prepared) -> Iterator[None]:
    """Work beside a start ends with it; says what was planned where a device refuses memory."""
    try:
        yield
    except BaseException as error:
        for stage in prepared.stages:
            stage.executables.close()
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            planned = prepared.blueprint.plan.planned_bytes
            raise ConfigError(no_room(planned, prepared.config.gpu_memory_utilization)) from error
        raise


def load_weights(prepared: Prepared, kept: Kept | None = None) -> list[Weights]:
    """The weights of each stage on its devices, as steps take them."""
    config = prepared.config
    if kept is not None and kept.is_there:
        tell(f"Taking the weights of {config.model} out of memory")
        functions = [stage.functions for stage in prepared.stages]
        found = iter(kept.take([array for one in functions for array in one.packed_weights]))
        weights = [tuple(islice(found, len(one.packed_weights))) for one in functions]
    else:
        weights = []
        for stage in prepared.stages:
            cache = WeightCache.of(config, prepared.files, stage)
            mapped = None if cache is None else cache.take(stage.functions.packed_weights)
            began = time.perf_counter()
            weights.append(mapped or _pack_weights(prepared, stage))
            if cache is not None and mapped is None and time.perf_counter() - began > QUICK:
                cache.write(weights[-1])
    prepared.clock.lap("load")
    return weights


def _pack_weights(prepared: Prepared, stage: PreparedStage) -> Weights:
    config, blueprint = prepared.config, prepared.blueprint
    with progress_bar(f"Loading {_named(config, stage)}") as on_progress:
        parameters = _load(config, prepared.checkpoint, stage, blueprint.params, on_progress)
    if blueprint.draft is not None:
        with progress_bar(f"Loading {blueprint.draft.config.model}") as on_progress:
            parameters = (*parameters, *load_draft(blueprint.draft, stage.mesh, on_progress))
    if blueprint.tower is not None:
        with progress_bar(f"Loading the tower of {config.model}") as on_progress:
            tower = load_tower(config, prepared.checkpoint, blueprint.tower, stage.mesh, on_progress)
            parameters = (*parameters, *tower)
    return stage.functions.pack_weights(parameters)


def _named(config: EngineConfig, stage: PreparedStage) -> str:
    found = stage.blueprint.options.stage
    return config.model if found is None else f"{config.model}, {found}"


def gather_weights(prepared: Prepared, weights: Sequence[Weights]) -> None:
    """On a CPU, into large pages of memory."""
    if prepared.blueprint.plan.platform == "cpu":
        tell("Gathering the weights in large pages of memory")
        for own in weights:
            use_huge_pages(own)
        prepared.clock.lap("large pages")


def device_line(meshes: Sequence[Mesh], memory: int, planned: int) -> str:
    """'1 NVIDIA H100 80GB HBM3 of 79.1 GiB: 71.2 GiB planned'."""
    kind = meshes[0].devices.flat[0].device_kind
    return f"{sum(mesh.size for mesh in meshes)} {kind} of {format_bytes(memory)}: {format_bytes(planned)} planned"


def _assemble(
    prepared: Prepared, tokenizer: Tokenizer | None, kept: Kept | None, leader: Leader | None
) -> tuple[Core, EngineInfo]:
    """Load the weights while the first executables are compiled, and make the core that has both."""
    config, checkpoint, blueprint, stages, _, _, clock, _ = prepared
    functions, executables = prepared.last.functions, prepared.last.executables
    grammars = None
    encodes = blueprint.plan.buckets.encodes
    if tokenizer is not None and not encodes:
        from jaxllm.engine.features.grammar.grammar import Grammars

        grammars = Grammars(tokenizer.backend, blueprint.spec.config.vocab_size, tokenizer.eos_token_ids)
        if config.engine_process:  # others' streams would stand still while the first grammar reads the vocabulary
            grammars.prepare()
            clock.lap("vocabulary")
    weights = load_weights(prepared, kept)
    eos = tokenizer.eos_token_ids if tokenizer else eos_token_ids(checkpoint)
    device = new_device(prepared, weights, leader)
    gather_weights(prepared, weights)
    with progress_bar("Compiling what the first request needs") as on_progress:
        for stage in stages:
            stage.executables.wait_until_covered(on_progress)
    clock.lap("compile")
    if leader is not None:
        tell("Waiting until the other processes have compiled as much")
        leader.begin([] if config.enforce_eager else executables.covering_keys())
        clock.lap("the others' compile")
    core = new_core(prepared, device, tokenizer, eos, grammars)
    plan, num_batches = blueprint.plan, config.num_batches
    info = EngineInfo(
        model_name=config.model,
        vocab_size=blueprint.spec.config.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=eos,
        num_pages=num_batches * (plan.num_pages - 1),
        page_size=plan.page_size,
        max_num_seqs=num_batches * plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        kv_cache_memory=plan.kv_bytes or None,
        state_cache_memory=plan.state_cache_bytes,
        num_parameters=plan.num_parameters,
        hidden_size=blueprint.spec.config.vector_size,
        planned_memory=plan.planned_bytes,
        num_layers=blueprint.spec.config.num_layers,
        takes_vectors=not encodes and blueprint.spec.config.per_layer is None,
        most_image_rows=min(plan.image_rows, plan.max_model_len - 1),
        num_stages=len(prepared.meshes),
        kv_heads=blueprint.spec.config.kv_heads,
        tasks=read_tasks(checkpoint, encodes),
        default_sampling=_sampling_defaults(checkpoint),
        max_logprobs=config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        platform=plan.platform,
        logits_processors={} if encodes else processors_of(functions.features).declared,
        transfer=transfer_of(core.features),
    )
    checkpoint.close()
    logger.info("started: %s", clock)
    for stage in stages:
        stage.executables.announce_end()
    cache = config.compile_cache_dir
    if cache is not None and cache == compat.compile_cache():
        threading.Thread(
            target=make_room, args=(cache, config.compile_cache_max), name="make room", daemon=True
        ).start()
    return core, info


def _sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    try:
        return msgspec.convert(checkpoint.generation_config, SamplingDefaults, strict=False)  # 64.0 means 64
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the generation config of {checkpoint.path}: {error}") from None


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    stage: PreparedStage,
    every: Sequence[ParamSpec],
    on_progress: Progress | None,
) -> tuple[Any, ...]:
    """The parameters of a stage; `every` are those of all stages."""
    params, spec = stage.blueprint.params, stage.blueprint.spec
    if config.load_format == "dummy":
        return dummy_parameters(params, stage.mesh, config.seed, every)
    weighed = with_importance(checkpoint, spec, config.imatrix)
    return load_parameters(
        weighed, params, spec.names, stage.mesh, ignored=spec.ignored, every=every, on_progress=on_progress
    )


def eos_token_ids(checkpoint: Checkpoint) -> list[int]:
    """End-of-sequence ids as the checkpoint's configs give them, where no tokenizer is loaded."""
    sources = (checkpoint.generation_config, checkpoint.config)
    keys = ("eos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids: list[int] = []
    for value in (source[key] for source in sources for key in keys if source.get(key) is not None):
        ids += value if isinstance(value, list) else [value]
    return list(dict.fromkeys(ids))


KEPT_ADAPTERS = 4
"""Adapters kept in host memory for each place on the devices, where nothing is said."""


def new_core(
    prepared: Prepared, device: Device, tokenizer: Tokenizer | None, eos: list[int], grammars: Grammars | None
) -> Core:
    """A core with no requests, for the Device that `prepared` has become."""
    blueprint, functions = prepared.blueprint, prepared.last.functions
    parts = ModelParts(blueprint.spec, blueprint.options, blueprint.params, prepared.last.mesh)
    model = LiveModel(parts, lambda: functions.unpack_weights(device.weights)) if not blueprint.stages else None

    config, encodes = prepared.config, blueprint.plan.buckets.encodes
    store = adapter_store(blueprint, config, prepared.checkpoint.path)

    def core(device: Device, rank: int) -> EngineCore:
        backend = tokenizer.backend if tokenizer else None
        pool = _new_pool(prepared)
        around = Surroundings(device, blueprint.sizes, pool, backend, eos)
        features = Features(feature.attached(around) for feature in functions.features)
        scheduler = _new_scheduler(prepared, pool, features)
        if not encodes:
            features["grammar"].grammars = grammars  # type: ignore[attr-defined]
        if store is not None:
            features["adapters"].store = store  # type: ignore[attr-defined]
        if OffloadFeature.name in features:
            tiers = page_tiers(config, blueprint, prepared.last.mesh, prepared.checkpoint.path, pool)
            assert tiers is not None, "an engine that offloads was told where to"
            features[OffloadFeature.name].keep_in(tiers)  # type: ignore[attr-defined]
        events = _new_events(config, pool, rank)
        features = features if events is None else Features([*features, events])
        found = EngineCore(
            scheduler,
            pool,
            (EncoderRunner if encodes else Runner)(device, blueprint.sizes, features),
            backend,
            eos,
            config.seed + rank,
            features,
            model,
            WeightReader(config, blueprint, functions, prepared.last.mesh),
        )
        around.core = weakref.proxy(found)  # which features keep no reference to: engines end without a collection
        return found

    count = prepared.config.num_batches
    if count == 1:
        return core(device, 0)
    ranks = Ranks(device, blueprint.sizes, count)
    return DataParallelCore([core(RankDevice(device, ranks, rank), rank) for rank in range(count)], ranks)


def _new_pool(prepared: Prepared) -> PagePool:
    plan, sizes = prepared.blueprint.plan, prepared.blueprint.sizes
    shares = prepared.config.enable_prefix_caching and (plan.num_snapshots > 0 or not sizes.keeps_by_slot)
    return PagePool(plan.num_pages, plan.page_size, shares)


def _new_scheduler(prepared: Prepared, pool: PagePool, features: Features) -> Scheduler:
    blueprint, plan = prepared.blueprint, prepared.blueprint.plan
    limits = (plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len)
    if plan.buckets.encodes:
        return EncoderScheduler(pool, *limits, features=features)
    return Scheduler(pool, *limits, blueprint.spec.config.length_rule, plan.decode_steps, features)


def _new_events(config: EngineConfig, pool: PagePool, rank: int) -> KVEvents | None:
    """The feature that tells others of the pool, which has no pages yet."""
    asked = config.kv_events_config
    if asked is None or not asked.publishes or not pool.enable_prefix_caching:
        return None
    publisher = EventPublisher(asked.of_rank(rank))
    return KVEvents(pool, publisher.publish, publisher.close)


def adapter_store(blueprint: Blueprint, config: EngineConfig, path: Path) -> AdapterStore | None:
    """The store in which the engine of the model at `path` finds adapters; None if it runs without."""
    adapted, sizes = blueprint.adapted, blueprint.adapters
    if adapted is None or sizes is None:
        return None
    weights = {param.path: param for param in blueprint.params}

    def base() -> BaseWeights:
        return BaseWeights(lambda: open_model(config, path), blueprint.spec.names)

    reader = AdapterReader(adapted.tables, weights, adapter_names(blueprint.spec), sizes, base)
    return AdapterStore(reader, config.max_cpu_loras or KEPT_ADAPTERS * sizes.places)
