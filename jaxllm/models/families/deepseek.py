"""DeepSeek V2 and V3, and GLM-4, whose later models have DeepSeek's experts or latent attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_decoder, hf_experts, hf_rope, hf_rope_parameters, yarn_mscale
from jaxllm.models.gguf import ABSENT, GGUF_EXPERTS, GgufFile, Table, nonzero, only, optional, rope_scaling, tensor
from jaxllm.models.hf_fields import OFF
from jaxllm.models.layers.attention import MLAConfig
from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.models.names import hf_mtp_names, in_layers
from jaxllm.weights.fields import one_of

# DeepSeek V2, V2-Lite, V3 and R1: latent attention and fine-grained experts (arXiv:2405.04434, arXiv:2412.19437)
V2_METHODS = ("greedy", "group_limited_greedy")
SHARED = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}


def v2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Softmax scores; greedy, or from the groups with the best expert.

    Published models never renormalise; transformers ignores the key, and DeepSeek's own code honours it.
    """
    c = SHARED | {"n_shared_experts": 2, "n_routed_experts": 64, "moe_intermediate_size": 1407} | c
    limited = c.get("topk_method") == "group_limited_greedy"
    renormalize, scale = bool(c.get("norm_topk_prob")), c.get("routed_scaling_factor", 1.0)
    moe = _routed(c, by_groups=limited, renormalize=renormalize, scale=scale)
    return latent_config(c, moe, interleaved=True, mlp_bias=c.get("mlp_bias", False))


def v3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Sigmoid scores; a learned correction decides who is chosen, and has no say in the weights."""
    c = SHARED | {
        "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    } | c  # fmt: skip
    return latent_config(c, sigmoid_experts(c), interleaved=bool(c.get("rope_interleave", True)))


def sigmoid_experts(c: dict[str, Any]) -> MoEConfig:
    return _routed(
        c, by_groups=True, scoring="sigmoid", group_score="top2_sum", correction_bias=True, renormalize_eps=1e-20,
        renormalize=bool(c["norm_topk_prob"]), scale=c["routed_scaling_factor"],
    )  # fmt: skip


def _routed(c: dict[str, Any], by_groups: bool, **differences: Any) -> MoEConfig:
    groups = {"num_groups": "n_group", "top_groups": "topk_group"} if by_groups else {}
    for key in groups.values():
        if c[key] is None:  # as files have it where it is not used
            raise CheckpointError(f"{key} is null; accepted is a whole number where experts are chosen by groups")
    differences |= {name: c[key] for name, key in groups.items()}
    shared = (c["n_shared_experts"] or 0) * c["moe_intermediate_size"]
    return hf_experts(c, "n_routed_experts", "moe_intermediate_size", shared_hidden=shared, **differences)


SIGMOID = 2  # `expert_gating_func` of GGUF files whose experts have sigmoid scores


def latent_config(
    c: dict[str, Any], moe: MoEConfig | None, interleaved: bool, *, sparse: list[bool] | None = None, **differences: Any
) -> DecoderConfig:
    """Latent attention and these experts, from the keys that all families with them share.

    `sparse` says which layers have experts, where that is not all from `first_k_dense_replace` on.
    """
    mla = MLAConfig(
        q_lora_rank=c["q_lora_rank"], kv_lora_rank=c["kv_lora_rank"], qk_nope_head_dim=c["qk_nope_head_dim"],
        qk_rope_head_dim=c["qk_rope_head_dim"], v_head_dim=c["v_head_dim"],
    )  # fmt: skip
    rope = hf_rope(c, mla.qk_rope_head_dim, interleaved=interleaved)
    return hf_decoder(
        c, head_dim=mla.qk_head_dim,
        layers=[LayerKind(rope, sparse=is_sparse) for is_sparse in sparse or _after_dense(c)],
        attention_scale=mla.qk_head_dim**-0.5 * _sharpening(c, rope), attention_bias=c.get("attention_bias", False),
        moe=moe, mla=mla, **differences,
    )  # fmt: skip


def _after_dense(c: dict[str, Any]) -> list[bool]:
    return [i >= c.get("first_k_dense_replace", 0) for i in range(c["num_hidden_layers"])]


def _sharpening(c: dict[str, Any], rope: RopeConfig) -> float:
    """YaRN's factor on the logits, which DeepSeek applies here and not to cosine and sine."""
    given = hf_rope_parameters(c)
    if rope.kind == "default" or not given.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(rope.factor, given["mscale_all_dim"]) ** 2


