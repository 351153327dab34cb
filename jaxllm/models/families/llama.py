"""Llama and models of nearly its shape: SmolLM 3, Seed-OSS, InternLM 3, Baichuan, Phi 3 and 4; and Llama 4."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_expert_names, hf_fields, hf_head_dim, hf_rope, hf_rope_parameters
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, Table, nonzero, optional
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.layers.attention import USUAL_STEEPNESS, QueryScaling
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.names import Pattern, Source, transposed

# Llama 2, 3 and 3.x, SmolLM2, Yi, and others of their shape (Touvron et al. 2023, arXiv:2302.13971)


def llama_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_bias` is on q, k, v and o alike."""
    bias = c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, qkv_bias=bias, output_bias=bias, mlp_bias=c.get("mlp_bias", False)))


LLAMA = Family(
    name="Llama",
    models="Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, Yi, DeepSeek-R1-Distill-Llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    from_hf=llama_from_hf,
    gguf_architectures=("llama",),
    gguf={},
    gguf_names=permuted_names,
)


# SmolLM3: Llama with layers that have no positions (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466)

NOPE_INTERVAL = 4


def smollm3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`no_rope_layers` has a 1 for each layer that does rotate."""
    number, bias = c["num_hidden_layers"], c.get("attention_bias", False)
    interval = c.get("no_rope_layer_interval") or NOPE_INTERVAL
    rotating = c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(number)]
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    kinds = c.get("layer_types") or ["full_attention" if r else "sliding_attention" for r in rotating]
    rope = hf_rope(c, hf_head_dim(c), theta=2e6)
    return DecoderConfig(
        **hf_fields(
            {"num_key_value_heads": 4, "tie_word_embeddings": True} | c,
            layers=tuple(
                LayerKind(rope if rotates else None, window if kind == "sliding_attention" else None)
                for rotates, kind in zip(rotating, kinds, strict=True)
            ),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=c.get("mlp_bias", False),
        )
    )


SMOLLM3 = Family(
    name="SmolLM3",
    models="SmolLM3-3B",
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    from_hf=smollm3_from_hf,
    gguf_architectures=("smollm3",),
    gguf={},
    gguf_names=permuted_names,
)


# Seed-OSS: Llama with biases on queries, keys and values, and heads of a size of their own


def seed_oss_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The output's bias has a key of its own."""
    return DecoderConfig(
        **hf_fields(
            {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524_288} | c,
            qkv_bias=c.get("attention_bias", True),
            output_bias=c.get("attention_out_bias", False),
            mlp_bias=c.get("mlp_bias", False),
        )
    )


SEED_OSS = Family(
    name="Seed-OSS",
    models="Seed-OSS-36B",
    architectures=("SeedOssForCausalLM",),
    model_types=("seed_oss",),
    from_hf=seed_oss_from_hf,
    gguf_architectures=("seed_oss",),
    gguf={},
)


# InternLM 3: Llama with biases by keys of its own

INTERNLM3_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768,
}  # fmt: skip


def internlm3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`qkv_bias` is also on the output of attention, and `bias` on the MLP; both have Llama's names in newer files."""
    attention, mlp = c.get("qkv_bias", c.get("attention_bias")), c.get("bias", c.get("mlp_bias"))
    return DecoderConfig(**hf_fields(INTERNLM3_DEFAULTS | c, qkv_bias=attention, output_bias=attention, mlp_bias=mlp))


INTERNLM3 = Family(
    name="InternLM 3",
    models="InternLM3-8B",
    architectures=("InternLM3ForCausalLM",),
    model_types=("internlm3",),
    from_hf=internlm3_from_hf,
)


# Baichuan 1 and 2: Llama with q, k and v in one tensor; the 13B models have ALiBi (arXiv:2309.10305)

LAYERS_OF_13B, SIZE_OF_13B = 40, 5120
"""By which files of either format are known, as they do not say which positions they have."""
VOCAB_OF_2 = 125_696
"""By which the second version is known, whose head has rows of length one."""


def baichuan_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """transformers has no class of it: keys are those of the code that is published with the weights."""
    layers, longest = c["num_hidden_layers"], c.get("max_position_embeddings") or c.get("model_max_length") or 4096
    c = c | {"max_position_embeddings": longest}
    if layers != LAYERS_OF_13B and c["hidden_size"] != SIZE_OF_13B:
        return DecoderConfig(**hf_fields(c))
    return DecoderConfig(**hf_fields(c, layers=(LayerKind(None),) * layers, alibi=USUAL_STEEPNESS))


def baichuan_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The second version's head is divided by the length of each row when it is loaded."""
    names: dict[str, Pattern] = {"layers.*.attention.qkv.weight": "model.layers.*.self_attn.W_pack.weight"}
    return names | ({"head.weight": Source("lm_head.weight", unit_rows)} if config.vocab_size == VOCAB_OF_2 else {})


def unit_rows(weight: np.ndarray) -> np.ndarray:
    """Each row divided by its length."""
    weight = weight.astype(np.float32)
    return weight / np.maximum(np.linalg.norm(weight, axis=1, keepdims=True), np.float32(1e-12))


BAICHUAN = Family(
    name="Baichuan",
    models="Baichuan 7B, 13B, Baichuan2 7B, 13B",
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    model_types=("baichuan",),
    from_hf=baichuan_from_hf,
    hf_names=baichuan_hf_names,
    gguf_architectures=("baichuan",),
    gguf={},
    gguf_names=permuted_names,
)


