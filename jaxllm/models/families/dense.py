"""Dense models of nearly Llama's shape: another norm, rotation, activation or factor, or names of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families import deepseek, gemma, mamba
from jaxllm.models.families.gpt import usual
from jaxllm.models.families.llama import llama_from_hf
from jaxllm.models.family import Family, hf_decoder, hf_head_dim, hf_rope, hf_rope_parameters, sliding_layers
from jaxllm.models.hf_fields import FACTOR, LAYERS, MAYBE_FLAG, SIZE, maybe
from jaxllm.models.names import in_layers
from jaxllm.weights.fields import NULL
from jaxllm.weights.names import Pattern, Source, plus_one

MULTIPLIER = maybe(FACTOR)


# EXAONE 3 and 3.5: Llama with names of its own (arXiv:2408.03541)
def exaone_from_hf(c: dict[str, Any]) -> DecoderConfig:
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    own = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
    return llama_from_hf(usual(c, defaults, **own))


EXAONE = Family(
    name="EXAONE 3", models="EXAONE 3.0, 3.5, EXAONE Deep", fields={"num_layers": LAYERS},
    architectures=("ExaoneForCausalLM",), model_types=("exaone",), from_hf=exaone_from_hf,
    hf_names={
        "embed.weight": "transformer.wte.weight", "norm.weight": "transformer.ln_f.weight",
        **in_layers("transformer.h.*", {
            "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.output": "attn.attention.out_proj",
            "attention.qkv": tuple(f"attn.attention.{part}_proj" for part in "qkv"),
            "mlp.gate_up": ("mlp.c_fc_0", "mlp.c_fc_1"), "mlp.down": "mlp.c_proj",
        }),
    },
)  # fmt: skip


# CWM: Llama with a window on three layers of four
CWM_ROPE: dict[str, Any] = {  # `rope_parameters` of a config that has none
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def cwm_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {"sliding_window": 8192, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5} | c
    rope = hf_rope(c, parameters=hf_rope_parameters(c, CWM_ROPE))
    layers = sliding_layers(rope, c["sliding_window"], full_first(c))
    return hf_decoder(c, layers=layers, mlp_bias=c.get("mlp_bias", False))


def full_first(c: dict[str, Any]) -> list[str]:
    """The types of layers: without `layer_types` the first of every four sees everything."""
    every = range(c["num_hidden_layers"])
    return c.get("layer_types") or ["sliding_attention" if i % 4 else "full_attention" for i in every]


CWM = Family(
    name="CWM", models="Code World Model 32B",
    architectures=("CwmForCausalLM",), model_types=("cwm",), from_hf=cwm_from_hf,
)  # fmt: skip


# Arcee, Jais 2 and Nemotron: MLPs without a gate, whose ReLU is squared (arXiv:2109.08668)
def arcee_from_hf(c: dict[str, Any]) -> DecoderConfig:
    return replace(llama_from_hf({"hidden_act": "relu2", "rms_norm_eps": 1e-5} | c), gated_mlp=False)


def jais2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {"attention_bias": True, "mlp_bias": True, "max_position_embeddings": 8192} | c
    return replace(arcee_from_hf(c), norm="layer", norm_eps=c.get("layer_norm_eps", 1e-5))


def nemotron_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Half of each head is rotated. Norms are stored without the 1 that is added to them."""
    layer = LayerKind(hf_rope(c, partial=0.5))
    return hf_decoder(
        {"hidden_act": "relu2", "max_position_embeddings": 4096} | c, layers=layer, norm="layer", gated_mlp=False,
        norm_eps=c.get("norm_eps", 1e-5), attention_bias=c.get("attention_bias"), mlp_bias=c.get("mlp_bias"),
    )  # fmt: skip


ARCEE = Family(
    name="Arcee", models="AFM-4.5B", architectures=("ArceeForCausalLM",), model_types=("arcee",), from_hf=arcee_from_hf,
)  # fmt: skip

