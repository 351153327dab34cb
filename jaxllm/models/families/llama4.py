"""Llama 4, text: attention in chunks on three of four layers, no positions on the fourth, experts and a shared one."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Metadata, gguf_fields, gguf_layers, gguf_rope
from jaxllm.models.hf import hf_expert_names, hf_fields, hf_head_dim, hf_rope
from jaxllm.models.layers.attention import QueryScaling
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.checkpoint import Checkpoint
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


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    """The file does not say how large chunks are, how queries grow, nor which layers have no positions.

    A window of 0 says that all layers rotate and see everything.
    """
    get = Metadata(checkpoint)
    number, step = gguf_layers(checkpoint), get("interleave_moe_layer_step")
    rope = gguf_rope(checkpoint, theta=THETA, interleaved=True)
    chunked = get("attention.sliding_window", CHUNK) != 0
    layers = tuple(
        _gguf_layer(rope, chunked and (i + 1) % INTERVAL != 0, not chunked, i % step == step - 1) for i in range(number)
    )
    experts = get("expert_count")
    return DecoderConfig(
        **gguf_fields(
            checkpoint,
            layers=layers,
            max_position_embeddings=get("context_length"),
            qk_norm=None if experts == WITHOUT_NORM else "unit",
            query_scaling=QueryScaling(BETA, FLOOR, first=1, unrotated_only=True) if chunked else None,
            moe=_experts(experts, get("expert_used_count"), get("expert_feed_forward_length")),
        )
    )


def _gguf_layer(rope: Any, chunked: bool, all_rotate: bool, sparse: bool) -> LayerKind:
    rotates = chunked or all_rotate
    return LayerKind(rope if rotates else None, CHUNK if chunked else None, sparse=sparse, chunked=chunked)


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
    from_gguf=from_gguf,
)
