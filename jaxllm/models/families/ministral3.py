"""Ministral 3: Mistral with YaRN, and queries that grow with the position as in Llama 4."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GgufFile, rope_scaling
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope, hf_rope_parameters
from jaxllm.models.layers.attention import QueryScaling
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.fields import shown

ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""`rope_parameters` of a config that has none."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The query scaling is part of `rope_parameters`, or of `rope_scaling` in older files."""
    c = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144} | c
    parameters = hf_rope_parameters(c, ROPE)
    rope = hf_rope(c, hf_head_dim(c), parameters=parameters)
    layers = (LayerKind(rope, c.get("sliding_window")),) * c["num_hidden_layers"]
    return DecoderConfig(**hf_fields(c, layers=layers, query_scaling=query_scaling(parameters, rope)))


def query_scaling(parameters: dict[str, Any], rope: RopeConfig) -> QueryScaling | None:
    """The scaling that the rotary `parameters` describe, if they do."""
    beta = parameters.get("llama_4_scaling_beta")
    original = parameters.get("original_max_position_embeddings") or rope.original_length
    if beta and not original:
        raise CheckpointError(
            f"llama_4_scaling_beta is {shown(beta)} without original_max_position_embeddings; accepted are both or none"
        )
    return QueryScaling(beta, original) if beta else None


def _gguf_rope(file: GgufFile) -> dict[str, Any]:
    """The architecture is also that of Mistral Small 3, which has none of this."""
    given = rope_scaling(file, lambda multiplier: {"mscale": 1.0, "mscale_all_dim": multiplier})
    return given | {"llama_4_scaling_beta": file("attention.temperature_scale", 0.0)}


FAMILY = Family(
    name="Ministral 3",
    models="Ministral 3 3B, 8B, 14B (text)",
    architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("ministral3",),
    from_hf=from_hf,
    gguf_architectures=("mistral3",),
    gguf={"rope_scaling": _gguf_rope},
    gguf_names=permuted_names,
)
