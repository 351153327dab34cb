"""Models that see images: a tiny tower beside a tiny language model, of each kind that differs in either."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

TEXT = dict(
    hidden_size=64, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, max_position_embeddings=512, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    hidden_act="silu", rms_norm_eps=1e-6,
)  # fmt: skip


def text(kind: str, **k: Any) -> dict[str, Any]:
    return TEXT | {"model_type": kind} | k


def text_without_head_dim(kind: str, **k: Any) -> dict[str, Any]:
    return {key: value for key, value in text(kind, **k).items() if key != "head_dim"}


def model(
    architecture: str, model_type: str, *parts: dict[str, Any], tower: dict[str, Any], **k: Any
) -> dict[str, Any]:
    """A config.json: `k` are keys at its top, as are those of `parts`."""
    whole = {"architectures": [f"{architecture}ForConditionalGeneration"], "model_type": model_type}
    for part in parts:
        whole |= part
    return whole | {"vision_config": tower} | k


BLOCKS = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
"""A tower's layers."""
NORMED = BLOCKS | dict(layer_norm_eps=1e-6)
MERGED = dict(num_heads=2, spatial_merge_size=2, temporal_patch_size=2)
"""Of towers that take several images in time, and merge four patches into a row."""

MROPE = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
MIXED_MROPE = MROPE | {"mrope_interleaved": True}
PART_MROPE = MIXED_MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
GLM_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
QWEN_IDS = dict(image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
EXPERTS = dict(moe_intermediate_size=40, num_experts=4, num_experts_per_tok=2)
ROUTED = dict(
    moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
    first_k_dense_replace=1, routed_scaling_factor=1.0, norm_topk_prob=True,
)  # fmt: skip
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
SIGLIP = NORMED | dict(model_type="siglip_vision_model", image_size=56, patch_size=14, vision_use_head=False)
CLIP = BLOCKS | dict(
    model_type="clip_vision_model", num_hidden_layers=3, image_size=56, patch_size=14, hidden_act="quick_gelu",
    layer_norm_eps=1e-5, projection_dim=32,
)  # fmt: skip
PIXTRAL = BLOCKS | dict(
    model_type="pixtral", head_dim=16, image_size=112, patch_size=14, hidden_act="silu", rope_theta=10000.0
)
QWEN3_5_TOWER = MERGED | dict(
    depth=2, hidden_size=32, intermediate_size=40, out_hidden_size=64, patch_size=16, num_position_embeddings=36,
    deepstack_visual_indexes=[],
)  # fmt: skip
QWEN3_TOWER = QWEN3_5_TOWER | dict(depth=4, deepstack_visual_indexes=[0, 2], hidden_act="gelu_pytorch_tanh")
GLM_TOWER = MERGED | dict(
    depth=2, hidden_size=32, intermediate_size=56, out_hidden_size=64, patch_size=14, image_size=56,
    attention_bias=False, rms_norm_eps=1e-5,
)  # fmt: skip
GLM_IDS = dict(
    image_token_id=120, video_token_id=121, image_start_token_id=122, image_end_token_id=123,
    video_start_token_id=124, video_end_token_id=125,
)  # fmt: skip
INTERNVL = dict(
    image_token_id=120, image_seq_length=4, downsample_ratio=0.5, vision_feature_layer=-1,
    vision_feature_select_strategy="default", projector_hidden_act="gelu",
)  # fmt: skip
INTERNVL_TOWER = BLOCKS | dict(
    model_type="internvl_vision", image_size=[56, 56], patch_size=[14, 14], attention_bias=True, use_qk_norm=False,
    norm_type="layer_norm", layer_scale_init_value=0.1,
)  # fmt: skip
LLAVA = dict(
    image_token_index=120, vision_feature_layer=-2, vision_feature_select_strategy="default",
    projector_hidden_act="gelu",
)  # fmt: skip
IDEFICS = dict(image_token_id=120, scale_factor=2, text_config=text("llama"))
GEMMA4_TOWER = BLOCKS | dict(
    model_type="gemma4_vision", num_key_value_heads=2, head_dim=16, patch_size=16, pooling_kernel_size=3,
    position_embedding_size=64, use_clipped_linears=False, standardize=True,
)  # fmt: skip
GEMMA4_TEXT = text(
    "gemma4_text", hidden_activation="gelu_pytorch_tanh", sliding_window=8, global_head_dim=24,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"], vocab_size_per_layer_input=128,
    tie_word_embeddings=True,
)  # fmt: skip
GEMMA4_IDS = dict(
    boi_token_id=122, eoi_token_id=123, image_token_id=120, video_token_id=121, audio_token_id=124, boa_token_id=125,
    eoa_token_index=126,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": model(
        "Qwen2VL", "qwen2_vl", QWEN_IDS,
        text_config=text("qwen2_vl_text", rope_parameters=MROPE),
        tower=MERGED | dict(
            model_type="qwen2_vl_vision", depth=2, embed_dim=32, hidden_size=64, mlp_ratio=2, patch_size=14
        ),
    ),
    "qwen2_5_vl": model(
        "Qwen2_5_VL", "qwen2_5_vl", QWEN_IDS,
        text_config=text("qwen2_5_vl_text", rope_parameters=MROPE),
        tower=MERGED | dict(
            model_type="qwen2_5_vl_vision", depth=3, hidden_size=32, intermediate_size=40, out_hidden_size=64,
            patch_size=14, window_size=56, fullatt_block_indexes=[1], tokens_per_second=2,
        ),
    ),
    "qwen3_vl": model(
        "Qwen3VL", "qwen3_vl", QWEN_IDS,
        text_config=text("qwen3_vl_text", rope_parameters=MIXED_MROPE),
        tower=QWEN3_TOWER | dict(model_type="qwen3_vl_vision"),
    ),
    "qwen3_vl_moe": model(
        "Qwen3VLMoe", "qwen3_vl_moe", QWEN_IDS,
        text_config=text("qwen3_vl_moe_text", rope_parameters=MIXED_MROPE, **EXPERTS),
        tower=QWEN3_TOWER | dict(model_type="qwen3_vl_moe_vision"),
    ),
    "smolvlm": model(
        "SmolVLM", "smolvlm", IDEFICS, tower=NORMED | dict(model_type="smolvlm_vision", image_size=64, patch_size=16)
    ),
    "idefics3": model(
        "Idefics3", "idefics3", IDEFICS, tower=NORMED | dict(model_type="idefics3_vision", image_size=84, patch_size=14)
    ),
    "internvl": model("InternVL", "internvl", INTERNVL, text_config=text("qwen2"), tower=INTERNVL_TOWER),
    "internvl_6b": model(
        "InternVL", "internvl", INTERNVL, text_config=text("qwen3"),
        tower=INTERNVL_TOWER | dict(attention_bias=False, use_qk_norm=True, norm_type="rms_norm"),
    ),
    "llava": model("Llava", "llava", LLAVA, text_config=text("llama"), tower=CLIP),
    "llava_siglip": model(
        "Llava", "llava", LLAVA, vision_feature_select_strategy="full", text_config=text("llama"), tower=SIGLIP
    ),
    "lfm2_vl": model(
        "Lfm2Vl", "lfm2_vl", image_token_id=120, downsample_factor=2, projector_hidden_size=40,
        projector_use_layernorm=True, projector_bias=True, projector_hidden_act="gelu",
        text_config=text_without_head_dim(
            "lfm2", layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, block_ff_dim=64,
            block_auto_adjust_ff_dim=False,
        ),
        tower=NORMED | dict(model_type="siglip2_vision_model", num_patches=16, patch_size=16, vision_use_head=False),
    ),
    "glm4v": model(
        "Glm4v", "glm4v", GLM_IDS, text_config=text("glm4v_text", rope_parameters=GLM_MROPE),
        tower=GLM_TOWER | dict(model_type="glm4v_vision"),
    ),
    "glm46v": model(
        "Glm46V", "glm46v", GLM_IDS, text_config=text("glm4v_text", rope_parameters=GLM_MROPE),
        tower=GLM_TOWER | dict(model_type="glm4v_vision"),
    ),
    "glm4v_moe": model(
        "Glm4vMoe", "glm4v_moe", GLM_IDS,
        text_config=text("glm4v_moe_text", rope_parameters=GLM_MROPE, attention_bias=True, **ROUTED),
        tower=GLM_TOWER | dict(model_type="glm4v_moe_vision"),
    ),
    "paddleocr_vl": model(
        "PaddleOCRVL", "paddleocr_vl", QWEN_IDS,
        text_config=text("paddleocr_vl_text", rope_parameters=MROPE, use_bias=False),
        tower=NORMED | dict(model_type="paddleocr_vl_vision", image_size=56, patch_size=14, spatial_merge_size=2),
    ),
    "kimi_k25": model(
        "Kimi_K25", "kimi_k25", image_token_id=120, video_token_id=121, projection_hidden_size=32,
        projection_layer_norm_eps=1e-5,
        text_config=text_without_head_dim(
            "deepseek_v3", num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
            qk_rope_head_dim=8, v_head_dim=8, **ROUTED,
        ),
        tower=BLOCKS | dict(
            model_type="kimi_k25_vision", patch_size=14, pos_emb_height=6, pos_emb_width=6, pos_emb_time=4,
            merge_kernel_size=[2, 2],
        ),
    ),
    "qwen3_5_vision": model(
        "Qwen3_5", "qwen3_5", QWEN_IDS, text_config=text("qwen3_5_text", rope_parameters=PART_MROPE, **DELTA),
        tower=QWEN3_5_TOWER | dict(model_type="qwen3_5_vision"),
    ),
    "qwen3_5_moe_vision": model(
        "Qwen3_5Moe", "qwen3_5_moe", QWEN_IDS,
        text_config=text(
            "qwen3_5_moe_text", rope_parameters=PART_MROPE, shared_expert_intermediate_size=32, **EXPERTS, **DELTA
        ),
        tower=QWEN3_5_TOWER | dict(model_type="qwen3_5_moe_vision"),
    ),
    "mistral3_vision": model(
        "Mistral3", "mistral3", image_token_index=10, spatial_merge_size=2, vision_feature_layer=-1,
        projector_hidden_act="gelu", multimodal_projector_bias=False,
        text_config=text("mistral", sliding_window=None, rope_theta=10000.0), tower=PIXTRAL,
    ),
    "lighton_ocr": model(
        "LightOnOcr", "lighton_ocr", image_token_id=120, spatial_merge_size=2, vision_feature_layer=-1,
        text_config=text("qwen3"), tower=PIXTRAL,
    ),
    "pixtral": model(
        "Llava", "llava", LLAVA, image_token_index=10, vision_feature_layer=-1, vision_feature_select_strategy="full",
        text_config=text("mistral", sliding_window=None), tower=PIXTRAL | {"patch_size": 16},
    ),
    "gemma3": model(
        "Gemma3", "gemma3", mm_tokens_per_image=4, boi_token_index=122, eoi_token_index=123, image_token_index=127,
        text_config=text(
            "gemma3_text", hidden_activation="gelu_pytorch_tanh", sliding_window=8, query_pre_attn_scalar=16,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        tower=SIGLIP,
    ),
    "gemma4_e": model(
        "Gemma4", "gemma4", GEMMA4_IDS,
        text_config=GEMMA4_TEXT | dict(hidden_size_per_layer_input=8, num_kv_shared_layers=0),
        tower=GEMMA4_TOWER | dict(use_clipped_linears=True, standardize=False),
    ),
    "gemma4_31b": model(
        "Gemma4", "gemma4", GEMMA4_IDS,
        text_config=GEMMA4_TEXT | dict(hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
        tower=GEMMA4_TOWER,
    ),
}  # fmt: skip

KIMI_NAMES = (
    (r"^language_model\.model\.blocks", "language_model.model.layers"),
    (r"^model\.mm_projector", "mm_projector"),
    (r"^vision_tower\.encoder\.patch_embed", "vision_tower.patch_embed"),
    (r"^vision_tower\.encoder\.final_layernorm", "vision_tower.encoder.final_layernorm"),
)
"""From the names that transformers writes to published ones."""

TIED = ("gemma3", "gemma4_e", "gemma4_31b", "lfm2_vl", "paddleocr_vl")

VISION: dict[str, Variant] = {
    name: Variant(
        "a tower and its language model",
        {"tie_word_embeddings": name in TIED} | config,
        renamed=KIMI_NAMES if name == "kimi_k25" else (),
    )
    for name, config in CONFIGS.items()
}
