"""LLaVA: an early layer of CLIP or SigLIP, two products, and as many rows as patches; Pixtral has the same wrapper."""

from __future__ import annotations

from typing import Any

from jaxllm.models.names import linear
from jaxllm.models.vision import VisionFamily
from jaxllm.models.vision.families.pixtral import PIXTRAL
from jaxllm.models.vision.parts import SIGLIP_NAMES, mlp, pixel_options, sides, siglip_blocks, text_size, with_class_row
from jaxllm.models.vision.processor import CLIP_MEAN, CLIP_STD, Encode, FixedProcessor, ImageOptions, Processor
from jaxllm.models.vision.tower import MergerConfig, PositionTable, TowerConfig
from jaxllm.weights.names import Pattern, Source

DEFAULTS = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip


def _is_clip(c: dict[str, Any]) -> bool:
    return c["vision_config"].get("model_type", "clip_vision_model") == "clip_vision_model"


def tower(c: dict[str, Any]) -> TowerConfig:
    clip = _is_clip(c)
    v = (DEFAULTS if clip else {}) | c["vision_config"]
    layer = c.get("vision_feature_layer", -2)
    count = v.get("num_hidden_layers", 27) + 1 + layer if layer < 0 else layer
    size = text_size(c)
    return TowerConfig(
        blocks=siglip_blocks(v, count=count), inputs=3 * v["patch_size"] ** 2, merge=1, patch_bias=not clip,
        table=PositionTable(v["image_size"] // v["patch_size"], class_row=clip), first_norm="layer" if clip else None,
        merger=MergerConfig(
            products=mlp(size, size, c.get("projector_hidden_act", "gelu"), c.get("multimodal_projector_bias", True))
        ),
    )  # fmt: skip


def names(c: dict[str, Any], config: TowerConfig) -> dict[str, Pattern]:
    found = SIGLIP_NAMES | linear("first_norm", "tower.pre_layrnorm")
    if _is_clip(c):
        table, own = "tower.embeddings.position_embedding.weight", "tower.embeddings.class_embedding"
        found["positions"] = Source(table, with_class_row, also=(own,))
    products = {f"merger.products.{i}": f"projector.linear_{i + 1}" for i in range(2)}
    return found | {key: value for path, name in products.items() for key, value in linear(path, name).items()}


def processor(c: dict[str, Any], p: ImageOptions, encode: Encode) -> Processor:
    """The shortest side is scaled to the tower's size and the middle taken, or both sides are scaled."""
    v = (DEFAULTS if _is_clip(c) else {}) | c["vision_config"]
    size, token = v["image_size"], c.get("image_token_index", c.get("image_token_id", 32_000))
    given = sides(p, "size", {"shortest_edge": size} if _is_clip(c) else {})
    return FixedProcessor(
        image=token, placeholder=token, patch=v["patch_size"], merge=1, size=(size, size),
        shortest=given.get("shortest_edge"), **pixel_options(p, encode, mean=CLIP_MEAN, std=CLIP_STD),
    )  # fmt: skip


LLAVA = VisionFamily(
    tower, names, {"tower.": "embeddings.patch_embedding.weight", "projector.": "linear_1.weight"}, processor
)


def family(c: dict[str, Any]) -> VisionFamily:
    return PIXTRAL if c["vision_config"].get("model_type") == "pixtral" else LLAVA
