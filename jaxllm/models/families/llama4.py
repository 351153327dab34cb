"""Llama 4, text: attention in chunks on three of four layers, no positions on the fourth, experts and a shared one."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, Table, optional
from jaxllm.models.hf import hf_expert_names, hf_fields, hf_head_dim, hf_rope
from jaxllm.models.layers.attention import QueryScaling
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.names import Pattern, Source, transposed

THETA = 500_000.0
INTERVAL = 4
CHUNK = 8192
BETA, FLOOR = 0.1, 8192
WITHOUT_NORM = 128
"""A GGUF file does not say whether queries and keys have a norm: they do not in the model of so many experts."""
DEFAULTS: dict[str, Any] = {
    "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
    "intermediate_size_mlp": 16_384, "num_local_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True,
    "attention_chunk_size": CHUNK, "attn_temperature_tuning": True, "attn_scale": BETA, "floor_scale": FLOOR,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`intermediate_size` is that of the experts; `no_rope_layers` has a 1 for each layer that does rotate."""
    c, bias = DEFAULTS | c, c.get("attention_bias", False)
    number, step = c["num_hidden_layers"], c.get("interleave_moe_layer_step", 1)
    interval, chunk = c.get("no_rope_layer_interval") or INTERVAL, c["attention_chunk_size"]
    rotating = c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(number)]
    sparse = c["moe_layers"] if c.get("moe_layers") is not None else range(step - 1, number, step)
    kinds = c.get("layer_types") or [
        "chunked_attention" if rotates and chunk is not None else "full_attention" for rotates in rotating
    ]
    rope = hf_rope(c, hf_head_dim(c), theta=THETA, interleaved=True)
    layers = tuple(
        LayerKind(
            rope if rotates else None,
            chunk if kind == "chunked_attention" else None,
            sparse=index in sparse,
            chunked=kind == "chunked_attention",
        )
        for index, (rotates, kind) in enumerate(zip(rotating, kinds, strict=True))
    )
    scaling = QueryScaling(c["attn_scale"], c["floor_scale"], first=1, unrotated_only=True)
    return DecoderConfig(
        **hf_fields(
            c | {"intermediate_size": c["intermediate_size_mlp"]},
            layers=layers,
            max_position_embeddings=c["max_position_embeddings"],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="unit" if c["use_qk_norm"] else None,
            query_scaling=scaling if c["attn_temperature_tuning"] else None,
            moe=_experts(c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"]),
        )
    )


def _experts(count: int, top_k: int, hidden: int) -> MoEConfig:
    return MoEConfig(
        num_experts=count, top_k=top_k, hidden=hidden, scoring="sigmoid", scale_inputs=True, shared_hidden=hidden
    )


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The experts' matrices lie `[in, out]`."""
    block = "model.layers.*.feed_forward"
    names: dict[str, Pattern] = {
        "layers.*.mlp.gate_up.weight": (f"{block}.gate_proj.weight", f"{block}.up_proj.weight"),
        "layers.*.mlp.down.weight": f"{block}.down_proj.weight",
    }
    return {
        **names,
        **hf_expert_names(config, block, shared="shared_expert"),
        "layers.*.mlp.router.weight": f"{block}.router.weight",
        "layers.*.mlp.experts.gate_up.weight": Source(f"{block}.experts.gate_up_proj", transposed),
        "layers.*.mlp.experts.down.weight": Source(f"{block}.experts.down_proj", transposed),
    }


def _gguf_chunked(file: GgufFile) -> bool:
    """A window of 0 says that all layers rotate and see everything."""
    return file("attention.sliding_window", CHUNK) != 0


GGUF: Table = GGUF_EXPERTS | {
    "intermediate_size_mlp": "feed_forward_length",
    "intermediate_size": "expert_feed_forward_length",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "rope_theta": optional("rope.freq_base", THETA),
    "no_rope_layers": lambda file: None if _gguf_chunked(file) else [1] * file.num_layers,
    "attention_chunk_size": lambda file: CHUNK if _gguf_chunked(file) else None,
    "attn_temperature_tuning": _gguf_chunked,
    "use_qk_norm": lambda file: file("expert_count") != WITHOUT_NORM,
}
"""A file does not say how large chunks are, how queries grow, nor which layers have no positions."""


FAMILY = Family(
    name="Llama 4",
    models="Llama 4 Scout, Maverick (text)",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_types=("llama4_text",),
    wrappers=("llama4",),
    layer_types=("full_attention", "chunked_attention"),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("llama4",),
    gguf=GGUF,
)
