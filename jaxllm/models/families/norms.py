"""Decoders that norm otherwise than Llama: OLMo 2 and 3, EXAONE 4, Phi 1 and 2, StableLM, StarCoder 2, Command-R."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_decoder, hf_rope, hf_windows
from jaxllm.models.gguf import Table, layer_types, nonzero, optional, rows, tensor
from jaxllm.models.hf_fields import LAYER_TYPES
from jaxllm.models.names import in_layers, linear
from jaxllm.weights.fields import shown
from jaxllm.weights.names import Pattern, Source

POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
"""The norms on what attention and MLP give, in families that have none in front of these."""

# OLMo 2: norms on what attention and MLP give, and one over all heads of queries and keys (arXiv:2501.00656)
WHAT_OLMO_IS: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": "rms_whole"}


def olmo2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    return hf_decoder({"rms_norm_eps": 1e-5} | c, attention_bias=c.get("attention_bias", False), **WHAT_OLMO_IS)


OLMO2 = Family(
    name="OLMo 2", models="OLMo 2 1B, 7B, 13B, 32B",
    architectures=("Olmo2ForCausalLM",), model_types=("olmo2",), gguf_architectures=("olmo2",),
    from_hf=olmo2_from_hf, hf_names=in_layers("model.layers.*", POST_NORMS),
)  # fmt: skip


# OLMo 3: OLMo 2 with a window on three layers of four, and YaRN on the others only
OLMO3_THETA = 500_000.0
DEFAULT: dict[str, Any] = {"rope_type": "default"}


def olmo3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`rope_scaling` is that of the layers without a window; newer files have an entry for each kind."""
    c = {"rms_norm_eps": 1e-5, "sliding_window": 4096} | c
    ropes = c.get("rope_parameters") or {}
    if ropes and not set(ropes) & set(LAYER_TYPES):
        raise CheckpointError(f"rope_parameters is {shown(ropes)}; accepted are entries {' and '.join(LAYER_TYPES)}")
    given = ropes.get("full_attention") or c.get("rope_scaling") or DEFAULT
    rope = hf_rope(c, theta=OLMO3_THETA, parameters=given)
    local = hf_rope(c, theta=OLMO3_THETA, parameters=ropes.get("sliding_attention") or DEFAULT)
    c = c | {"sliding_window_pattern": None}  # a key of other families
    layers = [LayerKind(rope if window is None else local, window) for window in hf_windows(c, period=4)]
    stated = {"max_position_embeddings": c["max_position_embeddings"]} if "max_position_embeddings" in c else {}
    return hf_decoder(c, layers=layers, attention_bias=c.get("attention_bias", False), **WHAT_OLMO_IS, **stated)


OLMO3 = Family(
    name="OLMo 3", models="OLMo 3 7B, 32B",
    architectures=("Olmo3ForCausalLM",), model_types=("olmo3",),
    from_hf=olmo3_from_hf, hf_names=in_layers("model.layers.*", POST_NORMS),
    gguf_architectures=("olmo2",), owns=lambda file: file("attention.sliding_window", 0) > 0,
    gguf={
        "sliding_window": "attention.sliding_window", "layer_types": layer_types(4),
        "rope_parameters": lambda file: {
            "sliding_attention": {"rope_theta": file("rope.freq_base_swa", file("rope.freq_base", 10_000.0))}
        },
    },
)  # fmt: skip


# EXAONE 4.0: norms on what attention and MLP give; layers without a window know no positions (arXiv:2507.11407)
def exaone4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096} | c
    rope, windowed = hf_rope(c), c["sliding_window"] is not None
    layers = [LayerKind(None if windowed and window is None else rope, window) for window in hf_windows(c, period=4)]
    return hf_decoder(c, layers=layers, pre_norms=False, post_norms=True, qk_norm="rms")


EXAONE4 = Family(
    name="EXAONE 4", models="EXAONE 4.0 1.2B, 32B",
    architectures=("Exaone4ForCausalLM",), model_types=("exaone4",), gguf_architectures=("exaone4",),
    from_hf=exaone4_from_hf, hf_names=in_layers("model.layers.*", POST_NORMS),
    gguf={"sliding_window": nonzero("attention.sliding_window"), "layer_types": layer_types(4)},
)  # fmt: skip


# Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side, LayerNorm, biases everywhere (arXiv:2309.05463)
def phi_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Half of each head is rotated unless `partial_rotary_factor` says otherwise."""
    return hf_decoder(
        {"hidden_act": "gelu_new"} | c, layers=LayerKind(hf_rope(c, partial=0.5)),
        norm_eps=c.get("layer_norm_eps", 1e-5), qk_norm="layer" if c.get("qk_layernorm") else None, norm="layer",
        parallel_residual=True, gated_mlp=False, attention_bias=True, mlp_bias=True, head_bias=True,
    )  # fmt: skip


PHI = Family(
    name="Phi", models="Phi-1, 1.5, 2",
    architectures=("PhiForCausalLM",), model_types=("phi",), gguf_architectures=("phi2",),
    from_hf=phi_from_hf,
    hf_names=linear("norm", "model.final_layernorm") | in_layers("model.layers.*", {
        "attention.output": "self_attn.dense", "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
    }),
    gguf={"intermediate_size": rows("blk.0.ffn_up.weight")},  # `feed_forward_length` is four times the hidden size
)  # fmt: skip


# StableLM 3B, StableLM 2 1.6B and 12B: LayerNorm, a quarter of each head rotated (arXiv:2402.17834)
def stablelm_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The 12B model has a norm for every query and key head, and runs attention and MLP side by side.

    A `head_dim` says nothing: StableLM's own code shares the hidden size out among the heads.
    """
    c = {"num_key_value_heads": 32, "max_position_embeddings": 4096} | c | {"head_dim": None}
    return hf_decoder(
        c, layers=LayerKind(hf_rope(c, partial=0.25)), norm="layer", norm_eps=c.get("layer_norm_eps", 1e-5),
        qkv_bias=c.get("use_qkv_bias", False), qk_norm="layer_per_head" if c.get("qk_layernorm") else None,
        parallel_residual=c.get("use_parallel_residual", False),
    )  # fmt: skip


def stablelm_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    return {
        f"layers.*.attention.{p}_norm.weight": Source(
            f"model.layers.*.self_attn.{p}_layernorm.norms.{{}}.weight", stack=number
        )
        for p, number in heads.items()
    }


STABLELM = Family(
    name="StableLM", models="StableLM 3B 4E1T, StableLM 2 1.6B, 12B",
    architectures=("StableLmForCausalLM",), model_types=("stablelm",), gguf_architectures=("stablelm",),
    from_hf=stablelm_from_hf, hf_names=stablelm_hf_names,
    gguf={
        "qk_layernorm": tensor("blk.0.attn_q_norm.weight"),
        # They are side by side where there is no norm in front of the MLP, whatever the metadata say.
        "use_parallel_residual": lambda file: not file.has("blk.0.ffn_norm.weight"),
    },
)  # fmt: skip


# StarCoder 2: LayerNorm and biases throughout, an MLP without a gate (Lozhkov et al. 2024, arXiv:2402.19173)
def starcoder2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    defaults: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }  # fmt: skip
    c = defaults | c
    bias = c.get("use_bias", True)
    return hf_decoder(
        c, layers=LayerKind(hf_rope(c), c.get("sliding_window")), norm="layer",
        norm_eps=c.get("norm_epsilon", 1e-5), gated_mlp=False, attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip


STARCODER2 = Family(
    name="StarCoder 2", models="StarCoder2 3B, 7B, 15B",
    architectures=("Starcoder2ForCausalLM",), model_types=("starcoder2",), gguf_architectures=("starcoder2",),
    from_hf=starcoder2_from_hf,
    hf_names=in_layers("model.layers.*.mlp", {"mlp.up": "c_fc", "mlp.down": "c_proj"}),  # as in GPT-2
)  # fmt: skip


# Command-R and Command A: attention and MLP side by side, LayerNorm without bias, a factor on the logits
COHERE_THETA = 500_000.0


def cohere_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`model_max_length`, where a file has it, is the context: the first models state a shorter one beside it."""
    length = {"max_position_embeddings": c["model_max_length"]} if c.get("model_max_length") else {}
    rope = hf_rope(c, theta=COHERE_THETA, interleaved=True)
    return _cohere(c | length, LayerKind(rope), qk_norm="layer_per_head" if c.get("use_qk_norm") else None)


def cohere2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Layers without a window know no positions. The hidden size is shared out among the heads, whatever is stated."""
    c = {"sliding_window": 4096} | c | {"head_dim": None}
    rope = hf_rope(c, theta=COHERE_THETA, interleaved=True)
    return _cohere(c, [LayerKind(rope if window else None, window) for window in hf_windows(c, period=4)])


def _cohere(c: dict[str, Any], layers: LayerKind | Iterable[LayerKind], **differences: Any) -> DecoderConfig:
    return hf_decoder(
        {"tie_word_embeddings": True, "max_position_embeddings": 8192} | c, layers=layers,
        norm_eps=c.get("layer_norm_eps", 1e-5), logit_scale=float(c.get("logit_scale", 0.0625)),
        attention_bias=c.get("attention_bias", False), norm="layer_unbiased", parallel_residual=True, **differences,
    )  # fmt: skip


COHERE_GGUF: Table = {
    "logit_scale": "logit_scale", "rope_theta": optional("rope.freq_base", COHERE_THETA),
    "use_qk_norm": tensor("blk.0.attn_q_norm.weight"),
}  # fmt: skip

COHERE = Family(
    name="Command-R", models="Command-R, R+, Aya 23, Aya Expanse",
    architectures=("CohereForCausalLM",), model_types=("cohere",), gguf_architectures=("command-r",),
    from_hf=cohere_from_hf, gguf=COHERE_GGUF,
)  # fmt: skip

COHERE2 = Family(
    name="Command A", models="Command R7B, Command A",
    architectures=("Cohere2ForCausalLM",), model_types=("cohere2",), gguf_architectures=("cohere2",),
    from_hf=cohere2_from_hf,
    gguf=COHERE_GGUF | {"sliding_window": nonzero("attention.sliding_window"), "layer_types": layer_types(4)},
)  # fmt: skip
