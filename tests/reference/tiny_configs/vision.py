"""Models that see images: a tiny tower beside a tiny language model, of each kind that differs in either."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

TEXT = dict(
    hidden_size=64,
    intermediate_size=72,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=512,
    head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    rms_norm_eps=1e-6,
)


def text(kind: str, **k: Any) -> dict[str, Any]:
    return TEXT | {"model_type": kind} | k


MROPE = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN_IDS = dict(image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
EXPERTS = dict(moe_intermediate_size=40, num_experts=4, num_experts_per_tok=2)
SIGLIP = dict(
    model_type="siglip_vision_model",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=56,
    patch_size=14,
    layer_norm_eps=1e-6,
    vision_use_head=False,
)
CONFIGS: dict[str, dict[str, Any]] = {}
CONFIGS["qwen2_vl"] = dict(
    architectures=["Qwen2VLForConditionalGeneration"],
    model_type="qwen2_vl",
    text_config=text("qwen2_vl_text", rope_parameters=MROPE),
    vision_config=dict(
        model_type="qwen2_vl_vision",
        depth=2,
        embed_dim=32,
        hidden_size=64,
        num_heads=2,
        mlp_ratio=2,
        patch_size=14,
        spatial_merge_size=2,
        temporal_patch_size=2,
    ),
    **QWEN_IDS,
)
CONFIGS["qwen2_5_vl"] = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    model_type="qwen2_5_vl",
    text_config=text("qwen2_5_vl_text", rope_parameters=MROPE),
    vision_config=dict(
        model_type="qwen2_5_vl_vision",
        depth=3,
        hidden_size=32,
        intermediate_size=40,
        num_heads=2,
        out_hidden_size=64,
        patch_size=14,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=56,
        fullatt_block_indexes=[1],
        tokens_per_second=2,
    ),
    **QWEN_IDS,
)
QWEN3_TOWER = dict(
    depth=4,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    out_hidden_size=64,
    patch_size=16,
    spatial_merge_size=2,
    temporal_patch_size=2,
    num_position_embeddings=36,
    deepstack_visual_indexes=[0, 2],
    hidden_act="gelu_pytorch_tanh",
)
MIXED_MROPE = MROPE | {"mrope_interleaved": True}
CONFIGS["qwen3_vl"] = dict(
    architectures=["Qwen3VLForConditionalGeneration"],
    model_type="qwen3_vl",
    text_config=text("qwen3_vl_text", rope_parameters=MIXED_MROPE),
    vision_config=dict(model_type="qwen3_vl_vision") | QWEN3_TOWER,
    **QWEN_IDS,
)
CONFIGS["qwen3_vl_moe"] = dict(
    architectures=["Qwen3VLMoeForConditionalGeneration"],
    model_type="qwen3_vl_moe",
    text_config=text("qwen3_vl_moe_text", rope_parameters=MIXED_MROPE, **EXPERTS),
    vision_config=dict(model_type="qwen3_vl_moe_vision") | QWEN3_TOWER,
    **QWEN_IDS,
)
CONFIGS["smolvlm"] = dict(
    architectures=["SmolVLMForConditionalGeneration"],
    model_type="smolvlm",
    image_token_id=120,
    scale_factor=2,
    text_config=text("llama"),
    vision_config=dict(
        model_type="smolvlm_vision",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=16,
        layer_norm_eps=1e-6,
    ),
)
CONFIGS["idefics3"] = dict(
    architectures=["Idefics3ForConditionalGeneration"],
    model_type="idefics3",
    image_token_id=120,
    scale_factor=2,
    text_config=text("llama"),
    vision_config=dict(
        model_type="idefics3_vision",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=84,
        patch_size=14,
        layer_norm_eps=1e-6,
    ),
)
CONFIGS["internvl"] = dict(
    architectures=["InternVLForConditionalGeneration"],
    model_type="internvl",
    image_token_id=120,
    image_seq_length=4,
    downsample_ratio=0.5,
    vision_feature_layer=-1,
    vision_feature_select_strategy="default",
    projector_hidden_act="gelu",
    text_config=text("qwen2"),
    vision_config=dict(
        model_type="internvl_vision",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=[56, 56],
        patch_size=[14, 14],
        attention_bias=True,
        use_qk_norm=False,
        norm_type="layer_norm",
        layer_scale_init_value=0.1,
    ),
)
CONFIGS["internvl_6b"] = dict(
    architectures=["InternVLForConditionalGeneration"],
    model_type="internvl",
    image_token_id=120,
    image_seq_length=4,
    downsample_ratio=0.5,
    vision_feature_layer=-1,
    vision_feature_select_strategy="default",
    projector_hidden_act="gelu",
    text_config=text("qwen3"),
    vision_config=dict(
        model_type="internvl_vision",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=[56, 56],
        patch_size=[14, 14],
        attention_bias=False,
        use_qk_norm=True,
        norm_type="rms_norm",
        layer_scale_init_value=0.1,
    ),
)
CONFIGS["llava"] = dict(
    architectures=["LlavaForConditionalGeneration"],
    model_type="llava",
    image_token_index=120,
    vision_feature_layer=-2,
    vision_feature_select_strategy="default",
    projector_hidden_act="gelu",
    text_config=text("llama"),
    vision_config=dict(
        model_type="clip_vision_model",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        hidden_act="quick_gelu",
        layer_norm_eps=1e-5,
        projection_dim=32,
    ),
)
CONFIGS["llava_siglip"] = dict(
    architectures=["LlavaForConditionalGeneration"],
    model_type="llava",
    image_token_index=120,
    vision_feature_layer=-2,
    vision_feature_select_strategy="full",
    projector_hidden_act="gelu",
    text_config=text("llama"),
    vision_config=SIGLIP,
)
CONFIGS["lfm2_vl"] = dict(
    architectures=["Lfm2VlForConditionalGeneration"],
    model_type="lfm2_vl",
    image_token_id=120,
    downsample_factor=2,
    projector_hidden_size=40,
    projector_use_layernorm=True,
    projector_bias=True,
    projector_hidden_act="gelu",
    text_config={k: v for k, v in text("lfm2").items() if k != "head_dim"}
    | dict(
        layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, block_ff_dim=64, block_auto_adjust_ff_dim=False
    ),
    vision_config=dict(
        model_type="siglip2_vision_model",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_patches=16,
        patch_size=16,
        vision_use_head=False,
        layer_norm_eps=1e-6,
    ),
)
GLM_TOWER = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=56,
    num_heads=2,
    out_hidden_size=64,
    patch_size=14,
    spatial_merge_size=2,
    temporal_patch_size=2,
    image_size=56,
    attention_bias=False,
    rms_norm_eps=1e-5,
)
GLM_IDS = dict(
    image_token_id=120,
    video_token_id=121,
    image_start_token_id=122,
    image_end_token_id=123,
    video_start_token_id=124,
    video_end_token_id=125,
)
GLM_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
CONFIGS["glm4v"] = dict(
    architectures=["Glm4vForConditionalGeneration"],
    model_type="glm4v",
    text_config=text("glm4v_text", rope_parameters=GLM_MROPE),
    vision_config=dict(model_type="glm4v_vision") | GLM_TOWER,
    **GLM_IDS,
)
CONFIGS["glm46v"] = dict(
    architectures=["Glm46VForConditionalGeneration"],
    model_type="glm46v",
    text_config=text("glm4v_text", rope_parameters=GLM_MROPE),
    vision_config=dict(model_type="glm4v_vision") | GLM_TOWER,
    **GLM_IDS,
)
CONFIGS["glm4v_moe"] = dict(
    architectures=["Glm4vMoeForConditionalGeneration"],
    model_type="glm4v_moe",
    text_config=text(
        "glm4v_moe_text",
        rope_parameters=GLM_MROPE,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        attention_bias=True,
    ),
    vision_config=dict(model_type="glm4v_moe_vision") | GLM_TOWER,
    **GLM_IDS,
)
CONFIGS["paddleocr_vl"] = dict(
    architectures=["PaddleOCRVLForConditionalGeneration"],
    model_type="paddleocr_vl",
    text_config=text("paddleocr_vl_text", rope_parameters=MROPE, use_bias=False),
    vision_config=dict(
        model_type="paddleocr_vl_vision",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        spatial_merge_size=2,
        layer_norm_eps=1e-6,
    ),
    **QWEN_IDS,
)
CONFIGS["kimi_k25"] = dict(
    architectures=["Kimi_K25ForConditionalGeneration"],
    model_type="kimi_k25",
    image_token_id=120,
    video_token_id=121,
    projection_hidden_size=32,
    projection_layer_norm_eps=1e-5,
    text_config={k: v for k, v in text("deepseek_v3", num_key_value_heads=4).items() if k != "head_dim"}
    | dict(
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
    ),
    vision_config=dict(
        model_type="kimi_k25_vision",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=14,
        pos_emb_height=6,
        pos_emb_width=6,
        pos_emb_time=4,
        merge_kernel_size=[2, 2],
    ),
)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
QWEN3_5_TOWER = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    out_hidden_size=64,
    patch_size=16,
    spatial_merge_size=2,
    temporal_patch_size=2,
    num_position_embeddings=36,
    deepstack_visual_indexes=[],
)
CONFIGS["qwen3_5_vision"] = dict(
    architectures=["Qwen3_5ForConditionalGeneration"],
    model_type="qwen3_5",
    text_config=text(
        "qwen3_5_text",
        rope_parameters=MIXED_MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        **DELTA,
    ),
    vision_config=dict(model_type="qwen3_5_vision") | QWEN3_5_TOWER,
    **QWEN_IDS,
)
CONFIGS["qwen3_5_moe_vision"] = dict(
    architectures=["Qwen3_5MoeForConditionalGeneration"],
    model_type="qwen3_5_moe",
    text_config=text(
        "qwen3_5_moe_text",
        rope_parameters=MIXED_MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        shared_expert_intermediate_size=32,
        **EXPERTS,
        **DELTA,
    ),
    vision_config=dict(model_type="qwen3_5_moe_vision") | QWEN3_5_TOWER,
    **QWEN_IDS,
)
PIXTRAL = dict(
    model_type="pixtral",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=16,
    image_size=112,
    patch_size=14,
    hidden_act="silu",
    rope_theta=10000.0,
)
CONFIGS["mistral3_vision"] = dict(
    architectures=["Mistral3ForConditionalGeneration"],
    model_type="mistral3",
    image_token_index=10,
    spatial_merge_size=2,
    vision_feature_layer=-1,
    projector_hidden_act="gelu",
    multimodal_projector_bias=False,
    text_config=text("mistral", sliding_window=None, rope_theta=10000.0),
    vision_config=PIXTRAL,
)
CONFIGS["lighton_ocr"] = dict(
    architectures=["LightOnOcrForConditionalGeneration"],
    model_type="lighton_ocr",
    image_token_id=120,
    spatial_merge_size=2,
    vision_feature_layer=-1,
    text_config=text("qwen3"),
    vision_config=PIXTRAL,
)
CONFIGS["pixtral"] = dict(
    architectures=["LlavaForConditionalGeneration"],
    model_type="llava",
    image_token_index=10,
    vision_feature_layer=-1,
    vision_feature_select_strategy="full",
    projector_hidden_act="gelu",
    text_config=text("mistral", sliding_window=None),
    vision_config=PIXTRAL | {"patch_size": 16},
)
CONFIGS["gemma3"] = dict(
    architectures=["Gemma3ForConditionalGeneration"],
    model_type="gemma3",
    mm_tokens_per_image=4,
    boi_token_index=122,
    eoi_token_index=123,
    image_token_index=127,
    text_config=text(
        "gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=8,
        query_pre_attn_scalar=16,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    vision_config=SIGLIP,
)
GEMMA4_TOWER = dict(
    model_type="gemma4_vision",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    patch_size=16,
    pooling_kernel_size=3,
    position_embedding_size=64,
    use_clipped_linears=False,
    standardize=True,
)
GEMMA4_TEXT = text(
    "gemma4_text",
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=8,
    global_head_dim=24,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    vocab_size_per_layer_input=128,
    tie_word_embeddings=True,
)
GEMMA4_IDS = dict(
    boi_token_id=122,
    eoi_token_id=123,
    image_token_id=120,
    video_token_id=121,
    audio_token_id=124,
    boa_token_id=125,
    eoa_token_index=126,
)
CONFIGS["gemma4_e"] = dict(
    architectures=["Gemma4ForConditionalGeneration"],
    model_type="gemma4",
    text_config=GEMMA4_TEXT | dict(hidden_size_per_layer_input=8, num_kv_shared_layers=0),
    vision_config=GEMMA4_TOWER | dict(use_clipped_linears=True, standardize=False),
    **GEMMA4_IDS,
)
CONFIGS["gemma4_31b"] = dict(
    architectures=["Gemma4ForConditionalGeneration"],
    model_type="gemma4",
    text_config=GEMMA4_TEXT | dict(hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
    vision_config=GEMMA4_TOWER,
    **GEMMA4_IDS,
)

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
