"""Gemma 3, text (Gemma Team 2025, arXiv:2503.19786)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.decoder import BuildOptions, Decoder, DecoderConfig
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.mlp import GatedMLP
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.rope import Angles, RopeConfig
from jaxllm.pallas_kernels import AttentionMetadata, Pages
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.names import NameMap, Pattern, Source, expand, plus_one

LAYERS_OF_27B = 62
"""GGUF files do not say the attention scale; only the 27B model's is not one over the root of its head size."""


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """`windows[i]` is layer i's sliding window, None for global layers; `rope` is that of the global layers."""

    windows: tuple[int | None, ...]
    local_rope: RopeConfig
    query_pre_attn_scalar: float

    def layer_rope(self, layer: int) -> RopeConfig:
        return self.rope if self.windows[layer] is None else self.local_rope

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size)

    @classmethod
    def from_hf(cls, c: dict[str, Any], checkpoint: Checkpoint) -> Gemma3Config:
        layers = c["num_hidden_layers"]
        pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern", 6)
        kinds = c.get("layer_types") or [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)
        ]
        ropes = c.get("rope_parameters") or {}
        return cls(
            vocab_size=c["vocab_size"],
            hidden_size=c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            num_layers=layers,
            num_heads=c["num_attention_heads"],
            num_kv_heads=c["num_key_value_heads"],
            head_dim=c.get("head_dim", 256),
            max_position_embeddings=c.get("max_position_embeddings", 131_072),
            rms_norm_eps=c.get("rms_norm_eps", 1e-6),
            hidden_act=c.get("hidden_activation") or "gelu_pytorch_tanh",
            tie_word_embeddings=c.get("tie_word_embeddings", True),
            rope=RopeConfig.from_hf(c.get("rope_theta", 1e6), ropes.get("full_attention") or c.get("rope_scaling")),
            local_rope=RopeConfig.from_hf(c.get("rope_local_base_freq", 1e4), ropes.get("sliding_attention")),
            windows=tuple(c["sliding_window"] if kind == "sliding_attention" else None for kind in kinds),
            query_pre_attn_scalar=c.get("query_pre_attn_scalar", 256),
        )

    @classmethod
    def from_gguf(cls, c: dict[str, Any], checkpoint: Checkpoint) -> Gemma3Config:
        layers = c["gemma3.block_count"]
        heads = c["gemma3.attention.head_count"]
        dim = c["gemma3.attention.key_length"]
        window = c["gemma3.attention.sliding_window"]
        return cls(
            vocab_size=checkpoint.tensors["token_embd.weight"].shape[0],
            hidden_size=c["gemma3.embedding_length"],
            intermediate_size=c["gemma3.feed_forward_length"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=c["gemma3.attention.head_count_kv"],
            head_dim=dim,
            max_position_embeddings=c["gemma3.context_length"],
            rms_norm_eps=c["gemma3.attention.layer_norm_rms_epsilon"],
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings="output.weight" not in checkpoint.tensors,
            rope=RopeConfig.from_gguf(c, "gemma3", checkpoint, default_theta=1e6),
            local_rope=RopeConfig(theta=10_000.0),
            windows=tuple(None if (i + 1) % 6 == 0 else window for i in range(layers)),
            query_pre_attn_scalar=c["gemma3.embedding_length"] // heads if layers == LAYERS_OF_27B else dim,
        )


class Gemma3Layer(nnx.Module):
    """Attention and MLP, each with a norm before and a norm after."""

    def __init__(self, config: Gemma3Config, index: int, options: BuildOptions):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps)

        self.attention_norm, self.attention_post_norm = norm(), norm()
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.attention = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            tp=options.tp,
            dtype=options.dtype,
            scale=config.query_pre_attn_scalar**-0.5,
            window=config.windows[index],
            qk_norm_eps=config.rms_norm_eps,
            backend=options.attention_backend,
        )
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, options.tp, options.dtype)

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles, pages: Pages, meta: AttentionMetadata
    ) -> tuple[Float[Array, "T E"], Pages]:
        attended, pages = self.attention(self.attention_norm(x), angles, pages, meta)
        x = x + self.attention_post_norm(attended)
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x))), pages


class Gemma3(Decoder):
    """Gemma3ForCausalLM."""

    layer_class = Gemma3Layer


HF_NORMS = {
    "norm.weight": "model.norm.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention_post_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp_norm.weight": "model.layers.*.pre_feedforward_layernorm.weight",
    "layers.*.mlp_post_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}

HF_NAMES: dict[str, Pattern] = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "layers.*.attention.qkv.weight": tuple(f"model.layers.*.self_attn.{p}_proj.weight" for p in "qkv"),
    "layers.*.attention.output.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.mlp.gate_up.weight": ("model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"),
    "layers.*.mlp.down.weight": "model.layers.*.mlp.down_proj.weight",
    **{path: Source(name, plus_one) for path, name in HF_NORMS.items()},
}

GGUF_NAMES: dict[str, Pattern] = {
    "embed.weight": "token_embd.weight",
    "head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "layers.*.attention_norm.weight": "blk.*.attn_norm.weight",
    "layers.*.attention_post_norm.weight": "blk.*.post_attention_norm.weight",
    "layers.*.mlp_norm.weight": "blk.*.ffn_norm.weight",
    "layers.*.mlp_post_norm.weight": "blk.*.post_ffw_norm.weight",
    "layers.*.attention.q_norm.weight": "blk.*.attn_q_norm.weight",
    "layers.*.attention.k_norm.weight": "blk.*.attn_k_norm.weight",
    "layers.*.attention.qkv.weight": tuple(f"blk.*.attn_{p}.weight" for p in "qkv"),
    "layers.*.attention.output.weight": "blk.*.attn_output.weight",
    "layers.*.mlp.gate_up.weight": ("blk.*.ffn_gate.weight", "blk.*.ffn_up.weight"),
    "layers.*.mlp.down.weight": "blk.*.ffn_down.weight",
}
"""GGUF stores norms with the 1 already added, and Q and K as Hugging Face does."""


def hf_names(config: Gemma3Config) -> NameMap:
    """Tensors of a Hugging Face checkpoint."""
    return expand(HF_NAMES, config.num_layers)


def gguf_names(config: Gemma3Config) -> NameMap:
    """Tensors of a GGUF file."""
    return expand(GGUF_NAMES, config.num_layers)
