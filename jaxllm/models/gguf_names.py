"""Where most architectures of GGUF files keep their tensors, by llama.cpp's names (src/llama-arch.cpp)."""

from __future__ import annotations

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.weights.names import AnyOf, Pattern, Source, unpermute_rope


def gguf_linear(path: str, *names: str, fused: str | None = None) -> dict[str, Pattern]:
    """Weight and bias of one product in every layer, as `hf_linear`."""
    return {
        f"layers.*.{path}.{kind}": AnyOf(
            tuple(f"blk.*.{name}.{kind}" for name in names), *([f"blk.*.{fused}.{kind}"] if fused else [])
        )
        for kind in ("weight", "bias")
    }


def _row(weight: np.ndarray) -> np.ndarray:
    return weight.reshape(1, -1)


def _join_kv_b(k_b: np.ndarray, v_b: np.ndarray) -> np.ndarray:
    """`[H, L, nope]` and `[H, v, L]` -> `[H * (nope + v), L]`, a head's key rows before its value rows."""
    if k_b.ndim != 3 or v_b.ndim != 3 or (k_b.shape[0], k_b.shape[1]) != (v_b.shape[0], v_b.shape[2]):
        raise CheckpointError(
            f"tensors attn_k_b and attn_v_b are of shapes {k_b.shape} and {v_b.shape}; accepted are (heads, latent, "
            "key) and (heads, value, latent)"
        )
    rows = np.concatenate([np.asarray(k_b, np.float32).swapaxes(1, 2), np.asarray(v_b, np.float32)], axis=1)
    return rows.reshape(-1, rows.shape[-1])


GGUF_NAMES: dict[str, Pattern] = {
    "embed.weight": "token_embd.weight",
    **{f"norm.{kind}": f"output_norm.{kind}" for kind in ("weight", "bias")},
    **{f"head.{kind}": f"output.{kind}" for kind in ("weight", "bias")},
    **gguf_linear("attention_norm", "attn_norm"),
    **gguf_linear("attention_post_norm", "post_attention_norm"),
    **gguf_linear("mlp_norm", "ffn_norm", fused="post_attention_norm"),  # which some call after what it comes after
    **gguf_linear("mlp_post_norm", "post_ffw_norm"),
    **gguf_linear("attention.qkv", "attn_q", "attn_k", "attn_v", fused="attn_qkv"),
    **gguf_linear("attention.output", "attn_output"),
    **gguf_linear("attention.q_norm", "attn_q_norm"),
    **gguf_linear("attention.k_norm", "attn_k_norm"),
    **gguf_linear("attention.q", "attn_q"),
    **gguf_linear("attention.q_a", "attn_q_a"),
    **gguf_linear("attention.q_a_norm", "attn_q_a_norm"),
    **gguf_linear("attention.q_b", "attn_q_b"),
    **gguf_linear("attention.kv_a", "attn_kv_a_mqa"),
    **gguf_linear("attention.kv_a_norm", "attn_kv_a_norm"),
    "layers.*.attention.kv_b.weight": AnyOf(
        "blk.*.attn_kv_b.weight", Source("blk.*.attn_k_b.weight", _join_kv_b, also=("blk.*.attn_v_b.weight",))
    ),
    **gguf_linear("mlp.gate_up", "ffn_gate", "ffn_up", fused="ffn_up"),
    **gguf_linear("mlp.up", "ffn_up"),
    **gguf_linear("mlp.down", "ffn_down"),
    "layers.*.mlp.router.weight": "blk.*.ffn_gate_inp.weight",
    "layers.*.mlp.router.correction_bias": "blk.*.exp_probs_b.bias",
    **gguf_linear("mlp.experts.gate_up", "ffn_gate_exps", "ffn_up_exps", fused="ffn_gate_up_exps"),
    **gguf_linear("mlp.experts.up", "ffn_up_exps"),
    **gguf_linear("mlp.experts.down", "ffn_down_exps"),
    **gguf_linear("mlp.shared.gate_up", "ffn_gate_shexp", "ffn_up_shexp"),
    **gguf_linear("mlp.shared.up", "ffn_up_shexp"),
    **gguf_linear("mlp.shared.down", "ffn_down_shexp"),
    "layers.*.mlp.shared_gate.weight": Source("blk.*.ffn_gate_inp_shexp.weight", _row),
}
"""Where all architectures keep their tensors."""


ENCODER_NAMES: dict[str, Pattern] = {
    "places.positions": "position_embd.weight",
    "places.types": "token_types.weight",
    **{f"embedding_norm.{kind}": f"token_embd_norm.{kind}" for kind in ("weight", "bias")},
    **gguf_linear("attention_post_norm", "attn_output_norm"),
    **gguf_linear("mlp_post_norm", "layer_output_norm"),
    **{f"classifier.dense.{kind}": f"cls.{kind}" for kind in ("weight", "bias")},
    **{f"classifier.output.{kind}": f"cls.output.{kind}" for kind in ("weight", "bias")},
}
"""Where encoders keep theirs, whose norms come after the residual sums."""


def permuted_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Q and K of the architectures whose rows llama.cpp stores for interleaved rotation (llama, mistral3, smollm3)."""
    undo = unpermute_rope(config.head_dim)
    return {
        f"layers.*.attention.qkv.{kind}": (
            *(Source(f"blk.*.attn_{p}.{kind}", undo, by_rows=True) for p in "qk"),
            f"blk.*.attn_v.{kind}",
        )
        for kind in ("weight", "bias")
    }
