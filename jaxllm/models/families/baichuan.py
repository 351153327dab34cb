"""Baichuan 1 and 2: Llama with q, k and v in one tensor; the 13B models have ALiBi (arXiv:2309.10305)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.hf import hf_fields
from jaxllm.models.layers.alibi import USUAL_STEEPNESS
from jaxllm.weights.names import Pattern, Source

LAYERS_OF_13B, SIZE_OF_13B = 40, 5120
"""By which files of either format are known, as they do not say which positions they have."""
VOCAB_OF_2 = 125_696
"""By which the second version is known, whose head has rows of length one."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """transformers has no class of it: keys are those of the code that is published with the weights."""
    layers, longest = c["num_hidden_layers"], c.get("max_position_embeddings") or c.get("model_max_length") or 4096
    fields = hf_fields(c | {"max_position_embeddings": longest}, **_positions(layers, c["hidden_size"]))
    return DecoderConfig(**fields)


def _positions(layers: int, size: int) -> dict[str, Any]:
    """What a model has that does not rotate, from its layers and the channels of each; nothing of one that does."""
    if layers != LAYERS_OF_13B and size != SIZE_OF_13B:
        return {}
    return {"layers": (LayerKind(None),) * layers, "alibi": USUAL_STEEPNESS}


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The second version's head is divided by the length of each row when it is loaded."""
    names: dict[str, Pattern] = {"layers.*.attention.qkv.weight": "model.layers.*.self_attn.W_pack.weight"}
    return names | ({"head.weight": Source("lm_head.weight", unit_rows)} if config.vocab_size == VOCAB_OF_2 else {})


def unit_rows(weight: np.ndarray) -> np.ndarray:
    """Each row divided by its length."""
    weight = weight.astype(np.float32)
    return weight / np.maximum(np.linalg.norm(weight, axis=1, keepdims=True), np.float32(1e-12))


FAMILY = Family(
    name="Baichuan",
    models="Baichuan 7B, 13B, Baichuan2 7B, 13B",
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    model_types=("baichuan",),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("baichuan",),
    gguf={},
    gguf_names=permuted_names,
)
