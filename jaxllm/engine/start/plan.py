"""The sizes that an engine has settled on, and the functions that it compiles for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jax.sharding import Mesh

from jaxllm.config.values import format_bytes
from jaxllm.engine.core.sizes import Buckets, Limits, StepSizes
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features import features_of, features_of_encoder
from jaxllm.engine.features.drafts.feature import DraftsFeature
from jaxllm.engine.features.drafts.models import AbstractDraft
from jaxllm.engine.features.drafts.rules import DraftDepth, DraftRule
from jaxllm.engine.features.logits import processors_of
from jaxllm.engine.start.draft import DraftBlueprint
from jaxllm.engine.start.tower import TowerBlueprint
from jaxllm.errors import ConfigError
from jaxllm.models.options import AdapterSizes, BuildOptions
from jaxllm.models.registry import AdaptedModel, ModelSpec
from jaxllm.requests.logits_processors import LogitsProcessor
from jaxllm.weights.loader import ParamSpec

PROCESS_BYTES = 600 * 2**20
"""What Python, JAX, compiled steps and the tokenizer of a process take at least, besides weights and caches."""
_BESIDES = f"and the program itself {format_bytes(PROCESS_BYTES)} or more of host memory"


@dataclass(frozen=True)
class StagePlan:
    """The share that one device of a stage holds."""

    layers: str
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    """Bytes that one sequence takes in layers that keep a state of it."""


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
    """Bytes that one sequence takes in layers that keep a state of it."""
    workspace_bytes: int
    adapter_bytes: int
    """Bytes that the places of adapters take."""
    draft_bytes: int
    """Bytes that the weights of a draft model, or of a module that drafts, take."""
    tower_bytes: int
    """Bytes that a tower's weights take, its rows of images, and the batch that is in it."""
    image_rows: int
    """Rows of images that are kept; 0: none are seen."""
    buckets: Buckets
    notes: list[str] = field(default_factory=list)
    """Changes that were needed to fit, one sentence each."""
    device: str = ""
    """The devices' own name."""
    pipeline_parallel_size: int = 1
    stages: tuple[StagePlan, ...] = ()
    """The share of each stage, if there are several; bytes of weights and caches are those of the fullest."""
    expert_bytes: int = 0
    """Bytes that the places of experts in host memory take."""
    host_weight_bytes: int = 0
    """Bytes of weights that this process has in host memory, for all of its devices."""
    room_bytes: int = 0
    """Bytes that are free for it: of each device, or of the host where the CPU is the device; 0: not known."""
    data_parallel_size: int = 1
    """The number of batches that run side by side, each of up to `max_num_seqs` sequences, with `num_pages` of its own.
    """

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pages hold together."""
        return (self.num_pages - 1) * self.page_size

    @property
    def kv_bytes(self) -> int:
        """Bytes that all caches take: pages, and the states of running sequences and of cached prefixes."""
        return max(self._kv_bytes(one) for one in self.stages or [self])

    def _kv_bytes(self, one: StagePlan | EnginePlan) -> int:
        return self.num_pages * self.page_size * one.kv_bytes_per_token + self.num_slot_rows * one.state_bytes

    @property
    def state_cache_bytes(self) -> int:
        """Bytes that the kept states of cached prefixes take."""
        return self.num_snapshots * self.state_bytes

    @property
    def planned_bytes(self) -> int:
        """Bytes that the plan takes of a device."""
        fullest = max(one.weight_bytes + self._kv_bytes(one) for one in self.stages or [self])
        beside = self.draft_bytes + self.tower_bytes + self.adapter_bytes + self.expert_bytes
        return fullest + beside + self.workspace_bytes

    @property
    def why_not(self) -> str | None:
        """Why there is no room for what was asked for, in words; None if there is."""
        num_devices = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
        needed = self.planned_bytes * (num_devices if self.platform == "cpu" else 1)
        if not self.room_bytes or needed <= self.room_bytes:
            return None
        return f"it takes {format_bytes(needed)}, and {format_bytes(self.room_bytes)} are free"

    @property
    def num_shapes(self) -> int:
        """Padded shapes to compile, each kind counted once."""
        return len(self.buckets.decode) + len(self.buckets.prefill) + len(self.buckets.head)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, for `jaxllm plan --json`."""
        derived = {"kv_tokens": self.kv_tokens, "kv_bytes": self.kv_bytes, "num_shapes": self.num_shapes}
        return asdict(self) | derived

    def summary(self) -> str:
        """The model, the memory and the settings that change it, and what fits: three lines for the log."""
        if self.buckets.encodes:
            return self._encoder_summary()
        many = self.kv_tokens / self.max_model_len
        states = f"{self.num_snapshots:,} states of {format_bytes(self.state_bytes)} of prefixes, "
        several = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size > 1
        used = ", taken as it is used" if self.attention_backend == "cpu" and sys.platform == "linux" else ""
        beside = [
            f"{what} {format_bytes(nbytes)} ({settings}), "
            for what, nbytes, settings in (
                ("draft model", self.draft_bytes, "speculative_config"),
                (f"tower and {self.image_rows:,} rows of images", self.tower_bytes, "media_cache_memory"),
                ("places of experts", self.expert_bytes, "num_experts_cached_per_rank"),
                ("adapters", self.adapter_bytes, "max_loras, max_lora_rank"),
            )
            if nbytes
        ]
        on_host = f", and {format_bytes(self.host_weight_bytes)} of experts in host memory"
        return (
            f"{self.family} {self.num_parameters / 1e6:,.0f}M parameters, {self.dtype}, on {self._devices}, "
            f"attention: {self.attention_backend}\n"
            f"memory{' of each device' if several else ''}: "
            f"weights {format_bytes(self.weight_bytes)} (see isq, dtype), {''.join(beside)}"
            f"KV cache up to {format_bytes(self.kv_bytes)}{used} (kv_cache_memory, kv_cache_dtype), "
            f"a step's own {format_bytes(self.workspace_bytes)} (max_num_batched_tokens, max_num_seqs)"
            f"{on_host if self.host_weight_bytes else ''}; {_BESIDES}\n"
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
            f"a step's own {format_bytes(self.workspace_bytes)} (max_num_batched_tokens, max_num_seqs); {_BESIDES}\n"
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
    """The rule by which a decode looks for tokens to try ahead; without one it tries none."""
    adapters: AdapterSizes | None = None
    """The number of adapters that are on the devices at once, and how large; None where there are none."""
    adapted: AdaptedModel | None = None
    """The model with tables of adapters, where there are adapters."""
    draft_depth: DraftDepth | None = None
    """The number of tokens that are tried ahead."""
    offloads: bool = False
    """Pages that the devices give away are kept elsewhere."""
    draft: DraftBlueprint | None = None
    """The draft model, or the module that drafts, where there is one."""
    tower: TowerBlueprint | None = None
    """What makes rows of images, where the model sees."""
    stages: tuple[Blueprint, ...] = ()
    """One of each stage, where there are several: its own layers, on devices of their own."""


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
        tower=None if blueprint.tower is None else blueprint.tower.tower,
    )
    processors_of(features).trace(sizes.vocab_size, sizes.max_model_len)
    further = [] if draft is None else list(draft.params)
    if blueprint.tower is not None:
        further += blueprint.tower.tower.params
    return StepFunctions(blueprint.model, blueprint.params, mesh, sizes, features, further)
