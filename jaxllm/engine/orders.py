"""What an engine is told to do besides running requests."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    import jax

PauseMode = Literal["keep", "wait"]
"""What becomes of running requests: they stop where they are, or run to their ends."""


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Run no steps, until `Resume`. With "wait" no request begins any more, and it is done when none runs."""

    mode: PauseMode


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Go on."""


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Later requests find nothing that earlier ones have computed."""


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Run with the weights of the model `source`, which are called `version` from then on."""

    source: str
    version: str


class NameWeights(msgspec.Struct, tag=True, frozen=True):
    """Call the weights that are there `version`."""

    version: str


Order = Pause | Resume | ResetPrefixCache | UpdateWeights | NameWeights

WeightSource = str | PathLike[str] | Mapping[str, Any]
"""A model's name, folder or file; or arrays by the names of the engine's checkpoint, or by those of `LLM.params`."""

NewWeights = dict[int, np.ndarray]
"""Arrays in host memory, as the devices keep them, by their place among those of the model's parameters."""


class ReadsWeights(Protocol):
    """Reads other weights for an engine, and exchanges them on its devices."""

    def read(self, source: WeightSource) -> NewWeights:
        """Those of `source`, as the engine keeps them. Any thread may call this; the engine runs on meanwhile.

        Raises:
            ConfigError: this engine cannot exchange its weights.
            ModelNotFoundError, CheckpointError: `source` is not there, or is of another model.
        """

    def exchange(self, weights: list[jax.Array], new: NewWeights) -> tuple[jax.Array, ...]:
        """The devices' arrays with the new ones in their places; each old one leaves `weights` before."""
