"""A checkpoint with adapters in its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.quantization.stored import Stored
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.packed_file import PackedCheckpoint

Edit = Callable[[np.ndarray], np.ndarray]
"""A tensor as float32 -> what it becomes."""


class MergedCheckpoint:
    """A checkpoint some of whose tensors are edited when they are read, and are float32 then; see `Checkpoint`.

    Attributes:
        edited: the names of those tensors.
        zero_biases: see `PackedCheckpoint`.
    """

    def __init__(
        self,
        base: Checkpoint,
        edits: Mapping[str, Sequence[Edit]],
        copies: Mapping[str, str],
        config: dict[str, Any],
    ):
        """`copies` are tensors that the base does not have, and those of it that they begin as."""
        self._base = base
        self.edited = frozenset(edits)
        self.format, self.path, self.generation_config = base.format, base.path, base.generation_config
        self.config = config
        self.zero_biases = base.zero_biases if isinstance(base, PackedCheckpoint) else ()
        self._edits, self._copies = edits, copies
        self.tensors = dict(base.tensors) | {name: base.tensors[copied] for name, copied in copies.items()}
        self.tensors |= {name: TensorInfo(self.tensors[name].shape, "F32") for name in edits}

    def stored_type(self, name: str) -> str:
        """The type that the base has a tensor in."""
        return self._base.tensors[self._copies.get(name, name)].dtype

    def read(self, name: str) -> Stored:
        """One tensor: as the base has it, or float32 where it is edited."""
        stored = self._base.read(self._copies.get(name, name))
        if name not in self._edits:
            return stored
        values = np.asarray(stored.expand(), np.float32)
        for edit in self._edits[name]:
            values = edit(values)
        return Stored(values, "F32", values.shape, origin=stored.origin)

    def close(self) -> None:
        """Release the files."""
        self._base.close()
