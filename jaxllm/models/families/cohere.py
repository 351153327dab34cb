"""Command-R and Command A: attention and MLP side by side, LayerNorm without bias, a factor on the logits."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, layer_types, nonzero, optional, tensor
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope, hf_windows
from jaxllm.models.layers.rope import RopeConfig

THETA = 500_000.0
DEFAULTS = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
WHAT_COHERE_IS: dict[str, Any] = {"norm": "layer_unbiased", "parallel_residual": True}


def cohere_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`model_max_length`, where a file has it, is the context: the first models state a shorter one beside it."""
    rope = _rope(c)
    length = {"max_position_embeddings": c["model_max_length"]} if c.get("model_max_length") else {}
    qk_norm = "layer_per_head" if c.get("use_qk_norm") else None
    return DecoderConfig(**_fields(c | length, (LayerKind(rope),) * c["num_hidden_layers"], qk_norm=qk_norm))


def cohere2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Layers without a window know no positions. The hidden size is shared out among the heads, whatever is stated."""
    c = {"sliding_window": 4096} | c | {"head_dim": None}
    return DecoderConfig(**_fields(c, _layers(_rope(c), hf_windows(c, period=4))))


def _rope(c: dict[str, Any]) -> RopeConfig:
    return hf_rope(c, hf_head_dim(c), theta=THETA, interleaved=True)


def _layers(rope: RopeConfig, windows: list[int | None]) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(None if window is None else rope, window) for window in windows)


def _fields(c: dict[str, Any], layers: tuple[LayerKind, ...], **differences: Any) -> dict[str, Any]:
    bias = c.get("attention_bias", False)
    return hf_fields(
        DEFAULTS | c,
        layers=layers,
        norm_eps=c.get("layer_norm_eps", 1e-5),
        logit_scale=float(c.get("logit_scale", 0.0625)),
        qkv_bias=bias,
        output_bias=bias,
        **WHAT_COHERE_IS,
        **differences,
    )


COHERE_GGUF: Table = {
    "logit_scale": "logit_scale",
    "rope_theta": optional("rope.freq_base", THETA),
    "use_qk_norm": tensor("blk.0.attn_q_norm.weight"),
}
COHERE2_GGUF: Table = COHERE_GGUF | {
    "sliding_window": nonzero("attention.sliding_window"),
    "layer_types": layer_types(4),
}


COHERE = Family(
    name="Command-R",
    models="Command-R, R+, Aya 23, Aya Expanse",
    architectures=("CohereForCausalLM",),
    model_types=("cohere",),
    from_hf=cohere_from_hf,
    gguf_architectures=("command-r",),
    gguf=COHERE_GGUF,
)

COHERE2 = Family(
    name="Command A",
    models="Command R7B, Command A",
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    from_hf=cohere2_from_hf,
    gguf_architectures=("cohere2",),
    gguf=COHERE2_GGUF,
)
