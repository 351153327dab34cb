"""The abilities of the engine beyond requests, pages, slots, steps and tokens: this is their list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.requests.logits_processors import LogitsProcessor

if TYPE_CHECKING:  # front doors, which do without JAX, import some features' rules
    from jaxllm.engine.core.feature import Feature
    from jaxllm.engine.core.keys import Kind
    from jaxllm.engine.core.registry import Features
    from jaxllm.engine.core.sizes import StepSizes
    from jaxllm.engine.features.drafts.feature import DraftsFeature
    from jaxllm.engine.features.images.feature import AbstractTower
    from jaxllm.models.registry import AdaptedModel


def features_of(
    sizes: StepSizes,
    *,
    widest_activation: int,
    adapted: AdaptedModel | None = None,
    adapter_places: int = 0,
    processors: Sequence[LogitsProcessor] = (),
    drafts: DraftsFeature | None = None,
    offloads: bool = False,
    tower: AbstractTower | None = None,
) -> Features:
    """Those of an engine that samples, in the order they are asked; `widest_activation` is a layer's, per token."""
    from jaxllm.engine.core.registry import Features
    from jaxllm.engine.features.adapters.adapters import AdaptersFeature, NoAdaptersFeature
    from jaxllm.engine.features.chain import ChainFeature
    from jaxllm.engine.features.grammar.grammar import GrammarFeature
    from jaxllm.engine.features.images.feature import ImagesFeature, RopeShiftFeature
    from jaxllm.engine.features.inside import CapturesFeature, PatchingFeature, SteeringFeature
    from jaxllm.engine.features.logits import AdjustmentsFeature, ProcessorsFeature
    from jaxllm.engine.features.offload.offload import OffloadFeature
    from jaxllm.engine.features.offload.pages import ROW_KINDS
    from jaxllm.engine.features.readout import PoolingFeature, ScoresFeature
    from jaxllm.engine.features.states import StatesFeature

    decodes: tuple[Kind, ...] = ("decode",) if drafts is None else ("decode", "verify")
    found: list[Feature] = [
        ProcessorsFeature(processors),
        AdjustmentsFeature(),
        GrammarFeature(),
        ChainFeature(),
        NoAdaptersFeature() if adapted is None else AdaptersFeature(adapted, adapter_places, decodes),
        SteeringFeature(),
        PatchingFeature(),
        CapturesFeature(widest_activation),
        ScoresFeature(),
        PoolingFeature(),
    ]
    if tower is not None:
        found += [*([RopeShiftFeature()] if tower.processor.axes else []), ImagesFeature(tower)]
    if drafts is not None:
        found.append(drafts)
    if sizes.keeps_by_slot:
        found.append(StatesFeature(sizes.max_num_seqs + 1, sizes.num_snapshots))
    if offloads:
        found.append(OffloadFeature(kind for kind in ROW_KINDS if sizes.buffers_of(paged=kind == "page")))
    return Features(found)


def features_of_encoder() -> Features:
    """Those of an encoder, which samples nothing."""
    from jaxllm.engine.core.registry import Features
    from jaxllm.engine.features.readout import PoolingFeature

    return Features([PoolingFeature()])