JAIS2 = Family(
    name="Jais 2", models="Jais-2-8B, 70B",
    architectures=("Jais2ForCausalLM",), model_types=("jais2",), from_hf=jais2_from_hf,
)  # fmt: skip

_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
NEMOTRON = Family(
    name="Nemotron", models="Nemotron-4 15B, 340B, Minitron 4B, 8B",
    architectures=("NemotronForCausalLM",), model_types=("nemotron",), from_hf=nemotron_from_hf,
    hf_names=gemma.NORM | in_layers("model.layers.*", _NORMS, plus_one),
)  # fmt: skip


# Helium: Llama whose heads are rotated in neighbouring pairs
def helium_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {"rms_norm_eps": 1e-8, "max_position_embeddings": 4096} | c
    rope = hf_rope(c, theta=100_000.0, interleaved=True)
    return hf_decoder(c, layers=LayerKind(rope), qkv_bias=c.get("attention_bias"), mlp_bias=c.get("mlp_bias"))


HELIUM = Family(
    name="Helium", models="Helium-1 2B",
    architectures=("HeliumForCausalLM",), model_types=("helium",), from_hf=helium_from_hf,
)  # fmt: skip


# HyperCLOVA X: Granite's factors, and norms on what attention and MLP give
def hyperclova_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = c | {"attention_multiplier": c.get("attention_multiplier") or hf_head_dim(c) ** -0.5}
    scale = float(c.get("logits_scaling", 1.0))  # which is multiplied, and Granite's divided
    return replace(mamba.granite_from_hf(c), post_norms=bool(c.get("use_post_norm", True)), logit_scale=scale)


