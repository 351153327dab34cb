"""From settings to a model's options: dtype, kernels, kinds of weights, drafts, places of experts, lengths of texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import cpu_kernels
from jaxllm.config import EngineConfig
from jaxllm.engine.features.drafts.rules import DraftDepth, DraftRule, ModelDrafts, ModuleDrafts, NgramDrafts
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import ConfigError
from jaxllm.models.caches import Buffer
from jaxllm.models.config import DecoderConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder import Encoder
from jaxllm.models.layers.host_experts import ExpertPlaces
from jaxllm.models.layers.moe import places_of_layer
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec
from jaxllm.models.vision.spec import VisionSpec
from jaxllm.pallas_kernels import Kernels, choose_kernels
from jaxllm.pallas_kernels.pages import PageUse
from jaxllm.quantization.gguf_encode import IMPORTANCE
from jaxllm.quantization.schemes import BLOCKS
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.saved import SavedCheckpoint

logger = logging.getLogger(__name__)

DTYPES = {"auto": jnp.bfloat16, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}


def build_options(
    config: EngineConfig, model: DecoderConfig, platform: Platform, max_num_seqs: int, pages_per_seq: int
) -> BuildOptions:
    """The dtype and the kernels that `config` means for this model on this platform.

    Raises:
        ConfigError: the attention backend cannot run there, or not this model, or products are to round to what the
            processor does not multiply.
    """
    dtype, tp = DTYPES[config.dtype], config.tensor_parallel_size
    uses = [
        PageUse(
            max(group.heads, tp) // tp,
            group.dims,
            max_num_seqs,
            pages_per_seq,
            model.attention_sinks,
            group.chunked,
            model.alibi is not None,
        )
        for group in model.page_groups
    ]
    kernels = choose_kernels(
        config.attention_backend,
        platform.name,
        kv_cache_dtype=config.kv_cache_dtype,
        dtype=dtype,
        native=wants_cpu_kernels(config, platform) and _runs_cpu_kernels(),
        uses=uses,
    )
    if config.cpu_products == "bf16" and not (kernels.native and cpu_kernels.rounds_to_bf16(cpu_kernels.isa())):
        missing = f"{cpu_kernels.isa()} has no instructions for it" if kernels.native else "no C++ kernels run here"
        raise ConfigError(f"cpu_products is 'bf16', and {missing}; accepted is 'int8'")
    return BuildOptions(dtype, tp, kernels, config.enable_expert_parallel, dp=config.num_batches)


def choose_kinds(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: ModelSpec | VisionSpec,
    options: BuildOptions,
    platform: Platform,
) -> KindChooser:
    """The kinds that weights are kept as in memory."""
    kernels = options.kernels
    packed = keeps_packed(config, checkpoint, kernels, platform)
    requantized = config.isq, config.isq_map or {}
    return KindChooser(
        checkpoint,
        spec.names,
        options.tp,
        packed,
        *requantized,
        tiles=kernels.native,
        in_bf16=config.cpu_products == "bf16",
        gpu_tiles=kernels.gpu_tiles,
    )


def keeps_packed(config: EngineConfig, checkpoint: Checkpoint, kernels: Kernels, platform: Platform) -> bool:
    """Blocks of a quantized checkpoint stay as they are in memory, and are not expanded to the model's type.

    Plain XLA on a CPU decodes four times faster from expanded weights; everywhere else packed ones are the better deal.
    """
    if config.dequantize is None and (config.isq or config.isq_map):
        return True  # whoever asks for another kind must say that these are to be expanded first
    if config.dequantize is None and isinstance(checkpoint, SavedCheckpoint) and checkpoint.is_requantized:
        return True  # as with the flags that it was converted with
    return not config.dequantize if config.dequantize is not None else kernels.native or platform.name != "cpu"


def choose_drafts(config: EngineConfig) -> DraftRule | None:
    """The rule by which decodes look for tokens to try ahead.

    Raises:
        ConfigError: the settings exclude it.
    """
    asked = config.speculative_config
    if asked is None:
        return None
    if asked.num_speculative_tokens >= config.block_size:
        raise ConfigError(
            f"num_speculative_tokens is {asked.num_speculative_tokens}: it must be less than block_size, which is "
            f"{config.block_size}"
        )
    if asked.source in ("mtp", "eagle3"):
        return ModuleDrafts(asked.num_speculative_tokens)
    if asked.source == "draft_model":
        return ModelDrafts(asked.num_speculative_tokens)
    answers = asked.source == "suffix"
    return NgramDrafts(asked.num_speculative_tokens, asked.shortest, asked.longest, asked.remembered, answers)


def draft_depth(config: EngineConfig) -> DraftDepth:
    """The number of tokens that are tried ahead."""
    asked = config.speculative_config
    if asked is None:
        return DraftDepth(0)
    return DraftDepth(asked.num_speculative_tokens, asked.num_speculative_tokens_per_batch_size or ())


def room_for_drafts(drafts: DraftRule | None, depth: DraftDepth, buckets: Sequence[int]) -> DraftRule | None:
    """Drafts with no more room in a step padded to one of these numbers of sequences than that many ever try.

    A smaller number of sequences runs in the bucket before, as long as that is ready.
    """
    if drafts is None:
        return None
    before = [0, *buckets]
    most = (max(map(depth.with_running, range(low + 1, rows + 1))) for low, rows in zip(before, buckets, strict=False))
    return replace(drafts, by_rows=tuple(zip(buckets, (max(1, count) for count in most), strict=True)))


def check_imatrix(config: EngineConfig) -> None:
    """Raises ConfigError where an importance matrix would be ignored."""
    if config.imatrix is None:
        return
    asked = {config.isq, *(config.isq_map or {}).values()} - {None}
    weighed = [name for name, kind in BLOCKS.items() if kind.type in IMPORTANCE]
    if config.load_format == "dummy" or not asked & set(weighed):
        what = (
            "weights are random" if config.load_format == "dummy" else "no weight is quantized to a kind it counts for"
        )
        raise ConfigError(
            f"imatrix is {str(config.imatrix)!r}, but {what}; accepted with isq or isq_map of {', '.join(weighed)}"
        )


def wants_cpu_kernels(config: EngineConfig, platform: Platform) -> bool:
    """The C++ kernels are to run, where they can.

    They serve bfloat16. float32 is for those who want nothing rounded and tokens that no batch-mate can change in their
    last bit: plain XLA gives that.
    """
    asked = config.cpu_kernels != "off" and config.attention_backend == "auto"
    return asked and platform.name == "cpu" and np.dtype(DTYPES[config.dtype]) == jnp.bfloat16


def _runs_cpu_kernels() -> bool:
    """There are the C++ kernels, compiled now if need be; the log says what prevents it."""
    if not cpu_kernels.available():
        logger.warning("%s; plain XLA runs, at a fraction of the speed", cpu_kernels.reason())
        return False
    cpu_kernels.keep_to_threads()
    return True


CACHED_SHARE = 4
"""One expert in this many of those in host memory has a place on a device, if nothing else is set."""


def with_host_experts(config: EngineConfig, model: DecoderConfig, options: BuildOptions) -> BuildOptions:
    """`options` with the experts that `config` leaves in host memory.

    Raises:
        ConfigError: the model has no experts, or a device has fewer.
    """
    count = config.num_experts_offload_per_rank
    if not count:
        return options
    stated = f"num_experts_offload_per_rank is {count}"
    if model.moe is None:
        raise ConfigError(f"{stated}, and this model has no experts; accepted is 0")
    devices = options.tp * options.dp if options.expert_parallel else 1
    here = model.moe.num_experts // devices
    if count > here:
        raise ConfigError(f"{stated}, and each device has {here} experts of a layer; accepted are 0 to {here}")
    cached = config.num_experts_cached_per_rank
    if cached is not None and cached > count:
        raise ConfigError(f"num_experts_cached_per_rank is {cached}, and {stated}; accepted are 1 to {count}")
    return replace(options, host_experts=count)


def expert_places(
    config: EngineConfig, model: Decoder | Encoder, options: BuildOptions
) -> tuple[ExpertPlaces | None, ...]:
    """Each layer's buffers of its places for experts in host memory; empty if there are none of these."""
    if not options.host_experts or isinstance(model, Encoder):
        return ()
    assert model.config.moe is not None
    wanted = max(model.config.moe.top_k, options.host_experts // CACHED_SHARE)
    count = config.num_experts_cached_per_rank or min(options.host_experts, wanted)
    layers = (getattr(layer, "mlp", None) for layer in model.layers)
    return tuple(places_of_layer(mlp, count, options.tp) for mlp in layers)


def place_bytes(places: Sequence[ExpertPlaces | None], tp: int) -> int:
    """Bytes that they take of a device."""
    buffers: list[Buffer] = jax.tree.leaves(list(places), is_leaf=lambda each: isinstance(each, Buffer))
    return sum(buffer.bytes_per_device(tp) for buffer in buffers)


_MEANINGLESS = ("speculative_config", "decode_steps", "decode_buckets", "state_cache_memory", "enable_lora")
"""Settings of what only models that generate do, or keep."""


class TextSizes(NamedTuple):
    """The longest text, and the tokens that a step has room for."""

    max_model_len: int
    max_num_batched_tokens: int
    notes: tuple[str, ...] = ()


def text_sizes(config: EngineConfig, model: DecoderConfig, stated: int | None, usual_tokens: int) -> TextSizes:
    """The longest text: as long as its model reads, and as a step has room for.

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
