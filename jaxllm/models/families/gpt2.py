"""GPT-2: learned positions, LayerNorm and biases throughout, an MLP without a gate (Radford et al. 2019)."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields
from jaxllm.weights.names import AnyOf, Pattern, Source, transposed

GELU = "gelu_new"
OWN_KEYS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
"""GPT-2's names of keys that other families call otherwise."""
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 1024, "tie_word_embeddings": True}
WHAT_GPT2_IS: dict[str, Any] = {"norm": "layer", "gated_mlp": False, "learned_positions": True}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`n_inner` is the size of the MLP: four times the model's where it is null."""
    c = DEFAULTS | c | {usual: c[own] for own, usual in OWN_KEYS.items() if own in c}
    if c.get("scale_attn_by_inverse_layer_idx"):
        raise CheckpointError("scale_attn_by_inverse_layer_idx is true; accepted is false")
    return DecoderConfig(
        **hf_fields(
            c | {"intermediate_size": c.get("n_inner") or 4 * c["hidden_size"]},
            layers=(LayerKind(None),) * c["num_hidden_layers"],
            hidden_act=c.get("activation_function") or GELU,
            norm_eps=c.get("layer_norm_epsilon", 1e-5),
            attention_scale=None if c.get("scale_attn_weights", True) else 1.0,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            **WHAT_GPT2_IS,
        )
    )


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Matrices lie `[in, out]`; the first published files leave out what stands before the first dot."""
    names: dict[str, Pattern] = {
        "embed.weight": _either("wte.weight"),
        "positions": _either("wpe.weight"),
    }
    vectors = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    products = {
        "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = _either(f"ln_f.{kind}")
        names |= {f"layers.*.{path}.{kind}": _either(f"h.*.{name}.{kind}") for path, name in vectors.items()}
    for path, name in products.items():
        names[f"layers.*.{path}.weight"] = _either(f"h.*.{name}.weight", transposed)
        names[f"layers.*.{path}.bias"] = _either(f"h.*.{name}.bias")
    return names


def _either(name: str, transform: Any = None) -> AnyOf:
    return AnyOf(Source(f"transformer.{name}", transform), Source(name, transform))


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The positions stand beside the embedding."""
    return {"positions": "position_embd.weight"}


FAMILY = Family(
    name="GPT-2",
    models="GPT-2 124M, 355M, 774M, 1.5B, DistilGPT2",
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("gpt2",),
    gguf={"n_inner": "feed_forward_length"},
    gguf_names=gguf_names,
)
