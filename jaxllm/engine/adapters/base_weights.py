"""The model's own weights, which are read once more for adapters whose numbers depend on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import ParamSpec, read_rows
from jaxllm.weights.names import NameMap


class BaseWeights:
    """Reads parameters from the model's checkpoint, which is opened by the first of them; to be closed."""

    def __init__(self, open_checkpoint: Callable[[], Checkpoint], names: NameMap):
        self._open, self._names = open_checkpoint, names
        self._checkpoint: Checkpoint | None = None

    def rows(self, parameter: ParamSpec) -> Float[np.ndarray, "o *i"]:
        """A whole parameter in the order of its tensors, before it is laid out for several devices."""
        if self._checkpoint is None:
            self._checkpoint = self._open()
        return read_rows(self._checkpoint, parameter, self._names)

    def close(self) -> None:
        """Release the files, if any were opened."""
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
