"""Control vectors from GGUF files, as llama.cpp's generator and repeng write them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.folders import in_home
from jaxllm.requests.steering import Steer
from jaxllm.weights.gguf_file import GGUFCheckpoint

ARCHITECTURE = "controlvector"


def control_vector(path: Path, scale: float, layers: tuple[int, int] | None) -> list[Steer]:
    """Those of the layers from the first to the last that are asked for: `direction.N` is added as layer N ends.

    Raises:
        CheckpointError: it is no file of control vectors, or has none for these layers.
    """
    path = in_home(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; accepted is a GGUF file of control vectors")
    file = GGUFCheckpoint(path)
    try:
        kind = file.config.get("general.architecture")
        if kind != ARCHITECTURE:
            raise CheckpointError(f"{path}: its general.architecture is {kind!r}; it must be {ARCHITECTURE!r}")
        found = {}
        for name in file.tensors:
            matched = re.fullmatch(r"direction\.(\d+)", name)
            if matched is None:
                raise CheckpointError(f"{path}: tensor {name!r}; a file of control vectors has direction.N alone")
            found[int(matched[1])] = np.array(file.read(name).expand(), np.float32).reshape(-1)
    finally:
        file.close()
    first, last = layers or (0, max(found, default=0))
    steers = [Steer(layer, found[layer], scale) for layer in sorted(found) if first <= layer <= last]
    if not steers:
        raise CheckpointError(f"{path}: has no vector for the layers {first} to {last}")
    return steers
