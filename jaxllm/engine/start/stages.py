"""The stages of a model: which layers each has, and what its devices hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.engine.core.sizes import held_caches
from jaxllm.engine.start.memory import weight_bytes
from jaxllm.errors import ConfigError
from jaxllm.models.caches import CacheLayout, CacheSpec
from jaxllm.models.config import DecoderConfig
from jaxllm.models.options import BuildOptions, Stage, places_to_part, share_layers
from jaxllm.models.registry import ModelSpec, abstract_model
from jaxllm.weights.loader import ParamSpec


@dataclass(frozen=True)
class StagePlan:
    """What one device of a stage holds."""

    layers: str
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    """What one sequence takes in layers that keep a state of it."""


class StageModel(NamedTuple):
    """The layers of a stage as a model of their own, or the whole of a model that has no stages."""

    stage: Stage | None
    options: BuildOptions
    model: Any
    params: list[ParamSpec]

    def held(self, layout: CacheLayout, caches: tuple[CacheSpec, ...], draft: tuple[CacheSpec, ...] = ()) -> StagePlan:
        """What a device of it holds; `draft` are the caches of a draft model."""
        own = (*held_caches(caches, self.stage), *draft)
        layers = f"0 to {len(caches) - 1}" if self.stage is None else f"{self.stage.begin} to {self.stage.end - 1}"
        weights, page = weight_bytes(self.params, self.options.tp, self.options.dp), layout.page_bytes(own)
        return StagePlan(layers, weights, page // layout.page_size, layout.state_bytes(own))


def stage_models(
    config: EngineConfig, spec: ModelSpec, options: BuildOptions, model: Any, params: list[ParamSpec]
) -> list[StageModel]:
    """Each stage of a model, of which `params` are all parameters.

    Raises:
        ConfigError: it cannot be parted into so many.
    """
    count = config.pipeline_parallel_size
    if count == 1:
        return [StageModel(None, options, model, params)]
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
