"""torchao's tensors as it flattens them for safetensors, those that are codes by integers or e4m3, each by itself.

    NAME._weight_qdata       int8 [o, i] (Int8Tensor, IntxUnpackedToInt8Tensor), or float8_e4m3fn [o, i] (Float8Tensor)
    NAME._weight_scale       [o, 1] or [o, i / group]
    NAME._weight_zero_point  int8, likewise; not of all

So they are compressed-tensors' under other names. Published at https://github.com/pytorch/ao
"""

from __future__ import annotations

from typing import Any

from jaxllm.quantization.stored import Stored
from jaxllm.weights.checkpoint import Checkpoint, WrappedCheckpoint
from jaxllm.weights.fields import shown
from jaxllm.weights.packings.compressed_tensors import find_compressed_tensors
from jaxllm.weights.packings.module import Packed, unsupported

CODES, PARTS = "._weight_qdata", {"qdata": ".weight", "scale": ".weight_scale", "zero_point": ".weight_zero_point"}


class _Renamed(WrappedCheckpoint):
    """The checkpoint under compressed-tensors' names."""

    def __init__(self, base: Checkpoint):
        super().__init__(base)
        self.stored = {name: name for name in base.tensors}
        for part, suffix in PARTS.items():
            before = f"._weight_{part}"
            named = [name for name in base.tensors if name.endswith(before)]
            self.stored = {n: s for n, s in self.stored.items() if n not in named}
            self.stored |= {name.removesuffix(before) + suffix: name for name in named}
        self.tensors = {name: base.tensors[stored] for name, stored in self.stored.items()}

    def read(self, name: str) -> Stored:
        return self._base.read(self.stored[name])


def find_torchao(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    renamed = _Renamed(checkpoint)
    found = find_compressed_tensors(renamed, {})
    hidden = {name: packed._replace(tensors=frozenset(renamed.stored[part] for part in packed.tensors))
              for name, packed in found.items()}  # fmt: skip
    for name, info in checkpoint.tensors.items():
        if name.endswith(CODES) and name.removesuffix(CODES) + ".weight" not in hidden:
            kinds = "Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor"
            raise unsupported("torchao", "quant_type", f"{shown(name)}, {info.dtype} {info.shape}", kinds)
    return hidden
