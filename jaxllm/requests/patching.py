"""What takes the place of a request's residual stream, at single layers and tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np

from jaxllm.errors import InvalidRequestError

MOST_BYTES = 2**28
"""Of the patches of one request, as float32."""

Patch = Mapping[tuple[int, int], Any]
"""`{(layer, position): [E]}`: what the stream is, as it leaves the layer, at that token of prompt and completion."""
Patches = Patch | Sequence[Patch | None] | None
"""That of all prompts, or for each prompt one or none."""


@dataclass(frozen=True)
class Patching:
    """All patches of a request, by position.

    Attributes:
        places: (position, layer) of each, ascending.
        values: float32 `[patches, E]`.
        digest: the same for requests that are patched alike, and for no others.
    """

    places: tuple[tuple[int, int], ...]
    values: bytes
    digest: str

    @cached_property
    def rows(self) -> np.ndarray:
        """The values, `[patches, E]`."""
        return np.frombuffer(self.values, np.float32).reshape(len(self.places), -1)

    @property
    def end(self) -> int:
        """The first position behind all that are patched."""
        return self.places[-1][0] + 1

    def among(self, positions: range) -> list[int]:
        """Which of the patches are of neighbouring positions."""
        return [index for index, (position, _) in enumerate(self.places) if position in positions]


def patches_of(given: Patches, count: int) -> list[Patch]:
    """Those of each of `count` prompts.

    Raises:
        InvalidRequestError: there is an entry for each of another number of prompts.
    """
    if given is None or isinstance(given, Mapping):
        return [given or {}] * count
    given = list(given)
    if len(given) != count:
        raise InvalidRequestError(
            f"patch has {len(given)} entries for {count} prompts; give one for all, or one a prompt", "patch"
        )
    return [entry or {} for entry in given]


def read_patch(patch: Patch, num_prompt: int, *, num_layers: int, width: int, longest: int) -> Patching | None:
    """The patches of a prompt of so many tokens, in a context of `longest`; None without any.

    Raises:
        InvalidRequestError: a layer, a position or a value that this model does not have.
    """
    if not patch:
        return None
    most = MOST_BYTES // (4 * width)
    if len(patch) > most:
        raise InvalidRequestError(f"patch has {len(patch)} entries; accepted are up to {most}", "patch")
    found: dict[tuple[int, int], np.ndarray] = {}
    for place, given in patch.items():
        layer, position = _place(place)
        if not -num_layers <= layer < num_layers:
            raise InvalidRequestError(f"patch has layer {layer}; layers go from 0 to {num_layers - 1}", "patch")
        if not -num_prompt <= position < longest:
            raise InvalidRequestError(
                f"patch has position {position}; of a prompt of {num_prompt} tokens, in a context of {longest}, they "
                f"go from {-num_prompt} to {longest - 1}",
                "patch",
            )
        value = np.asarray(given, np.float32)
        if value.shape != (width,) or not np.isfinite(value).all():
            raise InvalidRequestError(
                f"patch has {list(value.shape)} for {place}; it must be [{width}], and finite", "patch"
            )
        settled = (position % num_prompt if position < 0 else position, layer % num_layers)
        if settled in found:
            raise InvalidRequestError(
                f"patch has two entries for layer {settled[1]} at position {settled[0]}; it must have one", "patch"
            )
        found[settled] = value
    places = tuple(sorted(found))
    values = np.stack([found[place] for place in places]).tobytes()
    return Patching(places, values, hashlib.sha256(repr(places).encode() + values).hexdigest())


def _place(place: Any) -> tuple[int, int]:
    pair = isinstance(place, tuple) and len(place) == 2
    if not pair or not all(isinstance(number, Integral) and not isinstance(number, bool) for number in place):
        raise InvalidRequestError(f"patch has the key {place!r}; it must be (layer, position)", "patch")
    return int(place[0]), int(place[1])
