"""The loop's part of an engine: what schedules and packs for its Device."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.feature import Surroundings
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.runner import EncoderRunner, Runner
from jaxllm.engine.core.scheduler import EncoderScheduler, Scheduler
from jaxllm.engine.features.adapters.adapters import AdapterStore
from jaxllm.engine.features.adapters.reading import AdapterReader, BaseWeights
from jaxllm.engine.features.offload.offload import OffloadFeature
from jaxllm.engine.scale.data_parallel import Core, DataParallelCore, RankDevice, Ranks
from jaxllm.engine.scale.kv_events import EventPublisher, KVEvents
from jaxllm.engine.start.new_weights import WeightReader
from jaxllm.engine.start.offload import page_tiers
from jaxllm.engine.start.plan import Blueprint
from jaxllm.engine.start.prepared import Prepared
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.models.abstract import LiveModel, ModelParts
from jaxllm.models.registry import adapter_names
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.engine.features.grammar.grammar import Grammars

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
    """What tells others of the pool, which has no pages yet."""
    asked = config.kv_events_config
    if asked is None or not asked.publishes or not pool.enable_prefix_caching:
        return None
    publisher = EventPublisher(asked.of_rank(rank))
    return KVEvents(pool, publisher.publish, publisher.close)


def adapter_store(blueprint: Blueprint, config: EngineConfig, path: Path) -> AdapterStore | None:
    """Where the engine of the model at `path` finds adapters; None where it runs without."""
    adapted, sizes = blueprint.adapted, blueprint.adapters
    if adapted is None or sizes is None:
        return None
    weights = {param.path: param for param in blueprint.params}

    def base() -> BaseWeights:
        return BaseWeights(lambda: open_model(config, path), blueprint.spec.names)

    reader = AdapterReader(adapted.tables, weights, adapter_names(blueprint.spec), sizes, base)
    return AdapterStore(reader, config.max_cpu_loras or KEPT_ADAPTERS * sizes.places)
