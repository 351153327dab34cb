"""Which activations a request is to give, and what they look like to its caller."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.shown import Axis, dataset, heat_map, root_mean_square
from jaxllm.wording import did_you_mean

if TYPE_CHECKING:
    import xarray

POINTS = ("residual_before", "attention_out", "residual_middle", "mlp_out", "residual")
"""The places in a layer whose activations can be given: the residual stream as it enters, the mixer's addition to it
(attention, a convolution, a recurrence), the stream after that, the MLP's addition, and the stream as it leaves."""
CACHED = ("keys", "values")
"""What attention keeps of each token in the KV cache, as it keeps it: after any norm and rotation."""
TAPPED = (*POINTS, *CACHED)
FINAL = "final"
"""The hidden states after the last norm, which the head reads."""

TRANSFORMER_LENS = {
    "hook_resid_pre": "residual_before",
    "hook_attn_out": "attention_out",
    "hook_resid_mid": "residual_middle",
    "hook_mlp_out": "mlp_out",
    "hook_resid_post": "residual",
    "attn.hook_rot_k": "keys",
    "attn.hook_v": "values",
}
"""TransformerLens's names behind "blocks.N.", and ours."""

Tap = tuple[str, int]
"""An activation: its name, and its layer, which is -1 for `FINAL`."""
CaptureRequest = Mapping[str, int | bool | Sequence[int]] | Sequence[str]
"""`{"residual": [3, 12], "final": True}`; True means every layer, and a list has TransformerLens's names."""
Positions = Literal["all", "prompt", "generated", "last"] | tuple[int, ...]
"""Of which tokens. "last" is the prompt's last one; numbers count from the prompt's first, or back from its end."""


@dataclass(frozen=True)
class LayerShapes:
    """What a model's layers have of each token.

    Attributes:
        width: E, of the residual stream.
        heads: of each layer the KV heads and their size, where it has keys and values of its own.
    """

    width: int
    heads: tuple[tuple[int, int] | None, ...]

    def having(self, name: str) -> list[int]:
        """The layers that have an activation of this name."""
        return [layer for layer, heads in enumerate(self.heads) if name not in CACHED or heads is not None]

    def of(self, tap: Tap) -> tuple[int, ...]:
        name, layer = tap
        heads = self.heads[layer] if name in CACHED else None
        return (self.width,) if heads is None else heads

    @property
    def widest(self) -> int:
        """The numbers of the largest activation of a token."""
        return max(self.width, *(math.prod(heads) for heads in self.heads if heads is not None), 0)


@dataclass(frozen=True)
class CaptureParams:
    """The activations that a request is to give, in this order, of these shapes, and at which tokens."""

    taps: tuple[Tap, ...]
    positions: Positions = "all"
    shapes: tuple[tuple[int, ...], ...] = ()

    def first(self, num_prompt: int) -> int:
        """The first position that is wanted of a request with a prompt of so many tokens."""
        if isinstance(self.positions, tuple):
            return min(_counted(self.positions, num_prompt))
        return {"all": 0, "prompt": 0, "generated": num_prompt, "last": num_prompt - 1}[self.positions]

    def among(self, positions: range, num_prompt: int) -> list[int]:
        """The wanted ones of neighbouring positions."""
        if isinstance(self.positions, tuple):
            wanted = set(_counted(self.positions, num_prompt))
            return [position for position in positions if position in wanted]
        end = {"all": positions.stop, "generated": positions.stop}.get(self.positions, num_prompt)
        return list(range(max(positions.start, self.first(num_prompt)), min(positions.stop, end)))


def _counted(positions: tuple[int, ...], num_prompt: int) -> list[int]:
    return [position if position >= 0 else num_prompt + position for position in positions]


def read_capture(capture: CaptureRequest, positions: str | Sequence[int], layers: LayerShapes) -> CaptureParams:
    """The captures that a caller asks for, by our names or TransformerLens's. Raises InvalidRequestError."""
    num_layers = len(layers.heads)
    if isinstance(capture, str):
        capture = [capture]
    if not isinstance(capture, Mapping):
        taps = [_of_transformer_lens(name) for name in capture]
    else:
        taps = [tap for name, wanted in capture.items() for tap in _of_layers(name, wanted, layers)]
    for name, layer in taps:
        if name != FINAL and not -num_layers <= layer < num_layers:
            raise _refused(f"has layer {layer} of {name!r}; layers go from 0 to {num_layers - 1}")
    settled = dict.fromkeys((name, layer % num_layers if name != FINAL else -1) for name, layer in taps)
    if not settled:
        raise _refused("names no activation; it must have one")
    for name, layer in settled:
        if name in CACHED and layer not in layers.having(name):
            known = ", ".join(map(str, layers.having(name))) or "none"
            raise _refused(f"has layer {layer} of {name!r}; layers with {name} of their own are {known}")
    return CaptureParams(tuple(settled), _positions(positions), tuple(map(layers.of, settled)))


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"capture {problem}", "capture")


