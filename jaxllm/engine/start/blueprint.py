"""The choice of every size of an engine: model, memory, buckets, stages. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxllm.compat import under_own_settings
from jaxllm.config import EngineConfig
from jaxllm.engine.core.sizes import Buckets, Limits, StepSizes, held_caches
from jaxllm.engine.features.drafts.rules import DraftRule
from jaxllm.engine.start.draft import DraftBlueprint, draft_blueprint, mtp_blueprint, with_states
from jaxllm.engine.start.memory import (
    Caches,
    cache_budget,
    count_parameters,
    expanded_bytes,
    fewer_sequences,
    host_weight_bytes,
    least_caches,
    plan_caches,
    read_bytes,
    weight_bytes,
    workspace_bytes,
)
from jaxllm.engine.start.options import (
    build_options,
    check_imatrix,
    choose_drafts,
    choose_kinds,
    draft_depth,
    expert_places,
    place_bytes,
    room_for_drafts,
    text_sizes,
    with_host_experts,
)
from jaxllm.engine.start.plan import Blueprint, EnginePlan, StagePlan
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.engine.start.tower import TowerBlueprint, tower_blueprint
from jaxllm.errors import ConfigError
from jaxllm.models.caches import CacheLayout, CacheSpec
from jaxllm.models.config import DecoderConfig, check_parallel
from jaxllm.models.layers.host_experts import ExpertPlaces
from jaxllm.models.options import AdapterSizes, BuildOptions, Stage, places_to_part, share_layers
from jaxllm.models.registry import AdaptedModel, ModelSpec, abstract_model, adapted_model, model_spec
from jaxllm.models.tasks import longest_text
from jaxllm.pallas_kernels.tpu import most_sequences
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import ParamSpec
from jaxllm.weights.source import resolve_model

NATIVE_DECODE_STEPS = 4
"""With the C++ kernels a small model's step takes a few milliseconds, on cores that the host needs as well."""

UNPAGED_LENGTH = 32_768
"""The longest context, where none is asked for, of a model without attention, which states none that means much."""


@under_own_settings
def plan_engine(config: EngineConfig, platform: Platform | None = None) -> EnginePlan:
    """The plan for `config` on this machine (or on `platform`); reads the checkpoint's header, allocates nothing.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: as `LLM` would.
    """
    path = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    checkpoint = open_model(config, path)
    try:
        return make_blueprint(config, checkpoint, platform or Platform.current(config.gpu_memory_utilization)).plan
    finally:
        checkpoint.close()


def make_blueprint(config: EngineConfig, checkpoint: Checkpoint, platform: Platform) -> Blueprint:
    """Choose every size.

    Raises:
        ConfigError: tensor or pipeline parallelism does not divide the model, or not even one sequence fits.
        CheckpointError: as `model_spec`; a tensor is missing, or a shard would part a block of a quantized one.
    """
    chosen = choose_model(config, checkpoint, platform)
    stages = stage_models(config, chosen)
    memory = share_memory(config, platform, chosen, stages)
    buckets, drafts, limits = choose_buckets(config, chosen, memory, parted=len(stages) > 1)
    sizes = StepSizes(
        **vars(limits),
        caches=chosen.config.caches,
        cache_layout=chosen.layout,
        vocab_size=chosen.config.num_outputs,
        hidden_size=chosen.config.vector_size,
        dtype=chosen.options.dtype,
        further_caches=chosen.draft_caches,
        expert_places=memory.places[0],
    )
    whole = Blueprint(
        plan=_plan(config, platform, chosen, stages, memory, buckets, limits),
        spec=chosen.spec,
        options=chosen.options,
        model=chosen.model,
        params=chosen.params,
        sizes=sizes,
        drafts=drafts,
        adapters=chosen.adapters,
        adapted=chosen.adapted,
        draft_depth=draft_depth(config),
        offloads=config.kv_offload_memory is not None,
        draft=chosen.draft,
        tower=chosen.tower,
    )
    if len(stages) == 1:
        return whole
    of_stages = [
        replace(
            whole,
            options=one.options,
            model=one.model,
            params=one.params,
            sizes=replace(sizes, stage=one.stage, expert_places=places),
        )
        for one, places in zip(stages, memory.places, strict=True)
    ]
    return replace(whole, stages=tuple(of_stages))


