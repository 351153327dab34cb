"""How many experts a device leaves in the memory of its host, and how many of these have a place on it at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.models.caches import Buffer
from jaxllm.models.config import DecoderConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder import Encoder
from jaxllm.models.layers.host_experts import ExpertPlaces
from jaxllm.models.layers.moe import places_of_layer
from jaxllm.models.options import BuildOptions

CACHED_SHARE = 4
"""One expert in so many of those in host memory has a place on a device, where nothing else is said."""


def with_host_experts(config: EngineConfig, model: DecoderConfig, options: BuildOptions) -> BuildOptions:
    """`options` with the experts that `config` leaves in host memory.

    Raises:
        ConfigError: the model has no experts, or a device has not so many.
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
    """Of each layer the buffers of its places for experts in host memory; empty where there are none of these."""
    if not options.host_experts or isinstance(model, Encoder):
        return ()
    assert model.config.moe is not None
    wanted = max(model.config.moe.top_k, options.host_experts // CACHED_SHARE)
    count = config.num_experts_cached_per_rank or min(options.host_experts, wanted)
    layers = (getattr(layer, "mlp", None) for layer in model.layers)
    return tuple(places_of_layer(mlp, count, options.tp) for mlp in layers)


def place_bytes(places: Sequence[ExpertPlaces | None], tp: int) -> int:
    """What they take of a device."""
    buffers: list[Buffer] = jax.tree.leaves(list(places), is_leaf=lambda each: isinstance(each, Buffer))
    return sum(buffer.bytes_per_device(tp) for buffer in buffers)