LATENT_NAMES = in_layers("model.layers.*.self_attn", {  # the parts of latent attention
    "attention.q": "q_proj", "attention.q_a": "q_a_proj", "attention.q_a_norm": "q_a_layernorm",
    "attention.q_b": "q_b_proj", "attention.kv_a": "kv_a_proj_with_mqa", "attention.kv_a_norm": "kv_a_layernorm",
    "attention.kv_b": "kv_b_proj",
})  # fmt: skip
mtp_names = partial(hf_mtp_names, own=LATENT_NAMES)


def _gguf_length(part: str) -> Callable[[GgufFile], int]:
    """Files with the latent's own lengths keep those of a head under *_mla; older ones under the plain keys."""
    return lambda file: file(f"attention.{part}_length_mla", file(f"attention.{part}_length"))


def latent_gguf_rope(file: GgufFile) -> dict[str, Any]:
    """Published models have mscale == mscale_all_dim."""
    only("rope.scaling.attn_factor", 1.0, "for llama.cpp has it on the logits too")(file)
    return rope_scaling(file, lambda multiplier: dict.fromkeys(("mscale", "mscale_all_dim"), multiplier / 0.1))


ROUTED_GGUF: Table = GGUF_EXPERTS | {  # DeepSeek's experts, which others have too
    "n_shared_experts": "expert_shared_count",
    "n_group": nonzero("expert_group_count", 1),
    "topk_group": lambda file: file("expert_group_used_count", 0) or file("expert_group_count", 0) or 1,
    "norm_topk_prob": optional("expert_weights_norm", False),
    "routed_scaling_factor": nonzero("expert_weights_scale", 1.0),
    "first_k_dense_replace": optional("leading_dense_block_count", 0),
}

LATENT_GGUF: Table = ROUTED_GGUF | {
    "num_key_value_heads": "attention.head_count",
    "q_lora_rank": nonzero("attention.q_lora_rank"),
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_nope_head_dim": lambda file: _gguf_length("key")(file) - file("rope.dimension_count"),
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": _gguf_length("value"),
    "partial_rotary_factor": ABSENT,
    "rope_scaling": latent_gguf_rope,
}


def _is_v3(file: GgufFile) -> bool:
    """V2 files say softmax, or nothing, and GLM-4.7-Flash's nothing."""
    corrected = file.has("blk.*.exp_probs_b.bias")
    return file("expert_gating_func", SIGMOID if corrected else 0) == SIGMOID


V2 = Family(
    name="DeepSeek V2", models="DeepSeek-V2, V2-Lite, Coder-V2",
    architectures=("DeepseekV2ForCausalLM",), model_types=("deepseek_v2",), gguf_architectures=("deepseek2",),
    fields={"topk_method": one_of(*V2_METHODS), "norm_topk_prob": OFF},
    from_hf=v2_from_hf, hf_names=LATENT_NAMES,
    gguf=LATENT_GGUF | {"topk_method": lambda file: V2_METHODS[file("expert_group_count", 0) > 1]},
)  # fmt: skip

V3 = Family(
    name="DeepSeek V3", models="DeepSeek-V3, R1, Kimi K2, K2.5, K2.6 (text)",
    architectures=("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"),
    model_types=("deepseek_v3", "kimi_k2"), wrappers=("kimi_k25",),
    from_hf=v3_from_hf, hf_names=LATENT_NAMES, mtp_names=mtp_names,
    gguf_architectures=("deepseek2",), owns=_is_v3, gguf=LATENT_GGUF,
)  # fmt: skip


