"""Llama and models of nearly its shape: SmolLM 3, Seed-OSS, InternLM 3, Baichuan, Phi 3 and 4, Qwen 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_decoder, hf_experts, hf_rope, hf_rope_parameters, sliding_layers
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, nonzero
from jaxllm.models.layers.attention import USUAL_STEEPNESS
from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.names import hf_expert_names, permuted_names
from jaxllm.weights.names import AnyOf, Pattern, Source, transposed


# Llama 2, 3 and 3.x, SmolLM2, Yi, and others of their shape (Touvron et al. 2023, arXiv:2302.13971)
def llama_from_hf(c: dict[str, Any]) -> DecoderConfig:
    newer = c.get("model_type") in ("iquestcoder", "emu3_text_model")
    c = ({"rms_norm_eps": 1e-5, "num_key_value_heads": 8} if newer else {}) | c
    return hf_decoder(c, attention_bias=c.get("attention_bias", False), mlp_bias=c.get("mlp_bias", False))


LLAMA = Family(
    name="Llama", models="Llama 2 to 3.3, SmolLM2, Yi, DeepSeek-R1-Distill-Llama, IQuest-Coder, Emu3 (text)",
    architectures=(
        "LlamaForCausalLM", "LlavaForConditionalGeneration", "SmolVLMForConditionalGeneration",
        "Idefics3ForConditionalGeneration", "IQuestCoderForCausalLM", "Emu3ForConditionalGeneration",
    ),
    model_types=("llama", "iquestcoder", "emu3_text_model"), wrappers=("llava", "smolvlm", "idefics3", "emu3"),
    gguf_architectures=("llama",),
    from_hf=llama_from_hf, gguf_names=permuted_names,
)  # fmt: skip


# SmolLM3: Llama with layers that have no positions (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466)
def smollm3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    rotating = rotating_layers(c)
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    kinds = c.get("layer_types") or ["full_attention" if r else "sliding_attention" for r in rotating]
    rope = hf_rope(c, theta=2e6)
    return hf_decoder(
        {"num_key_value_heads": 4, "tie_word_embeddings": True} | c,
        layers=[
            LayerKind(rope if rotates else None, window if kind == "sliding_attention" else None)
            for rotates, kind in zip(rotating, kinds, strict=True)
        ],
        attention_bias=c.get("attention_bias", False), mlp_bias=c.get("mlp_bias", False),
    )  # fmt: skip


def rotating_layers(c: dict[str, Any]) -> Sequence[Any]:
    """Which layers have positions: as `no_rope_layers` says, or all but every fourth one, or another interval."""
    interval = c.get("no_rope_layer_interval") or 4
    return c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(c["num_hidden_layers"])]


SMOLLM3 = Family(
    name="SmolLM3", models="SmolLM3-3B",
    architectures=("SmolLM3ForCausalLM",), model_types=("smollm3",), gguf_architectures=("smollm3",),
    from_hf=smollm3_from_hf, gguf_names=permuted_names,
)  # fmt: skip


# Seed-OSS: Llama with biases on queries, keys and values, and heads of a size of their own
def seed_oss_from_hf(c: dict[str, Any]) -> DecoderConfig:
    return hf_decoder(
        {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524_288} | c,
        qkv_bias=c.get("attention_bias", True), output_bias=c.get("attention_out_bias", False),
        mlp_bias=c.get("mlp_bias", False),
    )  # fmt: skip


SEED_OSS = Family(
    name="Seed-OSS", models="Seed-OSS-36B",
    architectures=("SeedOssForCausalLM",), model_types=("seed_oss",), gguf_architectures=("seed_oss",),
    from_hf=seed_oss_from_hf,
)  # fmt: skip


# InternLM 3: Llama with biases by keys of its own
def internlm3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`qkv_bias` is also on the output of attention, and `bias` on the MLP; both have Llama's names in newer files."""
    defaults = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}
    bias, mlp_bias = c.get("qkv_bias", c.get("attention_bias")), c.get("bias", c.get("mlp_bias"))
    return hf_decoder(defaults | c, attention_bias=bias, mlp_bias=mlp_bias)


INTERNLM3 = Family(
    name="InternLM 3", models="InternLM3-8B",
    architectures=("InternLM3ForCausalLM",), model_types=("internlm3",),
    from_hf=internlm3_from_hf,
)  # fmt: skip


