"""Later decoders with LayerNorm: Phi 1 and 2, StableLM, StarCoder 2, Command-R and Command A."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, layer_types, nonzero, optional, rows, tensor
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_linear, hf_rope, hf_windows
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.names import Pattern, Source

# Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side, LayerNorm, biases everywhere (arXiv:2309.05463)


def phi_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Half of each head is rotated unless `partial_rotary_factor` says otherwise."""
    rope = hf_rope(c, hf_head_dim(c), partial=0.5)
    return DecoderConfig(
        **hf_fields(
            {"hidden_act": "gelu_new"} | c,
            layers=(LayerKind(rope),) * c["num_hidden_layers"],
            norm_eps=c.get("layer_norm_eps", 1e-5),
            qk_norm="layer" if c.get("qk_layernorm") else None,
            norm="layer",
            parallel_residual=True,
            gated_mlp=False,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
        )
    )


def phi_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Phi's own names."""
    layer = "model.layers.*"
    return {
        **hf_linear("norm", "model.final_layernorm"),
        **hf_linear("layers.*.attention.output", f"{layer}.self_attn.dense"),
        **hf_linear("layers.*.attention.q_norm", f"{layer}.self_attn.q_layernorm"),
        **hf_linear("layers.*.attention.k_norm", f"{layer}.self_attn.k_layernorm"),
        **hf_linear("layers.*.mlp.up", f"{layer}.mlp.fc1"),
        **hf_linear("layers.*.mlp.down", f"{layer}.mlp.fc2"),
    }


PHI = Family(
    name="Phi",
    models="Phi-1, 1.5, 2",
    architectures=("PhiForCausalLM",),
    model_types=("phi",),
    from_hf=phi_from_hf,
    gguf_architectures=("phi2",),
    gguf={"intermediate_size": rows("blk.0.ffn_up.weight")},  # `feed_forward_length` is four times the hidden size
    hf_names=phi_hf_names,
)


# StableLM 3B, StableLM 2 1.6B and 12B: LayerNorm, a quarter of each head rotated (arXiv:2402.17834)


def stablelm_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The 12B model has a norm for every query and key head, and runs attention and MLP side by side.

    A `head_dim` says nothing: StableLM's own code shares the hidden size out among the heads.
    """
    c = {"num_key_value_heads": 32, "max_position_embeddings": 4096} | c | {"head_dim": None}
    rope = hf_rope(c, hf_head_dim(c), partial=0.25)
    return DecoderConfig(
        **hf_fields(
            c,
            layers=(LayerKind(rope),) * c["num_hidden_layers"],
            norm="layer",
            norm_eps=c.get("layer_norm_eps", 1e-5),
            qkv_bias=c.get("use_qkv_bias", False),
            qk_norm="layer_per_head" if c.get("qk_layernorm") else None,
            parallel_residual=c.get("use_parallel_residual", False),
        )
    )


STABLELM_GGUF: Table = {
    "qk_layernorm": tensor("blk.0.attn_q_norm.weight"),
    "use_parallel_residual": lambda file: not file.has("blk.0.ffn_norm.weight"),
}
"""Attention and MLP are side by side where there is no norm in front of the MLP, whatever the metadata say."""


def stablelm_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Every head's norm is a tensor of its own."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    return {
        f"layers.*.attention.{p}_norm.weight": Source(
            f"model.layers.*.self_attn.{p}_layernorm.norms.{{}}.weight", stack=number
        )
        for p, number in heads.items()
    }


STABLELM = Family(
    name="StableLM",
    models="StableLM 3B 4E1T, StableLM 2 1.6B, 12B",
    architectures=("StableLmForCausalLM",),
    model_types=("stablelm",),
    from_hf=stablelm_from_hf,
    gguf_architectures=("stablelm",),
    gguf=STABLELM_GGUF,
    hf_names=stablelm_hf_names,
)


# StarCoder 2: LayerNorm and biases throughout, an MLP without a gate (Lozhkov et al. 2024, arXiv:2402.19173)

STARCODER2_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip


def starcoder2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A window, where there is one, is on every layer."""
    bias = c.get("use_bias", True)
    layer = LayerKind(hf_rope(c, hf_head_dim(c)), c.get("sliding_window"))
    return DecoderConfig(
        **hf_fields(
            STARCODER2_DEFAULTS | c,
            layers=(layer,) * c["num_hidden_layers"],
            norm="layer",
            norm_eps=c.get("norm_epsilon", 1e-5),
            gated_mlp=False,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
        )
    )


def starcoder2_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The MLP's parts have GPT-2's names."""
    return {
        **hf_linear("layers.*.mlp.up", "model.layers.*.mlp.c_fc"),
        **hf_linear("layers.*.mlp.down", "model.layers.*.mlp.c_proj"),
    }


STARCODER2 = Family(
    name="StarCoder 2",
    models="StarCoder2 3B, 7B, 15B",
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    from_hf=starcoder2_from_hf,
    hf_names=starcoder2_hf_names,
    gguf_architectures=("starcoder2",),
    gguf={},
)


# Command-R and Command A: attention and MLP side by side, LayerNorm without bias, a factor on the logits

COHERE_THETA = 500_000.0
COHERE_DEFAULTS = {"tie_word_embeddings": True, "max_position_embeddings": 8192}


def cohere_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`model_max_length`, where a file has it, is the context: the first models state a shorter one beside it."""
    rope = _rope(c)
    length = {"max_position_embeddings": c["model_max_length"]} if c.get("model_max_length") else {}
    qk_norm = "layer_per_head" if c.get("use_qk_norm") else None
    return DecoderConfig(**_fields(c | length, (LayerKind(rope),) * c["num_hidden_layers"], qk_norm=qk_norm))


def cohere2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Layers without a window know no positions. The hidden size is shared out among the heads, whatever is stated."""
    c = {"sliding_window": 4096} | c | {"head_dim": None}
    rope, windows = _rope(c), hf_windows(c, period=4)
    return DecoderConfig(**_fields(c, tuple(LayerKind(rope if window else None, window) for window in windows)))


def _rope(c: dict[str, Any]) -> RopeConfig:
    return hf_rope(c, hf_head_dim(c), theta=COHERE_THETA, interleaved=True)


def _fields(c: dict[str, Any], layers: tuple[LayerKind, ...], **differences: Any) -> dict[str, Any]:
    bias = c.get("attention_bias", False)
    return hf_fields(
        COHERE_DEFAULTS | c,
        layers=layers,
        norm_eps=c.get("layer_norm_eps", 1e-5),
        logit_scale=float(c.get("logit_scale", 0.0625)),
        qkv_bias=bias,
        output_bias=bias,
        norm="layer_unbiased",
        parallel_residual=True,
        **differences,
    )


COHERE_GGUF: Table = {
    "logit_scale": "logit_scale",
    "rope_theta": optional("rope.freq_base", COHERE_THETA),
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
