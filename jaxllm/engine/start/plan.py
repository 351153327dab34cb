"""What fits: weights, caches, buckets. Computed before anything touches device memory, and printed at start."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxllm.compat import under_own_settings
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.core.sizes import Buckets, Limits, StepSizes
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features import features_of, features_of_encoder
from jaxllm.engine.features.drafts.feature import DraftsFeature
from jaxllm.engine.features.drafts.models import AbstractDraft
from jaxllm.engine.features.drafts.rules import DraftDepth, DraftRule
from jaxllm.engine.features.logits import processors_of
from jaxllm.engine.start.draft import DraftBlueprint, draft_blueprint, mtp_blueprint, with_states
from jaxllm.engine.start.host_experts import expert_places, place_bytes, with_host_experts
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
    room_for_drafts,
)
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.stages import StagePlan, stage_models
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import ConfigError
from jaxllm.models.abstract import AdaptedModel, abstract_model, adapted_model
from jaxllm.models.caches import CacheLayout
from jaxllm.models.config import DecoderConfig
from jaxllm.models.options import AdapterSizes, BuildOptions
from jaxllm.models.parallel import check_parallel
from jaxllm.models.registry import ModelSpec, model_spec
from jaxllm.models.tasks import longest_text
from jaxllm.pallas_kernels.tpu import most_sequences
from jaxllm.requests.logits_processors import LogitsProcessor
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import ParamSpec
from jaxllm.weights.source import resolve_model

NATIVE_DECODE_STEPS = 4
"""With the C++ kernels a small model's step takes a few milliseconds, on cores that the host needs as well."""

