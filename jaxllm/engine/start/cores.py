"""The loop's part of an engine: what schedules and packs for its Device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig
from jaxllm.engine.adapters.base_weights import BaseWeights
from jaxllm.engine.adapters.places import AdapterPlaces
from jaxllm.engine.adapters.reading import AdapterReader
from jaxllm.engine.adapters.store import AdapterStore
from jaxllm.engine.core import EngineCore
from jaxllm.engine.data_parallel.core import Core, DataParallelCore
from jaxllm.engine.data_parallel.ranks import RankDevice, Ranks
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.encoder_runner import EncoderRunner
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.encoder_scheduler import EncoderScheduler
from jaxllm.engine.kv_events.events import KVEvents
from jaxllm.engine.kv_events.publisher import EventPublisher
from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.start.checkpoint import open_model
from jaxllm.engine.start.new_weights import WeightReader
from jaxllm.engine.start.offload import page_tiers
from jaxllm.engine.start.options import draft_depth
from jaxllm.engine.start.plan import Blueprint
from jaxllm.engine.start.prepared import Prepared
from jaxllm.engine.state_cache import StateCache
from jaxllm.models.abstract import LiveModel, ModelParts
from jaxllm.models.registry import adapter_names
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.engine.grammar import Grammars

KEPT_ADAPTERS = 4
"""Adapters kept in host memory for each place on the devices, where nothing is said."""


def new_core(
    prepared: Prepared, device: Device, tokenizer: Tokenizer | None, eos: list[int], grammars: Grammars | None
) -> Core:
    """A core with no requests, for the Device that `prepared` has become."""
    blueprint, functions = prepared.blueprint, prepared.last.functions
    parts = ModelParts(blueprint.spec, blueprint.options, blueprint.params, prepared.last.mesh)
    model = LiveModel(parts, lambda: functions.unpack_weights(device.weights)) if not blueprint.stages else None

    def core(device: Device, rank: int) -> EngineCore:
        config, checkpoint = prepared.config, prepared.checkpoint
        scheduler = _new_scheduler(prepared)
        encodes = blueprint.plan.buckets.encodes
        return EngineCore(
            scheduler,
            scheduler.pool,
            (EncoderRunner if encodes else Runner)(
                device, blueprint.sizes, blueprint.spec.config.num_outputs, eos, functions.processors
            ),
            tokenizer.backend if tokenizer else None,
            eos,
            config.seed + rank,
            grammars,
            adapter_store(blueprint, config, checkpoint.path),
            model,
            WeightReader(config, blueprint, functions, prepared.last.mesh),
            _new_events(config, scheduler.pool, rank),
        )

    count = prepared.config.num_batches
    if count == 1:
        return core(device, 0)
    ranks = Ranks(device, blueprint.sizes, count)
    return DataParallelCore([core(RankDevice(device, ranks, rank), rank) for rank in range(count)], ranks)


def _new_scheduler(prepared: Prepared) -> Scheduler:
    config, blueprint, plan = prepared.config, prepared.blueprint, prepared.blueprint.plan
    states = StateCache(plan.num_states - plan.num_snapshots, plan.num_snapshots) if plan.num_snapshots else None
    shares = config.enable_prefix_caching and (states is not None or not blueprint.sizes.has_states)
    pool = PagePool(plan.num_pages, plan.page_size, shares)
    limits = (plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len)
    if plan.buckets.encodes:
        return EncoderScheduler(pool, *limits)
    tiers = page_tiers(config, blueprint, prepared.last.mesh, prepared.checkpoint.path, pool)
    return Scheduler(
        pool,
        *limits,
        blueprint.spec.config.length_rule,
        plan.decode_steps,
        states,
        draft_depth(config),
        AdapterPlaces(plan.adapter_places),
        tiers,
    )


def _new_events(config: EngineConfig, pool: PagePool, rank: int) -> KVEvents | None:
    """What tells others of the pool, which has no pages yet."""
    asked = config.kv_events_config
    if asked is None or not asked.publishes or not pool.enable_prefix_caching:
        return None
    publisher = EventPublisher(asked.of_rank(rank))
    return KVEvents(pool, publisher.publish, publisher.close)


def adapter_store(blueprint: Blueprint, config: EngineConfig, path: Path) -> AdapterStore | None:
    """Where the engine of the model at `path` finds adapters; None where it runs without."""
    adapted, sizes = blueprint.adapted, blueprint.sizes.adapters
    if adapted is None or sizes is None:
        return None
    weights = {param.path: param for param in blueprint.params}

    def base() -> BaseWeights:
        return BaseWeights(lambda: open_model(config, path), blueprint.spec.names)

    reader = AdapterReader(adapted.tables, weights, adapter_names(blueprint.spec), sizes, base)
    return AdapterStore(reader, config.max_cpu_loras or KEPT_ADAPTERS * sizes.places)
