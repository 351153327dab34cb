"""The one owner of what an engine has on its devices, and the one way to work with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import jax
import numpy as np

from jaxllm.engine.core.device_state import State, keep
from jaxllm.engine.core.executables import Compiles, Executables
from jaxllm.engine.core.keys import PLAIN, Key, Kind, Variant
from jaxllm.errors import EngineDeadError, one_line
from jaxllm.models.layers.host_experts import forgotten

MOST_RECENT = 256


class Device:
    """The only owner of weights, adapters, pages, slots, hidden states and executables.

    A step is a small message, `(key, host vectors)`: whoever sends the same ones to two Devices of the same plan finds
    the same on both.
    """

    def __init__(self, executables: Executables, weights: tuple[jax.Array, ...], state: State):
        self._executables = executables
        self._parts: dict[str, Any] = {"weights": weights, **state}
        self.features = executables.features
        self.most_rows = executables.most_rows
        """Rows of the largest head, and of the one bucket that scores prompt tokens."""
        self.num_parts = 1
        """Into how many parts a step is best divided, so that all devices have something to do."""
        self.recent: deque[Key] = deque(maxlen=MOST_RECENT)
        """The steps that have run lately; the runner clears it before each batch."""

    def run(self, key: Key, *vectors: Any) -> Any:
        """Enqueue one step without waiting for the devices; compile it now if it has not been.

        `vectors` are what the host sends, as `StepFunctions` says for each kind. Returns arrays that the devices are
        still to fill, or None where the step only changes what the Device owns.
        """
        uses = self.features.uses(key)
        for name in uses.takes:
            if name not in self._parts:
                self._parts[name] = self._executables.new_part(name)
        found = self._executables.get(key)(*(self._parts[name] for name in uses.takes), *vectors)
        self._parts.update(zip(uses.gives, found, strict=False))
        self.recent.append(key)
        return found[-1] if uses.output else None

    def all_decode(self, decodes: bool) -> bool:
        """The next step is best a decode: of a batch that `decodes`. Batches side by side ask each other (scale/)."""
        return decodes

    def wait(self) -> None:
        """Block until all steps have run."""
        jax.block_until_ready(self._parts)

    def covering(self, kind: Kind, needed: int, variant: Variant = PLAIN) -> Key:
        """The step for `needed` rows or tokens: the smallest that is compiled and does all that `variant` does."""
        return self._executables.covering(kind, needed, variant)

    def demanded(self, tokens: int, variant: Variant, decodes: bool) -> list[Key]:
        """With these, a request of that many tokens can run that not every step can; see `Executables`."""
        return self._executables.demanded(tokens, variant, decodes)

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """The keys whose first use would hold up every request."""
        return self._executables.missing(keys)

    def compile(self, key: Key) -> None:
        """Wait until a step can be run at once. Any thread may call this."""
        self._executables.get(key)

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """As every step takes them; see `StepFunctions.pack_weights`."""
        found: tuple[jax.Array, ...] = self._parts["weights"]
        return found

    def change_weights(self, change: Callable[[list[jax.Array]], tuple[jax.Array, ...]]) -> None:
        """Run later steps with what `change` makes of the weights; it is given the only references to them.

        Raises:
            EngineDeadError: it failed, and the weights are lost: no step runs again.
        """
        weights = list(self._parts.pop("weights"))
        try:
            self._parts["weights"] = change(weights)
            self._parts["caches"] = forgotten(self._parts["caches"])
        except Exception as error:
            raise EngineDeadError(f"the new weights could not be put onto the devices: {one_line(error)}") from error

    @property
    def hidden_dtype(self) -> np.dtype:
        """The dtype of the states that a head takes."""
        return np.dtype(self._parts["hidden"].dtype)

    def keep_weights(self, file: BinaryIO) -> None:
        """Leave the weights in a file; all else that is on the devices is given up first, and no step runs again."""
        keep(file, self.give_up())

    def give_up(self) -> tuple[jax.Array, ...]:
        """Part with everything, and return the weights."""
        weights = self.weights
        self._parts.clear()
        return weights

    @property
    def compiles(self) -> Compiles:
        """Counts of executables that are compiled and that are still to be."""
        return self._executables.compiles

    def close(self) -> None:
        """Compile nothing more. Any thread may call this."""
        self._executables.close()
