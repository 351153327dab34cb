"""GPT-NeoX and Pythia: attention and MLP beside each other, a quarter of each head rotated (arXiv:2204.06745)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import optional
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.weights.names import Pattern, Source, Transform

PARTIAL = 0.25
DEFAULTS: dict[str, Any] = {"hidden_act": "gelu", "max_position_embeddings": 2048}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`rotary_pct` and `rotary_emb_base` are older names of two keys."""
    bias = c.get("attention_bias", True)
    theta, partial = c.get("rotary_emb_base") or 10_000.0, c.get("rotary_pct") or PARTIAL
    c = DEFAULTS | c
    layers = (LayerKind(hf_rope(c, hf_head_dim(c), theta=theta, partial=partial)),) * c["num_hidden_layers"]
    return DecoderConfig(
        **hf_fields(
            c,
            layers=layers,
            norm_eps=c.get("layer_norm_eps", 1e-5),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=True,
            **_block(c.get("use_parallel_residual", True)),
        )
    )


def _block(parallel: bool | None) -> dict[str, Any]:
    beside = bool(parallel)
    return {"norm": "layer", "gated_mlp": False, "parallel_residual": beside, "parallel_norms": beside}


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Queries, keys and values of a head lie one after the other, and then those of the next."""
    layer = "gpt_neox.layers.*"
    by_part = rows_by_part(config.head_dim)
    return {
        "embed.weight": "gpt_neox.embed_in.weight",
        **hf_linear("norm", "gpt_neox.final_layer_norm"),
        **hf_linear("head", "embed_out"),
        **hf_linear("layers.*.attention_norm", f"{layer}.input_layernorm"),
        **hf_linear("layers.*.mlp_norm", f"{layer}.post_attention_layernorm"),
        **{
            f"layers.*.attention.qkv.{kind}": Source(f"{layer}.attention.query_key_value.{kind}", by_part, by_rows=True)
            for kind in ("weight", "bias")
        },
        **hf_linear("layers.*.attention.output", f"{layer}.attention.dense"),
        **hf_linear("layers.*.mlp.up", f"{layer}.mlp.dense_h_to_4h"),
        **hf_linear("layers.*.mlp.down", f"{layer}.mlp.dense_4h_to_h"),
    }


def rows_by_part(head_dim: int) -> Transform:
    """Rows `(head, part, channel)` as `(part, head, channel)`."""

    def transform(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(-1, 3, head_dim, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    return transform


FAMILY = Family(
    name="GPT-NeoX",
    models="Pythia, GPT-NeoX-20B, Dolly 2",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("gptneox",),
    gguf={"use_parallel_residual": optional("use_parallel_residual", True), "rotary_pct": 1.0},
)