@dataclass(frozen=True)
class ChosenModel:
    """A model with everything that runs beside it, and the lengths that it was chosen for.

    Attributes:
        max_model_len: the longest context that is wanted; there may be no memory for it.
        max_num_seqs: sequences in a step, unless the states of that many take too much memory.
        draft: the draft model, or the module that drafts, where there is one.
        adapted: the model with tables of adapters, where there are adapters.
        notes: what had to be changed, one sentence each.
    """

    spec: ModelSpec
    options: BuildOptions
    model: Any
    params: list[ParamSpec]
    layout: CacheLayout
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    drafts: DraftRule | None
    draft: DraftBlueprint | None
    adapters: AdapterSizes | None
    adapted: AdaptedModel | None
    notes: tuple[str, ...]
    tower: TowerBlueprint | None = None

    @property
    def config(self) -> DecoderConfig:
        return self.spec.config

    @property
    def encodes(self) -> bool:
        """It is an encoder, which keeps nothing of a text between steps."""
        return self.config.encoder is not None

    @property
    def draft_caches(self) -> tuple[Any, ...]:
        return self.draft.spec.config.caches if self.draft is not None else ()


def choose_model(config: EngineConfig, checkpoint: Checkpoint, platform: Platform) -> ChosenModel:
    """The model of a checkpoint, the kinds of its weights, its kernels, and what drafts and adapts for it."""
    check_imatrix(config)
    spec = model_spec(checkpoint)
    model_config, tp, page = spec.config, config.tensor_parallel_size, config.block_size
    check_parallel(model_config, tp, config.enable_expert_parallel, config.num_batches)
    wanted = config.max_model_len or _default_length(model_config)
    batched = config.max_num_batched_tokens or (512 if platform.memory_limit is None else 2048)
    notes: tuple[str, ...] = ()
    if model_config.encoder is not None:
        if config.enable_dp_attention:
            raise ConfigError(
                "enable_dp_attention is true, and this model is an encoder, whose engines answer side by side without "
                "it"
            )
        wanted, batched, notes = text_sizes(config, model_config, longest_text(checkpoint), batched)
    pages_per_seq = -(-wanted // page)
    max_num_seqs = config.max_num_seqs or _default_num_seqs(platform, pages_per_seq)
    options = build_options(config, model_config, platform, max_num_seqs, pages_per_seq)
    options = with_host_experts(config, model_config, options)
    kinds = choose_kinds(config, checkpoint, spec, options, platform)
    model, params = abstract_model(spec, options, kinds)
    if wanted > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {wanted}; this model's positions end at {model_config.max_position_embeddings}"
        )
    kernels = options.kernels
    layout = CacheLayout(kernels.page_dtype(options.dtype), page, tp, kernels.page_layout)
    drafts = choose_drafts(config)
    draft = draft_blueprint(config, platform, model_config, layout, max_num_seqs, pages_per_seq)
    draft = draft or mtp_blueprint(config, platform, checkpoint, spec, replace(options, host_experts=0))
    adapters = AdapterSizes(config.max_loras, config.max_lora_rank) if config.enable_lora else None
    return ChosenModel(
        spec=spec,
        options=options,
        model=model,
        params=params,
        layout=layout,
        max_model_len=wanted,
        max_num_batched_tokens=batched,
        max_num_seqs=max_num_seqs,
        drafts=with_states(drafts, draft),
        draft=draft,
        adapters=adapters,
        adapted=adapted_model(spec, options, adapters) if adapters is not None else None,
        notes=(*kinds.notes, *notes),
        tower=tower_blueprint(config, checkpoint, options, platform, wanted),
    )


@dataclass(frozen=True)
class SharedMemory:
    """The bytes that each part of an engine takes of a device, and the sizes of its caches.

    Attributes:
        held: what a device of each stage holds.
        places: of each stage, and of each of its layers, the places of experts that are in host memory.
        max_num_seqs: sequences in a step, now that the memory for their states is known.
    """

    held: list[StagePlan]
    places: list[tuple[ExpertPlaces | None, ...]]
    workspace_bytes: int
    adapter_bytes: int
    draft_bytes: int
    tower_bytes: int
    expert_bytes: int
    caches: Caches
    max_num_seqs: int


