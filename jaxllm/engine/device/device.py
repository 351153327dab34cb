"""What one engine has on its devices, and the one way to work with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jaxllm.engine.device.executables import Compiles, Executables
from jaxllm.engine.device.keys import PLAIN, USES, Key, Kind, Variant
from jaxllm.engine.device.step import DeviceState


class Device:
    """The only owner of weights, pages, slots, hidden states and executables.

    A step is a small message, `(key, host vectors)`: whoever sends the same ones to two Devices of the same plan finds
    the same on both.
    """

    def __init__(self, executables: Executables, weights: tuple[jax.Array, ...], state: DeviceState):
        self._executables = executables
        self._parts: dict[str, Any] = {"weights": weights, **state._asdict()}
        self.most_rows = executables.most_rows
        """Rows of the largest head, and of the one bucket that scores prompt tokens."""

    def run(self, key: Key, *vectors: Any) -> Any:
        """Enqueue one step without waiting for the devices; compile it now if it has not been.

        `vectors` are what the host sends, as `StepFunctions` says for each kind. Returns arrays that the devices are
        still to fill, or None where the step only changes what the Device owns.
        """
        uses = USES[key.kind]
        found = self._executables.get(key)(*(self._parts[name] for name in uses.takes), *vectors)
        self._parts.update(zip(uses.gives, found, strict=False))
        return found[-1] if uses.output else None

    def covering(self, kind: Kind, needed: int, variant: Variant = PLAIN) -> Key:
        """The step for `needed` rows or tokens: the smallest that is compiled and does all that `variant` does."""
        return self._executables.covering(kind, needed, variant)

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those whose first use would hold up every request."""
        return self._executables.missing(keys)

    def compile(self, key: Key) -> None:
        """Wait until a step can be run at once. Any thread may call this."""
        self._executables.get(key)

    @property
    def compiles(self) -> Compiles:
        """How much has been compiled, and how much is still to be."""
        return self._executables.compiles

    def close(self) -> None:
        """Compile nothing more. Any thread may call this."""
        self._executables.close()
