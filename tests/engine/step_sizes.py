"""Sizes of an engine whose steps are looked at by themselves, and what these are made of."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.step import StepFunctions
from jaxllm.models.caches import CacheLayout, Paged
from jaxllm.sharding.mesh import build_meshes

PAGED = Paged(1, (8, 8))


def step_sizes(**fields: Any) -> StepSizes:
    """Those of an engine of one layer of plain attention, but for `fields`."""
    page = fields.get("page_size", 8)
    found: dict[str, Any] = {
        "max_num_seqs": 8, "max_num_batched_tokens": 64, "decode_steps": 1, "max_model_len": 128, "page_size": page,
        "num_pages": 16, "num_snapshots": 0, "caches": (PAGED,), "hidden_size": 16, "vocab_size": 100,
        "cache_layout": CacheLayout(np.dtype("float32"), page), "dtype": jnp.float32,
    }  # fmt: skip
    return StepSizes(**found | fields)


class NoModel(StepFunctions):
    """Makes steps that have nothing to do with a model."""

    def __init__(self, sizes: StepSizes, features: Features):
        self.sizes, self.features = sizes, features
        self.state = StateShapes(build_meshes(1)[0], sizes, jnp.float32, features)