UNPAGED_LENGTH = 32_768
"""The longest context, where none is asked for, of a model without attention, which states none that means much."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan(Limits):
    """Sizes an engine settles on; bytes and counts are per device where devices share the work."""

    model: str
    family: str
    platform: str
    dtype: str
    attention_backend: str
    tensor_parallel_size: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    """What one sequence takes in layers that keep a state of it."""
    workspace_bytes: int
    adapter_bytes: int
    """What the places of adapters take."""
    draft_bytes: int
    """What the weights of a draft model take, or of a module that drafts."""
    model_max_len: int
    buckets: Buckets
    notes: list[str] = field(default_factory=list)
    """What had to be changed to fit, one sentence each."""
    device: str = ""
    """What the devices are called."""
    pipeline_parallel_size: int = 1
    stages: tuple[StagePlan, ...] = ()
    """What each stage holds, where there are several; bytes of weights and caches are those of the fullest."""
    expert_bytes: int = 0
    """What the places of experts take that are in host memory."""
    host_weight_bytes: int = 0
    """What this process has of weights in host memory, for all of its devices."""
    data_parallel_size: int = 1
    """How many batches run side by side, each of up to `max_num_seqs` sequences, with `num_pages` of its own."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pages hold together."""
        return (self.num_pages - 1) * self.page_size

    @property
    def kv_bytes(self) -> int:
        """What all caches take: pages, and the states of running sequences and of cached prefixes."""
        return max(self._kv_bytes(one) for one in self.stages or [self])

    def _kv_bytes(self, one: StagePlan | EnginePlan) -> int:
        return self.num_pages * self.page_size * one.kv_bytes_per_token + self.num_slot_rows * one.state_bytes

    @property
    def state_cache_bytes(self) -> int:
        """What the kept states of cached prefixes take."""
        return self.num_snapshots * self.state_bytes

    @property
    def planned_bytes(self) -> int:
        """What the plan takes of a device."""
        fullest = max(one.weight_bytes + self._kv_bytes(one) for one in self.stages or [self])
        return fullest + self.draft_bytes + self.adapter_bytes + self.expert_bytes + self.workspace_bytes

    @property
    def num_shapes(self) -> int:
        """Padded shapes to compile, each kind counted once."""
        return len(self.buckets.decode) + len(self.buckets.prefill) + len(self.buckets.head)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, for `jaxllm plan --json`."""
        derived = {"kv_tokens": self.kv_tokens, "kv_bytes": self.kv_bytes, "num_shapes": self.num_shapes}
        return asdict(self) | derived

    def summary(self) -> str:
        """What runs, what takes memory and which settings change that, and what fits: three lines for the log."""
        if self.buckets.encodes:
            return self._encoder_summary()
        many = self.kv_tokens / self.max_model_len
        states = f"{self.num_snapshots:,} states of {format_bytes(self.state_bytes)} of prefixes, "
        several = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size > 1
        used = ", taken as it is used" if self.attention_backend == "cpu" and sys.platform == "linux" else ""
        adapters = f"adapters {format_bytes(self.adapter_bytes)} (max_loras, max_lora_rank), "
        draft = f"draft model {format_bytes(self.draft_bytes)} (speculative_config), "
        experts = f"places of experts {format_bytes(self.expert_bytes)} (num_experts_cached_per_rank), "
        beside = f"{draft if self.draft_bytes else ''}{experts if self.expert_bytes else ''}"
        on_host = f", and {format_bytes(self.host_weight_bytes)} of experts in host memory"
        return (
            f"{self.family} {self.num_parameters / 1e6:,.0f}M parameters, {self.dtype}, on {self._devices}, "
            f"attention: {self.attention_backend}\n"
            f"memory{' of each device' if several else ''}: "
            f"weights {format_bytes(self.weight_bytes)} (see isq, dtype), {beside}"
            f"{adapters if self.adapter_bytes else ''}"
            f"KV cache up to {format_bytes(self.kv_bytes)}{used} (kv_cache_memory, kv_cache_dtype), "
            f"a step's own {format_bytes(self.workspace_bytes)} (max_num_batched_tokens, max_num_seqs)"
            f"{on_host if self.host_weight_bytes else ''}\n"
            f"KV cache: {self.num_pages - 1:,} pages of {self.page_size}, "
            f"{self.kv_tokens:,} tokens, {many:.1f} sequences of {self.max_model_len:,} tokens, "
            f"{states if self.state_bytes else ''}"
            f"up to {self.max_num_seqs} sequences and {self.max_num_batched_tokens} tokens a step"
        )

    @property
    def _devices(self) -> str:
        """'2 stages (layers 0 to 3, 4 to 5) of 1 cpu device', '2 batches side by side, each on 1 cpu device'."""
        count = self.tensor_parallel_size
        devices = f"{count} {self.platform} device{'s' if count > 1 else ''}"
        if self.data_parallel_size > 1:
            return f"{self.data_parallel_size} batches side by side, each on {devices}"
        layers = ", ".join(stage.layers for stage in self.stages)
        return f"{len(self.stages)} stages (layers {layers}) of {devices}" if self.stages else devices

    def _encoder_summary(self) -> str:
        return (
            f"{self.family} {self.num_parameters / 1e6:,.0f}M parameters, {self.dtype}, on {self._devices}, "
            "an encoder\n"
            f"memory{' of each device' if self.tensor_parallel_size > 1 else ''}: "
            f"weights {format_bytes(self.weight_bytes)} (see isq, dtype), no KV cache, "
            f"a step's own {format_bytes(self.workspace_bytes)} (max_num_batched_tokens, max_num_seqs)\n"
            f"texts of up to {self.max_model_len:,} tokens, {self.max_num_seqs} texts and "
            f"{self.max_num_batched_tokens:,} tokens a step"
        )


@dataclass(frozen=True)
class Blueprint:
    """A plan with what building from it needs."""

    plan: EnginePlan
    spec: ModelSpec
    options: BuildOptions
    model: Any
    params: list[ParamSpec]
    sizes: StepSizes
    drafts: DraftRule | None = None
    """How a decode looks for tokens to try ahead; it tries none without."""
    adapters: AdapterSizes | None = None
    """How many adapters are on the devices at once, and how large; None where there are none."""
    adapted: AdaptedModel | None = None
    """The model with tables of adapters, where there are adapters."""
    draft_depth: DraftDepth | None = None
    """How many tokens are tried ahead."""
    offloads: bool = False
    """What the devices give away of caches is kept elsewhere."""
    draft: DraftBlueprint | None = None
    """The draft model, or the module that drafts, where there is one."""
    stages: tuple[Blueprint, ...] = ()
    """One of each stage, where there are several: its own layers, on devices of their own."""


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
    check_imatrix(config)
    spec = model_spec(checkpoint)
    model_config, tp, page = spec.config, config.tensor_parallel_size, config.block_size
    check_parallel(model_config, tp, config.enable_expert_parallel, config.num_batches)
    wanted = config.max_model_len or _default_length(model_config)
    batched = config.max_num_batched_tokens or (512 if platform.memory_limit is None else 2048)
    notes: tuple[str, ...] = ()
    encodes = model_config.encoder is not None
    if encodes and config.enable_dp_attention:
        raise ConfigError(
            "enable_dp_attention is true, and this model is an encoder, whose engines answer side by side without it"
        )
    if encodes:
        wanted, batched, notes = text_sizes(config, model_config, longest_text(checkpoint), batched)
    max_num_seqs = config.max_num_seqs or _default_num_seqs(platform, -(-wanted // page))
    options = build_options(config, model_config, platform, max_num_seqs, -(-wanted // page))
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
    draft = draft_blueprint(config, platform, model_config, layout, max_num_seqs, -(-wanted // page))
    draft = draft or mtp_blueprint(config, platform, checkpoint, spec, replace(options, host_experts=0))
    drafts = with_states(drafts, draft)
    draft_caches = draft.spec.config.caches if draft is not None else ()
    models = stage_models(config, spec, options, model, params)
    held = [one.held(layout, model_config.caches, draft_caches) for one in models]
    num_drafts = drafts.num_tokens if drafts is not None else 0
    most = max(batched, max_num_seqs * (1 + num_drafts))
    workspace = workspace_bytes(model_config, options, max_num_seqs, most, num_drafts)
    workspace += expanded_bytes(params, tp, most)
    workspace += read_bytes(drafts, model_config, options, most)
    adapters = AdapterSizes(config.max_loras, config.max_lora_rank) if config.enable_lora else None
    adapted = adapted_model(spec, options, adapters) if adapters is not None else None
    adapter_bytes = weight_bytes(list(adapted.tables), tp) if adapted is not None else 0
    draft_bytes = weight_bytes(draft.params, tp) if draft is not None else 0
    places = [expert_places(config, one.model, options) for one in models]
    expert_bytes = max(place_bytes(of_stage, tp) for of_stage in places)
    beside = draft_bytes + adapter_bytes + expert_bytes
    budgets = [cache_budget(config, platform, one.weight_bytes + beside, workspace) for one in held]
    if config.max_num_seqs is None and not encodes:
        rooms = zip(budgets, held, strict=True)
        max_num_seqs = min(fewer_sequences(max_num_seqs, budget, one.state_bytes) for budget, one in rooms)
    caches = Caches(1, 0, wanted)
    if not encodes:
        found = []
        for budget, one in zip(budgets, held, strict=True):
            taken = one.weight_bytes, one.kv_bytes_per_token * page, one.state_bytes
            found.append(plan_caches(config, budget, *taken, wanted, max_num_seqs))
        caches = least_caches(found, [one.state_bytes for one in held])
    buckets = (
        Buckets.of_encoder(max_num_seqs, batched, config.prefill_buckets, classifies=model_config.num_labels > 0)
        if encodes
        else Buckets.build(
            max_num_seqs,
            batched,
            smallest_rows=kernels.smallest_rows,
            decode=config.decode_buckets,
            prefill=config.prefill_buckets,
        )
    )
    drafts = room_for_drafts(drafts, draft_depth(config), buckets.decode)
    one_step = encodes or len(models) > 1 or options.dp > 1
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        decode_steps=config.decode_steps or (NATIVE_DECODE_STEPS if kernels.native and not one_step else 1),
        max_model_len=caches.max_model_len,
        page_size=page,
        num_pages=caches.num_pages,
        num_snapshots=caches.num_snapshots,
        most_ahead=drafts.num_tokens if drafts is not None else 0,
        ahead_by_rows=drafts.by_rows if drafts is not None else (),
    )
    sizes = StepSizes(
        **vars(limits),
        caches=model_config.caches,
        cache_layout=layout,
        vocab_size=model_config.num_outputs,
        hidden_size=model_config.vector_size,
        dtype=options.dtype,
        further_caches=draft_caches,
        expert_places=places[0],
    )
    plan = EnginePlan(
        **vars(limits),
        model=config.model,
        family=spec.family.name,
        platform=platform.name,
        dtype=np.dtype(options.dtype).name,
        attention_backend=kernels.name,
        tensor_parallel_size=tp,
        num_parameters=count_parameters(spec, params if tp == 1 else None),
        weight_bytes=max(one.weight_bytes for one in held),
        kv_bytes_per_token=max(one.kv_bytes_per_token for one in held),
        state_bytes=max(one.state_bytes for one in held),
        workspace_bytes=workspace,
        adapter_bytes=adapter_bytes,
        draft_bytes=draft_bytes,
        expert_bytes=expert_bytes,
        host_weight_bytes=sum(host_weight_bytes(one.params, tp, options.dp) for one in models)
        * (tp * options.dp)
        // (config.num_processes or 1),
        model_max_len=model_config.max_position_embeddings,
        buckets=buckets,
        notes=[*kinds.notes, *notes, *caches.notes],
        device=platform.device,
        pipeline_parallel_size=config.pipeline_parallel_size,
        stages=tuple(held) if len(held) > 1 else (),
        data_parallel_size=options.dp,
    )
    whole = Blueprint(
        plan,
        spec,
        options,
        model,
        params,
        sizes,
        drafts,
        adapters,
        adapted,
        draft_depth(config),
        config.kv_offload_memory is not None,
        draft,
    )
    stages = (
        replace(
            whole,
            options=m.options,
            model=m.model,
            params=m.params,
            sizes=replace(sizes, stage=m.stage, expert_places=of_stage),
        )
        for m, of_stage in zip(models, places, strict=True)
    )
    return replace(whole, stages=tuple(stages)) if len(models) > 1 else whole


def step_functions(
    blueprint: Blueprint, mesh: Mesh, logits_processors: Sequence[LogitsProcessor] = ()
) -> StepFunctions:
    """The functions that an engine of this blueprint compiles.

    Raises:
        ConfigError: JAX cannot trace one of the processors, or the model is an encoder.
    """
    sizes, config = blueprint.sizes, blueprint.spec.config
    encodes = config.encoder is not None
    if logits_processors and encodes:
        raise ConfigError("logits_processors is set, and this model is an encoder, which chooses no tokens")
    if encodes:
        return StepFunctions(blueprint.model, blueprint.params, mesh, sizes, features_of_encoder())
    draft = None if blueprint.draft is None else AbstractDraft(blueprint.draft.model, blueprint.draft.params)
    features = features_of(
        sizes,
        widest_activation=config.layer_shapes.widest,
        adapted=blueprint.adapted,
        adapter_places=0 if blueprint.adapters is None else blueprint.adapters.places,
        processors=logits_processors,
        drafts=None
        if blueprint.drafts is None
        else DraftsFeature(blueprint.drafts, blueprint.draft_depth or DraftDepth(0), draft),
        offloads=blueprint.offloads,
    )
    processors_of(features).trace(sizes.vocab_size, sizes.max_model_len)
    further = () if draft is None else draft.params
    return StepFunctions(blueprint.model, blueprint.params, mesh, sizes, features, further)


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


_MEANINGLESS = ("speculative_config", "decode_steps", "decode_buckets", "state_cache_memory", "enable_lora")
"""Settings of what only models that generate do, or keep."""


class TextSizes(NamedTuple):
    """The longest text, and the tokens that a step has room for."""

    max_model_len: int
    max_num_batched_tokens: int
    notes: tuple[str, ...] = ()


def text_sizes(config: EngineConfig, model: DecoderConfig, stated: int | None, usual_tokens: int) -> TextSizes:
    """How long a text may be: as long as its model reads, and as a step has room for.

    Args:
        stated: what the checkpoint says of the longest text, if anything.
        usual_tokens: of a step, where no text is longer and nothing is set.

    Raises:
        ConfigError: a setting is one of models that generate, or a step would have no room for the longest text.
    """
    for name in _MEANINGLESS:
        if getattr(config, name):  # sizes of an engine that is started again may be 0
            raise ConfigError(f"{name} is set, but this model is an encoder, which generates nothing; leave it out")
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, but this model is an encoder, which has no KV cache; "
            "accepted is 'auto'"
        )
    wanted = config.max_model_len or min(stated or model.max_position_embeddings, model.max_position_embeddings)
    tokens = config.max_num_batched_tokens
    if tokens is None:
        return TextSizes(wanted, max(usual_tokens, wanted))
    if tokens >= wanted:
        return TextSizes(wanted, tokens)
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_num_batched_tokens is {tokens} and max_model_len is {wanted}; an encoder runs each text whole in one "
            f"step, so the first must be at least the second"
        )
    note = (
        f"texts have up to {tokens} tokens instead of {wanted}: an encoder runs each whole in one step "
        "(max_num_batched_tokens)"
    )
    return TextSizes(tokens, tokens, (note,))