# Baichuan 1 and 2: Llama with q, k and v in one tensor; the 13B models have ALiBi (arXiv:2309.10305)
LAYERS_OF_13B, SIZE_OF_13B = 40, 5120  # known by these, since files do not say which positions they have
VOCAB_OF_2 = 125_696  # by which the second version is known, whose head has rows of length one


def baichuan_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """transformers has no class of it: keys are those of the code that is published with the weights."""
    c = c | {"max_position_embeddings": c.get("max_position_embeddings") or c.get("model_max_length") or 4096}
    if c["num_hidden_layers"] != LAYERS_OF_13B and c["hidden_size"] != SIZE_OF_13B:
        return hf_decoder(c)
    return hf_decoder(c, layers=LayerKind(None), alibi=USUAL_STEEPNESS)


def baichuan_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The second version's head is divided by the length of each row when it is loaded."""
    names: dict[str, Pattern] = {"layers.*.attention.qkv.weight": "model.layers.*.self_attn.W_pack.weight"}
    return names | ({"head.weight": Source("lm_head.weight", unit_rows)} if config.vocab_size == VOCAB_OF_2 else {})


def unit_rows(weight: np.ndarray) -> np.ndarray:
    weight = weight.astype(np.float32)
    return weight / np.maximum(np.linalg.norm(weight, axis=1, keepdims=True), np.float32(1e-12))


BAICHUAN = Family(
    name="Baichuan", models="Baichuan 7B, 13B, Baichuan2 7B, 13B",
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"), model_types=("baichuan",),
    from_hf=baichuan_from_hf, hf_names=baichuan_hf_names, gguf_architectures=("baichuan",), gguf_names=permuted_names,
)  # fmt: skip


# Phi-3, 3.5, 4 and 4-mini: Llama with fused projections and LongRoPE (Abdin et al. 2024, arXiv:2404.14219)
def phi3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The original context is a key beside `rope_scaling`, not in it."""
    c = {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5} | c
    given = hf_rope_parameters(c)
    if "long_factor" in given:  # early files call it "su", and some "yarn"
        given = given | {"rope_type": "longrope"}
    return hf_decoder(c, layers=LayerKind(hf_rope(c, parameters=given), c.get("sliding_window")))


PHI3 = Family(
    name="Phi-3", models="Phi-3, 3.5, 4, 4-mini",
    architectures=("Phi3ForCausalLM",), model_types=("phi3",), gguf_architectures=("phi3",),
    from_hf=phi3_from_hf,
    gguf={
        "sliding_window": nonzero("attention.sliding_window"),
        "original_max_position_embeddings": lambda file: file(
            "rope.scaling.original_context_length", file("context_length")
        ),
    },
)  # fmt: skip


# Qwen 2, Qwen 2.5 and QwQ: Llama with biases on queries, keys and values (arXiv:2407.10671)
MAX_WINDOW_LAYERS = 28


def qwen2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    return hf_decoder(c, layers=windowed_layers(c), qkv_bias=True)


def windowed_layers(c: dict[str, Any]) -> tuple[LayerKind, ...]:
    """With `use_sliding_window`, layers from `max_window_layers` on slide, or those that `layer_types` says."""
    first, number = c.get("max_window_layers", MAX_WINDOW_LAYERS), c["num_hidden_layers"]
    kinds = c.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(number)]
    return sliding_layers(hf_rope(c), _window(c), kinds)


def _window(c: dict[str, Any]) -> int | None:
    return c.get("sliding_window", 4096) if c.get("use_sliding_window") else None


QWEN2 = Family(
    name="Qwen 2", models="Qwen 2, 2.5, QwQ, DeepSeek-R1-Distill-Qwen, Qwen2-VL, Qwen2.5-VL, InternVL (text)",
    architectures=(
        "Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
        "InternVLForConditionalGeneration", "GotOcr2ForConditionalGeneration",
    ),
    model_types=("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
    wrappers=("qwen2_vl", "qwen2_5_vl", "internvl", "got_ocr2"), gguf_architectures=("qwen2",),
    from_hf=qwen2_from_hf,
)  # fmt: skip


# Qwen 3, its embedding and reranking models: a norm on every query and key head (arXiv:2505.09388)
def qwen3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Heads have 128 channels where `head_dim` is absent."""
    c = {"head_dim": 128} | c
    return hf_decoder(c, layers=windowed_layers(c), qk_norm="rms", attention_bias=c.get("attention_bias", False))


