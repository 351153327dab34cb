"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and 3.6: patches of any image, rotated by row and column.

Qwen2.5 has windows, Qwen3 learnt positions besides, and Qwen3-VL rows of several layers (DeepStack).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxllm.models.names import in_layers, linear
from jaxllm.models.vision import VisionFamily
from jaxllm.models.vision.parts import blocks, flat, mlp, pixel_options, sides, text_size
from jaxllm.models.vision.processor import CLIP_MEAN, CLIP_STD, HALF, Encode, ImageOptions, PixelsProcessor, Processor
from jaxllm.models.vision.tower import AxialRope, MergerConfig, PositionTable, TowerConfig
from jaxllm.weights.names import Pattern

MERGE, FRAMES = 2, 2
IMAGE_2, IMAGE_3, IMAGE_3_5 = 151_655, 151_655, 248_056


def qwen2_tower(c: dict[str, Any]) -> TowerConfig:
    defaults = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
    v = defaults | c["vision_config"]
    size = v["embed_dim"]
    layers = blocks(v, size=size, heads=v["num_heads"], count=v["depth"], mlp=int(size * v["mlp_ratio"]))
    config = _tower(v, layers, 14, patch_bias=False)
    merger = MergerConfig(norm="layer", products=mlp(size * config.merge**2, v.get("hidden_size", text_size(c))))
    return replace(config, merger=merger)


def qwen2_5_tower(c: dict[str, Any]) -> TowerConfig:
    """Layers beside `fullatt_block_indexes` see windows of 112 pixels."""
    defaults = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
    }  # fmt: skip
    v = defaults | c["vision_config"]
    size = v["hidden_size"]
    layers = blocks(
        v, size=size, heads=v["num_heads"], count=v["depth"], mlp=v["intermediate_size"], norm="rms", gated_mlp=True
    )
    config = _tower(v, layers, 14, patch_bias=False)
    side = v["window_size"] // v.get("patch_size", 14) // config.merge
    merger = MergerConfig(norm="rms", products=mlp(size * config.merge**2, v.get("out_hidden_size", text_size(c))))
    return replace(config, window=side, full_layers=tuple(v["fullatt_block_indexes"]), merger=merger)


def qwen3_tower(c: dict[str, Any]) -> TowerConfig:
    defaults = {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304,
    }  # fmt: skip
    v = defaults | c["vision_config"]
    deepest = [8, 16, 24] if c["model_type"].startswith("qwen3_vl") else []
    size = v["hidden_size"]
    layers = blocks(v, size=size, heads=v["num_heads"], count=v["depth"], mlp=v["intermediate_size"])
    config = _tower(v, layers, 16)
    products = mlp(size * config.merge**2, v.get("out_hidden_size", text_size(c)))
    return replace(
        config, table=PositionTable(int(v["num_position_embeddings"] ** 0.5), "bilinear"),
        merger=MergerConfig(norm="layer", products=products),
        deepstack=tuple(v.get("deepstack_visual_indexes", deepest)),
    )  # fmt: skip


def _tower(v: dict[str, Any], layers: Any, patch: int, patch_bias: bool = True) -> TowerConfig:
    inputs = 3 * v.get("temporal_patch_size", FRAMES) * v.get("patch_size", patch) ** 2
    return TowerConfig(
        blocks=layers, inputs=inputs, merge=v.get("spatial_merge_size", MERGE), merger=MergerConfig(),
        patch_bias=patch_bias, rope=AxialRope(layers.head_dim),
    )  # fmt: skip


def names(up: str, down: str, norm: str, first: str, second: str) -> Callable[..., dict[str, Pattern]]:
    """The names of one generation: those of an MLP's products, of the merger's norm and of its products."""

    def found(c: dict[str, Any], config: TowerConfig) -> dict[str, Pattern]:
        block, gated = "tower.blocks.*", config.blocks.gated_mlp
        mlp_names: dict[str, Any] = {"mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj")} if gated else {"mlp.up": up}
        names: dict[str, Pattern] = {
            "patch.weight": flat("tower.patch_embed.proj.weight"),
            "patch.bias": "tower.patch_embed.proj.bias",
            "positions": "tower.pos_embed.weight",
            **in_layers(block, {
                "attention_norm": "norm1", "mlp_norm": "norm2", "attention.qkv": "attn.qkv",
                "attention.output": "attn.proj", "mlp.down": down, **mlp_names,
            }),
        }  # fmt: skip
        mergers = {"merger": "merger"}
        mergers |= {f"deep_mergers.{i}": f"deepstack_merger_list.{i}" for i in range(len(config.deepstack))}
        for path, name in mergers.items():
            names |= linear(f"{path}.{'norm' if path == 'merger' else 'pooled_norm'}", f"tower.{name}.{norm}")
            names |= linear(f"{path}.products.0", f"tower.{name}.{first}")
            names |= linear(f"{path}.products.1", f"tower.{name}.{second}")
        return names

    return found


def processor(patch: int, mean: Any, std: Any, least: int, most: int, image: int) -> Callable[..., Processor]:
    def found(c: dict[str, Any], p: ImageOptions, encode: Encode) -> Processor:
        v, size = c["vision_config"], sides(p, "size", {})
        token = c.get("image_token_id", image)
        return PixelsProcessor(
            image=token, placeholder=token, patch=v.get("patch_size", patch), merge=v.get("spatial_merge_size", MERGE),
            frames=v.get("temporal_patch_size", FRAMES),
            min_pixels=p.get("min_pixels") or size.get("shortest_edge") or least,
            max_pixels=p.get("max_pixels") or size.get("longest_edge") or most,
            **pixel_options(p, encode, mean=mean, std=std),
        )  # fmt: skip

    return found


_ANCHORS = {"tower.": "patch_embed.proj.weight"}
_OLD = names("mlp.fc1", "mlp.fc2", "ln_q", "mlp.0", "mlp.2")
_GATED = names("", "mlp.down_proj", "ln_q", "mlp.0", "mlp.2")
_NEW = names("mlp.linear_fc1", "mlp.linear_fc2", "norm", "linear_fc1", "linear_fc2")
_CLIP = (14, CLIP_MEAN, CLIP_STD, 56 * 56, 28 * 28 * 1280)
_HALF = (16, HALF, HALF, 65_536, 16_777_216)
QWEN2 = VisionFamily(qwen2_tower, _OLD, _ANCHORS, processor(*_CLIP, IMAGE_2))
QWEN2_5 = VisionFamily(qwen2_5_tower, _GATED, _ANCHORS, processor(*_CLIP, IMAGE_2))
QWEN3 = VisionFamily(qwen3_tower, _NEW, _ANCHORS, processor(*_HALF, IMAGE_3))
QWEN3_5 = VisionFamily(qwen3_tower, _NEW, _ANCHORS, processor(*_HALF, IMAGE_3_5))


def family(c: dict[str, Any]) -> VisionFamily:
    kind = c["model_type"].removesuffix("_moe")
    return {"qwen2_vl": QWEN2, "qwen2_5_vl": QWEN2_5, "qwen3_vl": QWEN3, "qwen3_5": QWEN3_5}[kind]
