"""LlamaForCausalLM: Llama 2, 3 and 3.x, SmolLM2, Yi (Touvron et al. 2023, arXiv:2302.13971)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.decoder import BuildOptions, Decoder, DecoderConfig
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.mlp import GatedMLP
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.rope import Angles, RopeConfig
from jaxllm.pallas_kernels import AttentionMetadata, Pages
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.names import NameMap, Pattern, Source, expand, unpermute_rope


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """`attention_bias` is on q, k, v and o alike; `mlp_bias` on gate, up and down; `qk_norm` is per head."""

    gguf_prefix: ClassVar[str] = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf(cls, c: dict[str, Any], checkpoint: Checkpoint) -> LlamaConfig:
        rope = c.get("rope_parameters") or c.get("rope_scaling")
        return cls(
            vocab_size=c["vocab_size"],
            hidden_size=c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            num_layers=c["num_hidden_layers"],
            num_heads=c["num_attention_heads"],
            num_kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
            head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            max_position_embeddings=c.get("max_position_embeddings", 2048),
            rms_norm_eps=c.get("rms_norm_eps", 1e-6),
            hidden_act=c.get("hidden_act", "silu"),
            tie_word_embeddings=c.get("tie_word_embeddings", False),
            rope=RopeConfig.from_hf(c.get("rope_theta", 10_000.0), rope),
            attention_bias=c.get("attention_bias", False),
            mlp_bias=c.get("mlp_bias", False),
        )

    @classmethod
    def from_gguf(cls, c: dict[str, Any], checkpoint: Checkpoint) -> LlamaConfig:
        p = cls.gguf_prefix
        heads = c[f"{p}.attention.head_count"]
        dim = c.get(f"{p}.attention.key_length") or c[f"{p}.embedding_length"] // heads
        return cls(
            vocab_size=checkpoint.tensors["token_embd.weight"].shape[0],
            hidden_size=c[f"{p}.embedding_length"],
            intermediate_size=c[f"{p}.feed_forward_length"],
            num_layers=c[f"{p}.block_count"],
            num_heads=heads,
            num_kv_heads=c.get(f"{p}.attention.head_count_kv", heads),
            head_dim=dim,
            max_position_embeddings=c[f"{p}.context_length"],
            rms_norm_eps=c[f"{p}.attention.layer_norm_rms_epsilon"],
            hidden_act="silu",
            tie_word_embeddings="output.weight" not in checkpoint.tensors,
            rope=RopeConfig.from_gguf(c, p, checkpoint),
        )


class LlamaLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: LlamaConfig, index: int, options: BuildOptions):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            tp=options.tp,
            dtype=options.dtype,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            backend=options.attention_backend,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, options.tp, options.dtype, config.mlp_bias
        )

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles, pages: Pages, meta: AttentionMetadata
    ) -> tuple[Float[Array, "T E"], Pages]:
        attended, pages = self.attention(self.attention_norm(x), angles, pages, meta)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), pages


class Llama(Decoder):
    """LlamaForCausalLM."""

    layer_class = LlamaLayer


HF_NAMES: dict[str, Pattern] = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.mlp_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp.down.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.mlp.down.bias": "model.layers.*.mlp.down_proj.bias",
    "layers.*.attention.output.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attention.output.bias": "model.layers.*.self_attn.o_proj.bias",
    **{
        f"layers.*.attention.qkv.{kind}": tuple(f"model.layers.*.self_attn.{p}_proj.{kind}" for p in "qkv")
        for kind in ("weight", "bias")
    },
    **{
        f"layers.*.mlp.gate_up.{kind}": tuple(f"model.layers.*.mlp.{p}_proj.{kind}" for p in ("gate", "up"))
        for kind in ("weight", "bias")
    },
}


def hf_names(config: LlamaConfig) -> NameMap:
    """Tensors of a Hugging Face checkpoint."""
    return expand(HF_NAMES, config.num_layers)


GGUF_NAMES: dict[str, Pattern] = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "layers.*.attention_norm.weight": "blk.*.attn_norm.weight",
    "layers.*.mlp_norm.weight": "blk.*.ffn_norm.weight",
    "layers.*.mlp.down.weight": "blk.*.ffn_down.weight",
    "layers.*.mlp.gate_up.weight": ("blk.*.ffn_gate.weight", "blk.*.ffn_up.weight"),
    "layers.*.attention.output.weight": "blk.*.attn_output.weight",
    "layers.*.attention.qkv.weight": tuple(f"blk.*.attn_{p}.weight" for p in "qkv"),
}


def gguf_names(config: LlamaConfig) -> NameMap:
    """Tensors of a GGUF file, whose Q and K rows are stored for interleaved rotation."""
    rope = unpermute_rope(config.head_dim)
    q, k = (Source(f"blk.*.attn_{p}.weight", rope) for p in "qk")
    return expand(GGUF_NAMES | {"layers.*.attention.qkv.weight": (q, k, "blk.*.attn_v.weight")}, config.num_layers)
