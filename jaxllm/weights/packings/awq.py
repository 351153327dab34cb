"""AWQ (arXiv:2306.00978) as AutoAWQ writes it for its GEMM kernel, or in Marlin's order.

    qweight  int32 [i, o / 8]           eight outputs in a word, evens first
    qzeros   int32 [i / group, o / 8]   likewise
    scales   [i / group, o]

Published at https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.quantization.stored import Codes, Coding
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, NULL, TEXT, check_fields, either, whole
from jaxllm.weights.packings.marlin import marlin
from jaxllm.weights.packings.module import FLOATS, Packed, Parts, modules, unpack, unsupported

BITS, IN_WORD = 4, 8
ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Which output each nibble of a word is, lowest first."""
VERSIONS = ("gemm", "marlin")
FIELDS = {
    "bits": whole(1, 32),
    "group_size": either(whole(1, 2**20), whole(-1, -1)),
    "version": either(TEXT, NULL),
    "format": either(TEXT, NULL),
    "zero_point": FLAG,
}


def find(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    """Every matrix of an AWQ checkpoint by its name."""
    names = {"w_bit": "bits", "q_group_size": "group_size"}  # as AutoAWQ calls them in a file of its own
    config = {names.get(key, key): value for key, value in config.items()}
    check_fields(config, FIELDS, "quantization_config.")
    version = (config.get("version") or config.get("format") or "gemm").lower()
    if config.get("bits", BITS) != BITS:
        raise unsupported("AWQ", "bits", config["bits"], "4")
    if version not in VERSIONS:
        raise unsupported("AWQ", "version", version, " or ".join(VERSIONS))
    group = config.get("group_size", 128)
    found = {}
    for prefix in modules(checkpoint, ".qweight"):
        parts = Parts(checkpoint, prefix, f"{prefix}.weight")
        found[parts.name] = (
            marlin(parts, ".qweight", ".scales", group) if version == "marlin" else _matrix(parts, group)
        )
    return found


def _matrix(parts: Parts, group_size: int) -> Packed:
    inputs, words = parts.info(".qweight", ("I32",), rank=2).shape
    outputs, group = words * IN_WORD, inputs if group_size == -1 else group_size
    groups = inputs // group
    if inputs % group:
        raise parts.error(f"has {inputs} inputs, which groups of {group} (group_size) do not divide")
    scale = parts.expect(".scales", tuple(FLOATS), (groups, outputs)).dtype
    parts.expect(".qzeros", ("I32",), (groups, words))
    coding = Coding(BITS, (1, group), FLOATS[scale], symmetric=False)

    def read() -> tuple[np.ndarray, Codes]:
        codes, zeros = _outputs(parts.array(".qweight")), _outputs(parts.array(".qzeros"))
        return codes.T, Codes(coding, parts.array(".scales").T, zeros.T)

    return parts.packed("AWQ 4-bit", (outputs, inputs), coding, read)


def _outputs(words: np.ndarray) -> np.ndarray:
    """`[n, o / 8]` words as `[n, o]` codes."""
    nibbles = unpack(words, BITS).reshape(len(words), -1, IN_WORD)
    return nibbles[..., np.argsort(ORDER)].reshape(len(words), -1)