def share_memory(
    config: EngineConfig, platform: Platform, chosen: ChosenModel, stages: Sequence[StageModel]
) -> SharedMemory:
    """Share out a device: weights and what lies beside them, a step's own, and caches in what is left."""
    model, options, tp, drafts = chosen.config, chosen.options, config.tensor_parallel_size, chosen.drafts
    held = [one.held(chosen.layout, model.caches, chosen.draft_caches) for one in stages]
    num_drafts = drafts.num_tokens if drafts is not None else 0
    tokens = max(chosen.max_num_batched_tokens, chosen.max_num_seqs * (1 + num_drafts))
    workspace = workspace_bytes(model, options, chosen.max_num_seqs, tokens, num_drafts)
    workspace = max(workspace, chosen.tower.workspace_bytes if chosen.tower is not None else 0)
    workspace += expanded_bytes(chosen.params, tp, tokens) + read_bytes(drafts, model, options, tokens)
    adapter_bytes = weight_bytes(list(chosen.adapted.tables), tp) if chosen.adapted is not None else 0
    draft_bytes = weight_bytes(chosen.draft.params, tp) if chosen.draft is not None else 0
    tower_bytes = chosen.tower.num_bytes if chosen.tower is not None else 0
    places = [expert_places(config, one.model, options) for one in stages]
    expert_bytes = max(place_bytes(of_stage, tp) for of_stage in places)
    beside = draft_bytes + adapter_bytes + expert_bytes + tower_bytes
    max_num_seqs, caches = chosen.max_num_seqs, Caches(1, 0, chosen.max_model_len)
    if not chosen.encodes:
        budgets = [cache_budget(config, platform, one.weight_bytes + beside, workspace) for one in held]
        rooms = list(zip(budgets, held, strict=True))
        if config.max_num_seqs is None:
            max_num_seqs = min(fewer_sequences(max_num_seqs, budget, one.state_bytes) for budget, one in rooms)
        found = []
        for budget, one in rooms:
            taken = one.weight_bytes, one.kv_bytes_per_token * config.block_size, one.state_bytes
            found.append(plan_caches(config, budget, *taken, chosen.max_model_len, max_num_seqs))
        caches = least_caches(found, [one.state_bytes for one in held])
    return SharedMemory(
        held, places, workspace, adapter_bytes, draft_bytes, tower_bytes, expert_bytes, caches, max_num_seqs
    )


def choose_buckets(
    config: EngineConfig, chosen: ChosenModel, memory: SharedMemory, *, parted: bool
) -> tuple[Buckets, DraftRule | None, Limits]:
    """The shapes that steps are padded to, how many tokens are tried ahead in each, and the limits of a step.

    `parted` says that the model runs in stages.
    """
    kernels, batched, max_num_seqs = chosen.options.kernels, chosen.max_num_batched_tokens, memory.max_num_seqs
    if chosen.encodes:
        classifies = chosen.config.num_labels > 0
        buckets = Buckets.of_encoder(max_num_seqs, batched, config.prefill_buckets, classifies=classifies)
    else:
        buckets = Buckets.build(
            max_num_seqs,
            batched,
            smallest_rows=kernels.smallest_rows,
            decode=config.decode_buckets,
            prefill=config.prefill_buckets,
        )
    drafts = room_for_drafts(chosen.drafts, draft_depth(config), buckets.decode)
    one_step = chosen.encodes or parted or chosen.options.dp > 1
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        decode_steps=config.decode_steps or (NATIVE_DECODE_STEPS if kernels.native and not one_step else 1),
        max_model_len=memory.caches.max_model_len,
        page_size=config.block_size,
        num_pages=memory.caches.num_pages,
        num_snapshots=memory.caches.num_snapshots,
        most_ahead=drafts.num_tokens if drafts is not None else 0,
        ahead_by_rows=drafts.by_rows if drafts is not None else (),
    )
    return buckets, drafts, limits