# GLM-4: half of each head is rotated, in neighbouring pairs (arXiv:2406.12793); the 0414 models have more norms
def glm_from_hf(c: dict[str, Any], post_norms: bool = False) -> DecoderConfig:
    """q, k and v have biases unless `attention_bias` says otherwise; o has none."""
    c = {
        "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131_072,
    } | c  # fmt: skip
    layer = LayerKind(hf_rope(c, partial=0.5, interleaved=True))
    return hf_decoder(c, layers=layer, qkv_bias=c.get("attention_bias", True), post_norms=post_norms)


GLM = Family(
    name="GLM-4", models="GLM-4-9B-hf, GLM-4-9B-chat-hf",
    architectures=("GlmForCausalLM",), model_types=("glm",),
    from_hf=glm_from_hf,
)  # fmt: skip

GLM4 = Family(
    name="GLM-4-0414", models="GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1, GLM-4.1V, 4.6V-Flash (text)",
    architectures=("Glm4ForCausalLM", "Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    model_types=("glm4", "glm4v_text"), wrappers=("glm4v", "glm46v"), gguf_architectures=("glm4",),
    from_hf=partial(glm_from_hf, post_norms=True),
    hf_names=in_layers(
        "model.layers.*", {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
    ),
)  # fmt: skip


# GLM-4.5 to 4.7: half of each head rotated, and DeepSeek V3's experts (arXiv:2508.06471). Flash is a DeepSeek V3
GLM4_MOE_DEFAULTS = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
LITE_DEFAULTS = GLM4_MOE_DEFAULTS | {
    "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "num_key_value_heads": 20, "max_position_embeddings": 202_752,
}  # fmt: skip


def glm4_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """q, k and v may have biases, and o has none; the larger models have norms on queries and keys."""
    c = GLM4_MOE_DEFAULTS | c
    rope = hf_rope(c, partial=0.5)
    return hf_decoder(
        c, layers=[LayerKind(rope, sparse=sparse) for sparse in _after_dense(c)], moe=sigmoid_experts(c),
        qkv_bias=c.get("attention_bias", False), qk_norm="rms" if c.get("use_qk_norm") else None,
    )  # fmt: skip


def lite_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Which layers have experts is said by `mlp_layer_types`: by default all but the first."""
    c = LITE_DEFAULTS | c
    kinds = c.get("mlp_layer_types") or ["dense", *["sparse"] * (c["num_hidden_layers"] - 1)]
    sparse = [kind == "sparse" for kind in kinds]
    return latent_config(c, sigmoid_experts(c), interleaved=bool(c.get("rope_interleave", True)), sparse=sparse)


GLM4_MOE = Family(
    name="GLM-4.5", models="GLM-4.5, 4.5-Air, 4.6, 4.7, 4.5V, 4.6V (text)",
    architectures=("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"),
    model_types=("glm4_moe", "glm4v_moe_text"), wrappers=("glm4v_moe",), gguf_architectures=("glm4moe",),
    from_hf=glm4_moe_from_hf, mtp_names=hf_mtp_names,
    gguf=ROUTED_GGUF | {
        "use_qk_norm": tensor("blk.0.attn_q_norm.weight"),
        "scoring_func": only("expert_gating_func", SIGMOID, "sigmoid"),
    },
)  # fmt: skip

GLM4_LITE = Family(
    name="GLM-4.7-Flash", models="GLM-4.7-Flash",
    architectures=("Glm4MoeLiteForCausalLM",), model_types=("glm4_moe_lite",),
    from_hf=lite_from_hf, hf_names=LATENT_NAMES, mtp_names=mtp_names, gguf_architectures=("deepseek2",), gguf=None,
)  # fmt: skip