def _of_layers(name: str, wanted: object, layers: LayerShapes) -> list[Tap]:
    if name == FINAL:
        if wanted is not True:
            raise _refused(f"has {wanted!r} for 'final', which is of no layer; it must be True")
        return [(FINAL, -1)]
    if name not in TAPPED:
        if name.startswith("blocks."):
            problem = "TransformerLens's names go into a list: capture=['blocks.3.hook_resid_post']"
            raise InvalidRequestError(problem, "capture")
        known = (*TAPPED, FINAL)
        raise _refused(f"has {name!r}{did_you_mean(name, known)}; accepted are {', '.join(known)}")
    found = layers.having(name) if wanted is True else []
    found = found or integers(wanted)
    if not found:
        raise _refused(f"has {wanted!r} for {name!r}; it must be a layer, a list of layers, or True for all")
    return [(name, layer) for layer in found]


def _of_transformer_lens(name: str) -> Tap:
    found = re.fullmatch(r"blocks\.(\d+)\.([\w.]+)", name)
    if found is None or found[2] not in TRANSFORMER_LENS:
        known = ", ".join(f"blocks.N.{hook}" for hook in TRANSFORMER_LENS)
        raise _refused(f"has {name!r}; in a list accepted are {known}")
    return TRANSFORMER_LENS[found[2]], int(found[1])


def _positions(positions: str | Sequence[int]) -> Positions:
    if positions in ("all", "prompt", "generated", "last"):
        return positions  # type: ignore[return-value]
    numbers = tuple(integers(positions))
    if not numbers:
        accepted = "it must be 'all', 'prompt', 'generated', 'last', or a list of integers"
        raise InvalidRequestError(f"positions is {positions!r}; {accepted}", "positions")
    return numbers


def integers(given: object) -> list[int]:
    """A number, or several, as a list; empty where it is neither."""
    several = [given] if isinstance(given, Integral) else list(given) if isinstance(given, Iterable) else []
    whole = all(isinstance(number, Integral) and not isinstance(number, bool) for number in several)
    return [int(number) for number in several] if whole else []


class Captures(Mapping[str, dict[int, np.ndarray]]):
    """Activations of one sequence: `captures["residual"][12]` is `[n, E]` float32, a row for each of `positions`; keys
    and values are `[n, K, D]`.

    `captures.final` are the states after the last norm. TransformerLens's names work too:
    `captures.array("blocks.12.hook_resid_post")`.
    """

    def __init__(self, taps: Sequence[Tap], positions: np.ndarray, values: Sequence[np.ndarray]):
        self.positions = positions
        self.values_by_tap = dict(zip(taps, values, strict=True))

    def __getitem__(self, name: str) -> dict[int, np.ndarray]:
        found = {layer: array for (point, layer), array in self.values_by_tap.items() if point == name}
        if not found:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self.values_by_tap))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        said = ", ".join(f"{name}: [{_ranges(layers)}]" if name != FINAL else name for name, layers in self.items())
        return f"Captures({said}; {len(self.positions)} positions)"

    @property
    def final(self) -> np.ndarray:
        return self.values_by_tap[FINAL, -1]

    def array(self, name: str) -> np.ndarray:
        """The activation that TransformerLens calls `name`."""
        return self.values_by_tap[_of_transformer_lens(name)]

    def to_xarray(self) -> xarray.Dataset:
        """A variable for each name with layer, position and channel. Raises ConfigError: xarray is not installed."""
        return dataset(self.positions, {tap: _flat(array) for tap, array in self.values_by_tap.items()}, FINAL)

    def _repr_html_(self) -> str:
        """Of each name the sizes of its vectors, layer by layer; of one layer alone the sizes of its channels."""
        positions = Axis("position", [str(position) for position in self.positions])
        parts = [repr(self)]
        for name, layers in self.items() if len(self.positions) else ():
            if len(layers) > 1:
                sizes = np.stack([root_mean_square(_flat(array), -1) for array in layers.values()])
                rows = Axis("layer", [*map(str, layers)])
                parts.append(heat_map(f"{name}, root mean square", sizes, rows, positions))
            else:
                [(layer, array)] = ((layer, _flat(array)) for layer, array in layers.items())
                title = name if layer < 0 else f"{name} of layer {layer}"
                channels = Axis("channel", [*map(str, range(array.shape[-1]))])
                parts.append(heat_map(f"{title}, absolute values", np.abs(array), positions, channels))
        return "".join([f"<div>{escape(parts[0])}</div>", *parts[1:]])


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1)


def _ranges(layers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> 0-2, 5"""
    ends: list[list[int]] = []
    for layer in layers:
        if ends and layer == ends[-1][1] + 1:
            ends[-1][1] = layer
        else:
            ends.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


class CapturesInProgress:
    """Rows of a sequence's activations as they come, in any order and some perhaps twice."""

    def __init__(self, params: CaptureParams, width: int):
        self._params = params
        self._width = width
        self._rows: dict[int, np.ndarray] = {}

    def add(self, positions: Sequence[int], values: bytes) -> None:
        """float32 `[activations, positions, width]`; those that were computed again take the place of earlier ones."""
        shape = (len(self._params.taps), len(positions), self._width)
        rows = np.frombuffer(values, np.float32).reshape(shape).swapaxes(0, 1)
        self._rows |= zip(positions, rows, strict=True)

    def finish(self) -> Captures:
        positions = sorted(self._rows)
        rows = [self._rows[position] for position in positions]
        values = np.stack(rows, axis=1) if rows else np.zeros((len(self._params.taps), 0, self._width), np.float32)
        shaped = zip(values, self._params.shapes, strict=True)
        cut = [found[:, : math.prod(shape)].reshape(-1, *shape) for found, shape in shaped]  # the rest is padding
        return Captures(self._params.taps, np.array(positions, np.int64), cut)
