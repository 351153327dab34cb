"""NomicBERT: BERT with rotary positions, a gated MLP and no biases (Nussbaum et al. 2024, arXiv:2402.01613)."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families.bert import gguf_token_types
from jaxllm.models.family import Family
from jaxllm.models.gguf import optional
from jaxllm.models.gguf_names import ENCODER_NAMES
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.models.layers.encoder import EncoderConfig
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern

_FIRST_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip
"""Keys of the first published files, and what transformers calls the same."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": (None, "swiglu"), "prenorm": (None, False), "parallel_block": (None, False),
    "use_rms_norm": (None, False), "qkv_proj_bias": (None, False), "mlp_fc1_bias": (None, False),
    "mlp_fc2_bias": (None, False), "rotary_emb_fraction": (None, 1, 1.0), "rotary_emb_interleaved": (None, False),
    "rotary_emb_scale_base": (None,), "rotary_scaling_factor": (None,), "num_experts": (None, 0),
}  # fmt: skip
"""What those files may say of things that other models of their kind have."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A layer is BERT's but for its MLP and its positions."""
    for key, accepted in _ONLY.items():
        if c.get(key) not in accepted:
            raise CheckpointError(f"{key} is {shown(c[key])}; accepted is {shown(accepted[-1])}")
    c = {new: c[old] for old, new in _FIRST_KEYS.items() if old in c} | c
    encoder = EncoderConfig(
        token_types=c.get("type_vocab_size", 2), embedding_norm=True, sum_norms=True, last_norm=False
    )
    rope = hf_rope(c, hf_head_dim(c), theta=1000.0)
    return DecoderConfig(
        **hf_fields(
            c,
            layers=(LayerKind(rope),) * c["num_hidden_layers"],
            norm="layer",
            norm_eps=c.get("layer_norm_eps", 1e-12),
            pre_norms=False,
            post_norms=True,
            tie_word_embeddings=True,
        ),
        encoder=encoder,
    )


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Those of encoders."""
    return ENCODER_NAMES


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """transformers' names, or those of the first published files."""
    layer, first, embeddings = "model.layers.*", "model.encoder.layers.*", "model.embeddings"

    def either(path: str, name: str, older: str) -> dict[str, Pattern]:
        return {f"{path}.{kind}": AnyOf(f"{name}.{kind}", f"{older}.{kind}") for kind in ("weight", "bias")}

    gate_up = f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"
    return {
        "embed.weight": f"{embeddings}.word_embeddings.weight",
        "places.types": f"{embeddings}.token_type_embeddings.weight",
        **either("embedding_norm", f"{embeddings}.LayerNorm", "model.emb_ln"),
        "layers.*.attention.qkv.weight": AnyOf(
            tuple(f"{layer}.self_attn.{p}_proj.weight" for p in "qkv"), f"{first}.attn.Wqkv.weight"
        ),
        **either("layers.*.attention.output", f"{layer}.self_attn.o_proj", f"{first}.attn.out_proj"),
        **either("layers.*.attention_post_norm", f"{layer}.post_attention_layernorm", f"{first}.norm1"),
        "layers.*.mlp.gate_up.weight": AnyOf(gate_up, (f"{first}.mlp.fc12.weight", f"{first}.mlp.fc11.weight")),
        **either("layers.*.mlp.down", f"{layer}.mlp.down_proj", f"{first}.mlp.fc2"),
        **either("layers.*.mlp_post_norm", f"{layer}.post_mlp_layernorm", f"{first}.norm2"),
        **hf_linear("classifier.dense", "model.pooler.dense"),
        **hf_linear("classifier.output", "classifier"),
    }


FAMILY = Family(
    name="NomicBERT",
    models="nomic-embed-text v1.5",
    architectures=("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification"),
    model_types=("nomic_bert",),
    from_hf=from_hf,
    gguf_architectures=("nomic-bert",),
    gguf={"type_vocab_size": gguf_token_types, "rope_theta": optional("rope.freq_base", 1000.0)},
    gguf_names=gguf_names,
    hf_names=hf_names,
    ignored=("*pooler.*", "cls.*", "lm_head.*"),
)