# Phi-3, 3.5, 4 and 4-mini: Llama with fused projections and LongRoPE (Abdin et al. 2024, arXiv:2404.14219)


def phi3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The original context is a key beside `rope_scaling`, not in it."""
    c = {
        "original_max_position_embeddings": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    } | c  # fmt: skip
    given = hf_rope_parameters(c)
    if "long_factor" in given:  # early files call it "su", and some "yarn"
        given = given | {"rope_type": "longrope"}
    layer = LayerKind(hf_rope(c, hf_head_dim(c), parameters=given), c.get("sliding_window"))
    return DecoderConfig(**hf_fields(c, layers=(layer,) * c["num_hidden_layers"]))


PHI3_GGUF: Table = {
    "sliding_window": nonzero("attention.sliding_window"),
    "original_max_position_embeddings": lambda file: file(
        "rope.scaling.original_context_length", file("context_length")
    ),
}


PHI3 = Family(
    name="Phi-3",
    models="Phi-3, 3.5, 4, 4-mini",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    from_hf=phi3_from_hf,
    gguf_architectures=("phi3",),
    gguf=PHI3_GGUF,
)


# Llama 4, text: attention in chunks on three of four layers, no positions on the fourth, experts and a shared one

LLAMA4_THETA = 500_000.0
INTERVAL = 4
CHUNK = 8192
BETA, FLOOR = 0.1, 8192
WITHOUT_NORM = 128
"""A GGUF file does not say whether queries and keys have a norm: they do not in the model of so many experts."""
LLAMA4_DEFAULTS: dict[str, Any] = {
    "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
    "intermediate_size_mlp": 16_384, "num_local_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True,
    "attention_chunk_size": CHUNK, "attn_temperature_tuning": True, "attn_scale": BETA, "floor_scale": FLOOR,
}  # fmt: skip


def llama4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`intermediate_size` is that of the experts; `no_rope_layers` has a 1 for each layer that does rotate."""
    c, bias = LLAMA4_DEFAULTS | c, c.get("attention_bias", False)
    number, step = c["num_hidden_layers"], c.get("interleave_moe_layer_step", 1)
    interval, chunk = c.get("no_rope_layer_interval") or INTERVAL, c["attention_chunk_size"]
    rotating = c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(number)]
    sparse = c["moe_layers"] if c.get("moe_layers") is not None else range(step - 1, number, step)
    kinds = c.get("layer_types") or [
        "chunked_attention" if rotates and chunk is not None else "full_attention" for rotates in rotating
    ]
    rope = hf_rope(c, hf_head_dim(c), theta=LLAMA4_THETA, interleaved=True)
    layers = tuple(
        LayerKind(
            rope if rotates else None,
            chunk if kind == "chunked_attention" else None,
            sparse=index in sparse,
            chunked=kind == "chunked_attention",
        )
        for index, (rotates, kind) in enumerate(zip(rotating, kinds, strict=True))
    )
    scaling = QueryScaling(c["attn_scale"], c["floor_scale"], first=1, unrotated_only=True)
    moe = MoEConfig(
        num_experts=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
        hidden=c["intermediate_size"],
        scoring="sigmoid",
        scale_inputs=True,
        shared_hidden=c["intermediate_size"],
    )
    return DecoderConfig(
        **hf_fields(
            c | {"intermediate_size": c["intermediate_size_mlp"]},
            layers=layers,
            max_position_embeddings=c["max_position_embeddings"],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="unit" if c["use_qk_norm"] else None,
            query_scaling=scaling if c["attn_temperature_tuning"] else None,
            moe=moe,
        )
    )


def llama4_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The experts' matrices lie `[in, out]`."""
    block = "model.layers.*.feed_forward"
    names: dict[str, Pattern] = {
        "layers.*.mlp.gate_up.weight": (f"{block}.gate_proj.weight", f"{block}.up_proj.weight"),
        "layers.*.mlp.down.weight": f"{block}.down_proj.weight",
    }
    return {
        **names,
        **hf_expert_names(config, block, shared="shared_expert"),
        "layers.*.mlp.router.weight": f"{block}.router.weight",
        "layers.*.mlp.experts.gate_up.weight": Source(f"{block}.experts.gate_up_proj", transposed),
        "layers.*.mlp.experts.down.weight": Source(f"{block}.experts.down_proj", transposed),
    }


def _gguf_chunked(file: GgufFile) -> bool:
    """A window of 0 says that all layers rotate and see everything."""
    return file("attention.sliding_window", CHUNK) != 0


LLAMA4_GGUF: Table = GGUF_EXPERTS | {
    "intermediate_size_mlp": "feed_forward_length",
    "intermediate_size": "expert_feed_forward_length",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "rope_theta": optional("rope.freq_base", LLAMA4_THETA),
    "no_rope_layers": lambda file: None if _gguf_chunked(file) else [1] * file.num_layers,
    "attention_chunk_size": lambda file: CHUNK if _gguf_chunked(file) else None,
    "attn_temperature_tuning": _gguf_chunked,
    "use_qk_norm": lambda file: file("expert_count") != WITHOUT_NORM,
}
"""A file does not say how large chunks are, how queries grow, nor which layers have no positions."""


LLAMA4 = Family(
    name="Llama 4",
    models="Llama 4 Scout, Maverick (text)",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_types=("llama4_text",),
    wrappers=("llama4",),
    layer_types=("full_attention", "chunked_attention"),
    from_hf=llama4_from_hf,
    hf_names=llama4_hf_names,
    gguf_architectures=("llama4",),
    gguf=LLAMA4_GGUF,
)
