"""What a request changes in the model: adapters, vectors added to its residual stream, values that replace it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import Any

import msgspec
import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.captures import integers


@dataclass(frozen=True, eq=False)
class Steer:
    """A vector that is added to the residual stream as it leaves a layer (Turner et al. 2023, arXiv:2308.10248).

    Attributes:
        layer: counted from 0, or back from the last with -1.
        vector: `[E]`, anything that NumPy makes an array of.
        scale: a factor on it.
        positions: "all", "prompt", "generated", or `(start, stop)`, tokens of prompt and completion counted together.
    """

    layer: int
    vector: Any
    scale: float = 1.0
    positions: str | tuple[int, int] = "all"


@dataclass(frozen=True)
class Steering:
    """All vectors of a request, summed.

    Attributes:
        layers: those whose streams are changed, ascending.
        vectors: float32 `[layers, E]`.
        start, stop: the tokens from `start` to before `stop` are concerned.
        digest: the same for requests that are steered alike, and for no others.
    """

    layers: tuple[int, ...]
    vectors: bytes
    start: int
    stop: int
    digest: str

    def rows(self) -> np.ndarray:
        return np.frombuffer(self.vectors, np.float32).reshape(len(self.layers), -1)


Steers = Steer | Sequence[Steer] | Sequence[Steer | Sequence[Steer] | None] | None
"""Those of all prompts, or for each prompt one, several or none."""


def steers_of(given: Steers, count: int) -> list[list[Steer]]:
    """The entries of each of `count` prompts. Raises InvalidRequestError if they are for another number of prompts."""
    if given is None or isinstance(given, Steer):
        return [[] if given is None else [given]] * count
    given = list(given)
    if all(isinstance(entry, Steer) for entry in given):
        return [[entry for entry in given if isinstance(entry, Steer)]] * count
    if len(given) != count:
        raise _refused(f"has {len(given)} entries for {count} prompts; give those of all, or a list for each prompt")
    return [[] if entry is None else [entry] if isinstance(entry, Steer) else list(entry) for entry in given]


def read_steering(
    steers: Sequence[Steer], num_prompt: int, *, num_layers: int, width: int, longest: int
) -> Steering | None:
    """The sum of vectors for a prompt, in a context of `longest`; None without any. Raises InvalidRequestError."""
    if not steers:
        return None
    ranges = {_range(steer.positions, num_prompt, longest): steer.positions for steer in steers}
    if len(ranges) > 1:
        different = " and ".join(map(repr, ranges.values()))
        raise _refused(f"has vectors for the positions {different}; those of one request must be for the same ones")
    sums: dict[int, np.ndarray] = {}
    for steer in steers:
        if not -num_layers <= steer.layer < num_layers:
            raise _refused(f"has layer {steer.layer}; layers go from 0 to {num_layers - 1}")
        vector = np.asarray(steer.vector, np.float32)
        if vector.shape != (width,) or not np.isfinite(vector * steer.scale).all():
            said = f"has a vector {list(vector.shape)} for layer {steer.layer}"
            raise _refused(f"{said}; it must be [{width}], and finite")
        layer = steer.layer % num_layers
        sums[layer] = sums.get(layer, np.zeros(width, np.float32)) + np.float32(steer.scale) * vector
    layers, [(start, stop)] = tuple(sorted(sums)), ranges
    vectors = np.stack([sums[layer] for layer in layers]).tobytes()
    digest = hashlib.sha256(repr((layers, start, stop)).encode() + vectors).hexdigest()
    return Steering(layers, vectors, start, stop, digest)


def _range(positions: str | tuple[int, int], num_prompt: int, longest: int) -> tuple[int, int]:
    if isinstance(positions, str):
        named = {"all": (0, longest), "prompt": (0, num_prompt), "generated": (num_prompt, longest)}
        if positions in named:
            return named[positions]
    elif len(positions) == 2 and 0 <= positions[0] < positions[1]:
        return positions[0], min(positions[1], longest)
    accepted = "'all', 'prompt', 'generated', or (start, stop) with 0 <= start < stop"
    raise _refused(f"has the positions {positions!r}; they must be {accepted}")


def _refused(problem: str, field: str = "steer") -> InvalidRequestError:
    return InvalidRequestError(f"{field} {problem}", field)


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
        return np.frombuffer(self.values, np.float32).reshape(len(self.places), -1)

    @property
    def end(self) -> int:
        """The position after the last patched one."""
        return self.places[-1][0] + 1

    def among(self, positions: range) -> list[int]:
        return [index for index, (position, _) in enumerate(self.places) if position in positions]


def patches_of(given: Patches, count: int) -> list[Patch]:
    """The entries of each of `count` prompts. Raises InvalidRequestError if they are for another number of prompts."""
    if given is None or isinstance(given, Mapping):
        return [given or {}] * count
    given = list(given)
    if len(given) != count:
        raise _refused(f"has {len(given)} entries for {count} prompts; give one for all, or one a prompt", "patch")
    return [entry or {} for entry in given]


def read_patch(patch: Patch, num_prompt: int, *, num_layers: int, width: int, longest: int) -> Patching | None:
    """The patches of a prompt, in a context of `longest`; None without any. Raises InvalidRequestError."""
    if not patch:
        return None
    most = MOST_BYTES // (4 * width)
    if len(patch) > most:
        raise _refused(f"has {len(patch)} entries; accepted are up to {most}", "patch")
    found: dict[tuple[int, int], np.ndarray] = {}
    for place, given in patch.items():
        numbers = integers(place) if isinstance(place, tuple) else []
        if len(numbers) != 2:
            raise _refused(f"has the key {place!r}; it must be (layer, position)", "patch")
        layer, position = numbers
        if not -num_layers <= layer < num_layers:
            raise _refused(f"has layer {layer}; layers go from 0 to {num_layers - 1}", "patch")
        if not -num_prompt <= position < longest:
            of = f"of a prompt of {num_prompt} tokens, in a context of {longest}"
            raise _refused(f"has position {position}; {of}, they go from {-num_prompt} to {longest - 1}", "patch")
        value = np.asarray(given, np.float32)
        if value.shape != (width,) or not np.isfinite(value).all():
            raise _refused(f"has {list(value.shape)} for {place}; it must be [{width}], and finite", "patch")
        settled = (position % num_prompt if position < 0 else position, layer % num_layers)
        if settled in found:
            raise _refused(
                f"has two entries for layer {settled[1]} at position {settled[0]}; it must have one", "patch"
            )
        found[settled] = value
    places = tuple(sorted(found))
    return _patching(places, np.stack([found[place] for place in places]))


EMBEDDINGS = -1
"""In a Patching, the place of a layer: the value is what the model takes for a token, and not what leaves a layer."""


def read_embeds(given: Any, *, width: int, longest: int) -> Patching:
    """A prompt of vectors `[T, E]`, which stand where those of tokens do. Raises InvalidRequestError."""
    try:
        rows = np.asarray(given, np.float32)
    except (TypeError, ValueError):
        raise _refused("is no array of numbers", "prompt_embeds") from None
    rows = rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
    if rows.ndim != 2 or rows.shape[1] != width or not 0 < len(rows) < longest:
        raise _refused(
            f"is {list(rows.shape)}; it must be [tokens, {width}] of 1 to {longest - 1} tokens", "prompt_embeds"
        )
    if not np.isfinite(rows).all():
        raise _refused("has a number that is not finite", "prompt_embeds")
    return _patching(tuple((position, EMBEDDINGS) for position in range(len(rows))), rows)


def _patching(places: tuple[tuple[int, int], ...], rows: np.ndarray) -> Patching:
    values = rows.astype(np.float32).tobytes()
    return Patching(places, values, hashlib.sha256(repr(places).encode() + values).hexdigest())


class AdapterUse(msgspec.Struct, frozen=True):
    """One adapter, and how much of it is added; each version of it has an `id` of its own."""

    id: int
    name: str
    path: str
    scale: float = 1.0


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, in vLLM's words: `LoRARequest("sql", 1, "adapters/sql")`.

    Attributes:
        lora_name: what people call it.
        lora_int_id: its number, from 1; another adapter, or another version of it, needs another number.
        lora_path: a folder as PEFT saves it, or a GGUF file as llama.cpp's converter makes it.
        scale: how much of it is added; 1 is as it was trained.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | PathLike[str]
    scale: float = 1.0


LoRA = LoRARequest | Sequence[LoRARequest]
"""One adapter, or several that are added together."""


def adapter_uses(given: LoRA | None) -> tuple[AdapterUse, ...]:
    if given is None:
        return ()
    requests = [given] if isinstance(given, LoRARequest) else list(given)
    for request in requests:
        if not isinstance(request, LoRARequest):
            raise _refused(f"holds {request!r}; accepted are LoRARequests", "lora_request")
        if isinstance(request.scale, bool) or not isinstance(request.scale, (int, float)) or abs(request.scale) > 1e6:
            said = f"the scale of adapter {request.lora_name!r} is {request.scale!r}; accepted are numbers up to 1e6"
            raise InvalidRequestError(said, param="lora_request")
    return tuple(AdapterUse(r.lora_int_id, r.lora_name, fspath(r.lora_path), r.scale) for r in requests)