HYPERCLOVA = Family(
    name="HyperCLOVA X", models="HyperCLOVA X SEED Think 14B, 32B",
    architectures=("HyperCLOVAXForCausalLM",), model_types=("hyperclovax",),
    fields={"use_post_norm": MAYBE_FLAG, "attention_multiplier": MULTIPLIER}, from_hf=hyperclova_from_hf,
    hf_names=in_layers("model.layers.*", {"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}),
)  # fmt: skip


# VaultGemma: Gemma 2 without norms on what attention and MLP give
VAULTGEMMA = Family(
    name="VaultGemma", models="VaultGemma 1B",
    architectures=("VaultGemmaForCausalLM",), model_types=("vaultgemma",),
    from_hf=lambda c: replace(gemma.gemma2_from_hf(c), post_norms=False),
    hf_names=gemma.NORM | in_layers(
        "model.layers.*", {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}, plus_one
    ),
)  # fmt: skip


# OLMo 1: norms without weights, and numbers of queries, keys and values that are clipped (arXiv:2402.00838)
def olmo_from_hf(c: dict[str, Any]) -> DecoderConfig:
    bias, clip = c.get("attention_bias"), c.get("clip_qkv")
    return hf_decoder(c, norm="layer_unit", norm_eps=1e-5, attention_bias=bias, qkv_clip=clip)


OLMO = Family(
    name="OLMo", models="OLMo 1B, 7B, 0424, 0724",
    architectures=("OlmoForCausalLM",), model_types=("olmo",), fields={"clip_qkv": MULTIPLIER}, from_hf=olmo_from_hf,
)  # fmt: skip


# NanoChat: norms without weights, one of them on the embedding; heads turn the other way round
def nanochat_from_hf(c: dict[str, Any]) -> DecoderConfig:
    return hf_decoder(
        {"hidden_act": "relu2"} | c, norm="unit", qk_norm="unit", qk_norm_rotated=True, embedding_norm=True,
        gated_mlp=False, logit_softcap=c.get("final_logit_softcapping", 15.0), attention_bias=c.get("attention_bias"),
    )  # fmt: skip


def nanochat_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """To turn pairs of channels backwards is to turn them with their places exchanged."""

    def exchanged(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(-1, 2, config.head_dim // 2, *rows.shape[1:])[:, ::-1].reshape(rows.shape)

    attention = "model.layers.*.self_attn"
    return in_layers("model.layers.*.mlp", {"mlp.up": "fc1", "mlp.down": "fc2"}) | {
        f"layers.*.attention.qkv.{kind}": (
            *(Source(f"{attention}.{part}_proj.{kind}", exchanged, by_rows=True) for part in "qk"),
            f"{attention}.v_proj.{kind}",
        )
        for kind in ("weight", "bias")
    }


NANOCHAT = Family(
    name="NanoChat", models="nanochat d20, d32",
    architectures=("NanoChatForCausalLM",), model_types=("nanochat",),
    from_hf=nanochat_from_hf, hf_names=nanochat_hf_names,
)  # fmt: skip


# Apertus: an activation with numbers of its own in each layer, norms on queries and keys (arXiv:2509.14233)
APERTUS_ROPE = CWM_ROPE | {"rope_theta": 12e6, "factor": 8.0}


def apertus_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65_536} | c
    layer = LayerKind(hf_rope(c, parameters=hf_rope_parameters(c, APERTUS_ROPE)))
    return hf_decoder(c, layers=layer, qk_norm="rms", gated_mlp=False, attention_bias=bool(c.get("attention_bias")))


def _curve(*stored: np.ndarray) -> np.ndarray:
    """Curvatures are stored as what a softplus is taken of; the negative one has the slope added."""
    positive, negative, slope, eps = (np.asarray(number, np.float32).reshape(()) for number in stored)
    return np.stack([np.logaddexp(0, positive), slope + np.logaddexp(0, negative), slope, eps]).astype(np.float32)


_ACT = "model.layers.*.mlp.act_fn."
APERTUS = Family(
    name="Apertus", models="Apertus 8B, 70B",
    architectures=("ApertusForCausalLM", "Apertus1p5TextForCausalLM"), model_types=("apertus", "apertus1p5_text"),
    fields={"output_vocab_size": NULL}, from_hf=apertus_from_hf,
    hf_names={
        **in_layers("model.layers.*", {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}),
        "layers.*.mlp.curve.numbers": Source(
            f"{_ACT}alpha_p", _curve, also=(f"{_ACT}alpha_n", f"{_ACT}beta", f"{_ACT}eps")
        ),
    },
)  # fmt: skip


# Youtu and MiniCPM 3: DeepSeek's latent attention without experts (MiniCPM 3: arXiv:2404.06395)
def youtu_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = deepseek.SHARED | {"tie_word_embeddings": True, "max_position_embeddings": 131_072} | c
    sparse = [False] * c["num_hidden_layers"]
    interleaved, bias = bool(c.get("rope_interleave", True)), c.get("mlp_bias")
    return deepseek.latent_config(c, None, interleaved=interleaved, sparse=sparse, mlp_bias=bias)


def minicpm3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Null for a factor on the depth or the width is none."""
    size, depth = c["hidden_size"], c["num_hidden_layers"] ** 0.5
    defaults = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    c = defaults | {"rms_norm_eps": 1e-5, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256} | c
    c |= {"v_head_dim": c.get("v_head_dim") or size // c["num_attention_heads"], "rope_interleave": False}
    return replace(
        youtu_from_hf(c), embedding_scale=float(c["scale_emb"]), residual_scale=(c["scale_depth"] or depth) / depth,
        logit_scale=(c["dim_model_base"] or size) / size,
    )  # fmt: skip


YOUTU = Family(
    name="Youtu", models="Youtu-LLM-2B",
    architectures=("YoutuForCausalLM",), model_types=("youtu",), from_hf=youtu_from_hf, hf_names=deepseek.LATENT_NAMES,
)  # fmt: skip

MINICPM3 = Family(
    name="MiniCPM 3", models="MiniCPM3-4B",
    architectures=("MiniCPM3ForCausalLM",), model_types=("minicpm3",),
    fields={"scale_emb": FACTOR, "v_head_dim": maybe(SIZE), "scale_depth": MULTIPLIER, "dim_model_base": MULTIPLIER},
    from_hf=minicpm3_from_hf, hf_names=deepseek.LATENT_NAMES,
)  # fmt: skip