def _plan(
    config: EngineConfig,
    platform: Platform,
    chosen: ChosenModel,
    stages: Sequence[StageModel],
    memory: SharedMemory,
    buckets: Buckets,
    limits: Limits,
) -> EnginePlan:
    options, held = chosen.options, memory.held
    tp, dp = options.tp, options.dp
    on_host = sum(host_weight_bytes(one.params, tp, dp) for one in stages) * tp * dp
    return EnginePlan(
        **vars(limits),
        model=config.model,
        family=chosen.spec.family.name,
        platform=platform.name,
        dtype=np.dtype(options.dtype).name,
        attention_backend=options.kernels.name,
        tensor_parallel_size=tp,
        num_parameters=count_parameters(chosen.spec, chosen.params if tp == 1 else None),
        weight_bytes=max(one.weight_bytes for one in held),
        kv_bytes_per_token=max(one.kv_bytes_per_token for one in held),
        state_bytes=max(one.state_bytes for one in held),
        workspace_bytes=memory.workspace_bytes,
        adapter_bytes=memory.adapter_bytes,
        draft_bytes=memory.draft_bytes,
        tower_bytes=memory.tower_bytes,
        image_rows=chosen.tower.tower.num_rows if chosen.tower is not None else 0,
        expert_bytes=memory.expert_bytes,
        host_weight_bytes=on_host // (config.num_processes or 1),
        buckets=buckets,
        notes=[*chosen.notes, *memory.caches.notes],
        device=platform.device,
        room_bytes=platform.free_host_memory if platform.memory_limit is None else platform.memory_limit,
        pipeline_parallel_size=config.pipeline_parallel_size,
        stages=tuple(held) if len(held) > 1 else (),
        data_parallel_size=dp,
    )


class StageModel(NamedTuple):
    """The layers of a stage as a model of their own, or the whole of a model that has no stages."""

    stage: Stage | None
    options: BuildOptions
    model: Any
    params: list[ParamSpec]

    def held(self, layout: CacheLayout, caches: tuple[CacheSpec, ...], draft: tuple[CacheSpec, ...] = ()) -> StagePlan:
        """The share that a device of it holds; `draft` are the caches of a draft model."""
        own = (*held_caches(caches, self.stage), *draft)
        layers = f"0 to {len(caches) - 1}" if self.stage is None else f"{self.stage.begin} to {self.stage.end - 1}"
        weights, page = weight_bytes(self.params, self.options.tp, self.options.dp), layout.page_bytes(own)
        return StagePlan(layers, weights, page // layout.page_size, layout.state_bytes(own))


def stage_models(config: EngineConfig, chosen: ChosenModel) -> list[StageModel]:
    """Each stage of a model.

    Raises:
        ConfigError: it cannot be parted into that many.
    """
    count, spec, options, params = config.pipeline_parallel_size, chosen.spec, chosen.options, chosen.params
    if count == 1:
        return [StageModel(None, options, chosen.model, params)]
    cuts = _places_to_part(spec.config, count)
    costs = [0] * spec.config.num_layers
    for param in params:
        if param.path.startswith("layers."):
            costs[int(param.path.split(".")[1])] += weight_bytes([param], options.tp)
    table = "embed.weight" if spec.config.tie_word_embeddings else "head.weight"
    head = weight_bytes([param for param in params if param.path == table], options.tp)
    kinds = {param.path: param.kinds for param in params}
    found = []
    for stage in share_layers(costs, head, cuts, count):
        own = replace(options, stage=stage)
        found.append(StageModel(stage, own, *abstract_model(spec, own, lambda param: kinds[param.path])))
    return found


def _places_to_part(config: DecoderConfig, count: int) -> list[int]:
    stated = f"pipeline_parallel_size is {count}"
    if config.encoder is not None:
        raise ConfigError(f"{stated}, and this model is an encoder, whose layers run together; accepted is 1")
    if config.per_layer is not None:
        raise ConfigError(
            f"{stated}, and every layer of this model has inputs of its own (per-layer embeddings), which stages do "
            "not hand on; accepted is 1"
        )
    cuts = places_to_part(config.caches)
    if count > len(cuts) + 1:
        raise ConfigError(
            f"{stated}, and the {config.num_layers} layers of this model are parted into {len(cuts) + 1} stages at "
            f"most; accepted are 1 to {len(cuts) + 1}"
        )
    return cuts


def _default_length(model: DecoderConfig) -> int:
    """The longest context where none is asked for: what the model states, unless only tables would grow with it."""
    if model.page_groups or model.encoder is not None:
        return model.max_position_embeddings
    return min(model.max_position_embeddings, UNPAGED_LENGTH)


def _default_num_seqs(platform: Platform, pages_per_seq: int) -> int:
    """As many as a device keeps busy with, and as the page table of a TPU's attention has room for."""
    if platform.memory_limit is None:
        return 32
    return min(256, most_sequences(pages_per_seq) or 256) if platform.name == "tpu" else 256