QWEN3 = Family(
    name="Qwen 3", models="Qwen 3, Qwen3-Embedding, Qwen3-Reranker, Qwen3-VL, LightOnOCR (text)",
    architectures=(
        "Qwen3ForCausalLM", "Qwen3Model", "Qwen3VLForConditionalGeneration", "LightOnOcrForConditionalGeneration"
    ),
    model_types=("qwen3", "qwen3_vl_text"), wrappers=("qwen3_vl", "lighton_ocr"), gguf_architectures=("qwen3",),
    from_hf=qwen3_from_hf,
)  # fmt: skip


# Qwen 2 and Qwen 3 with a mixture of experts; the former also has an expert that every token passes
def qwen2_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """With `use_sliding_window`, every other one of the first `max_window_layers` layers slides."""
    c = {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
    } | c  # fmt: skip
    first = c.get("max_window_layers", MAX_WINDOW_LAYERS)
    layers = _moe_layers(c, [i % 2 == 0 and i < first for i in range(c["num_hidden_layers"])])
    moe = gated_experts(c, renormalize=bool(c["norm_topk_prob"]))
    return hf_decoder(c, layers=layers, qkv_bias=c.get("qkv_bias", True), moe=moe)


def gated_experts(c: dict[str, Any], renormalize: bool) -> MoEConfig:
    """Experts beside one that every token passes, through a gate."""
    shared = c["shared_expert_intermediate_size"]
    more = {"renormalize": renormalize, "shared_hidden": shared, "shared_gate": True}
    return hf_experts(c, "num_experts", "moe_intermediate_size", **more)


def qwen3_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {
        "num_key_value_heads": 4, "num_experts": c.get("num_local_experts", 128), "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": c.get("model_type") == "qwen3_vl_moe_text",
    } | c  # fmt: skip
    layers, bias = _moe_layers(c, [True] * c["num_hidden_layers"]), c.get("attention_bias", False)
    moe = hf_experts(c, "num_experts", "moe_intermediate_size", renormalize=bool(c["norm_topk_prob"]))
    return hf_decoder(c, layers=layers, qk_norm="rms", attention_bias=bias, moe=moe)


def _moe_layers(c: dict[str, Any], sliding: list[bool]) -> list[LayerKind]:
    rope, window = hf_rope(c), _window(c)
    if c.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in c["layer_types"]]
    return [
        LayerKind(rope, window if slides else None, sparse=sparse)
        for slides, sparse in zip(sliding, sparse_steps(c), strict=True)
    ]


def sparse_steps(c: dict[str, Any]) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th one, but for `mlp_only_layers`."""
    dense, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(c["num_hidden_layers"])]


def qwen3_moe_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Stacked experts lie `[out, in]` as transformers 5 writes them, or `[in, out]` as Qwen3-VL was published."""
    assert config.moe is not None
    found: dict[str, Pattern] = {}
    for name, rows in (("gate_up", 2 * config.moe.hidden), ("down", config.hidden_size)):
        path, stacked = f"layers.*.mlp.experts.{name}.weight", f"model.layers.*.mlp.experts.{name}_proj"
        usual = hf_expert_names(config)[path]
        assert isinstance(usual, AnyOf)
        found[path] = AnyOf(usual.options[0], Source(stacked, partial(_with_rows, rows)), f"{stacked}_blocks")
    return found


def _with_rows(rows: int, stack: np.ndarray) -> np.ndarray:
    return stack if stack.shape[1] == rows else transposed(stack)


def _gguf_expert_size(file: GgufFile) -> int:
    return file("expert_feed_forward_length", file("feed_forward_length") // max(file("expert_used_count"), 1))


QWEN2_MOE = Family(
    name="Qwen 2 MoE", models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    architectures=("Qwen2MoeForCausalLM",), model_types=("qwen2_moe",), gguf_architectures=("qwen2moe",),
    from_hf=qwen2_moe_from_hf, hf_names=partial(hf_expert_names, shared="shared_expert"),
    gguf=GGUF_EXPERTS | {
        "moe_intermediate_size": _gguf_expert_size,
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
)  # fmt: skip

QWEN3_MOE = Family(
    name="Qwen 3 MoE", models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-VL with experts (text)",
    architectures=("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
    model_types=("qwen3_moe", "qwen3_vl_moe_text"), wrappers=("qwen3_vl_moe",), gguf_architectures=("qwen3moe",),
    from_hf=qwen3_moe_from_hf, hf_names=qwen3_moe_hf_names,
    # Weights are renormalised in all published models; a file does not say it.
    gguf=GGUF_EXPERTS | {"moe_intermediate_size": _gguf_expert_size, "norm_topk_prob": True},
)  # fmt: skip
