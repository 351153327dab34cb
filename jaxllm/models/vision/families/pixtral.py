"""Pixtral's tower, for images of any shape: Mistral Small 3.x and 4, Ministral 3, LightOnOCR, Pixtral 12B."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.models.config import Projection
from jaxllm.models.names import in_layers, linear
from jaxllm.models.vision import VisionFamily
from jaxllm.models.vision.parts import blocks, flat, mlp, pixel_options, sides, text_size, unfolded
from jaxllm.models.vision.processor import CLIP_MEAN, CLIP_STD, Cutting, Encode, Grid, ImageOptions, Processor
from jaxllm.models.vision.tower import AxialRope, MergerConfig, TowerConfig
from jaxllm.weights.names import Pattern, Source

DEFAULTS = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
EPS = 1e-5


def tower(c: dict[str, Any]) -> TowerConfig:
    """A head has its share of the hidden size, whatever `head_dim` says."""
    v = DEFAULTS | c["vision_config"]
    size, merge = v["hidden_size"], _merge(c)
    theta = (v.get("rope_parameters") or {}).get("rope_theta") or v.get("rope_theta") or 10_000.0
    layers = blocks(
        v, size=size, heads=v["num_attention_heads"], count=v["num_hidden_layers"], mlp=v["intermediate_size"], eps=EPS,
        norm="rms", gated_mlp=True, qkv_bias=False, output_bias=False, mlp_bias=False,
    )  # fmt: skip
    bias = c.get("multimodal_projector_bias", c["model_type"] == "llava")
    products = mlp(text_size(c), text_size(c), c.get("projector_hidden_act", "gelu"), bias)
    eps = (c.get("text_config") or {}).get("rms_norm_eps", 1e-6)
    merger = MergerConfig(products=products)
    if merge > 1:
        merger = MergerConfig(norm="rms", norm_eps=eps, products=(Projection(size, bias=False), *products))
    return TowerConfig(
        blocks=layers, inputs=3 * v["patch_size"] ** 2, merge=merge, patch_bias=False, first_norm="rms",
        rope=AxialRope(layers.head_dim, theta, alternate=True), merger=merger,
    )  # fmt: skip


def _merge(c: dict[str, Any]) -> int:
    merge: int = c.get("spatial_merge_size", 1 if c["model_type"] == "llava" else 2)
    return merge


def names(c: dict[str, Any], config: TowerConfig) -> dict[str, Pattern]:
    first = len(config.merger.products) - 2
    return {
        "patch.weight": flat("tower.patch_conv.weight"),
        **linear("first_norm", "tower.ln_pre"),
        **in_layers("tower.transformer.layers.*", {
            "attention_norm": "attention_norm", "mlp_norm": "ffn_norm", "attention.output": "attention.o_proj",
            "attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            "mlp.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"), "mlp.down": "feed_forward.down_proj",
        }),
        **linear("merger.norm", "projector.norm"),
        "merger.products.0.weight": Source("projector.patch_merger.merging_layer.weight", unfolded(config.merge**2)),
        **linear(f"merger.products.{first}", "projector.linear_1"),
        **linear(f"merger.products.{first + 1}", "projector.linear_2"),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LinesProcessor(Processor):
    """Images keep their shape, up to `longest` pixels; a token stands between their lines, and another at the end."""

    longest: int
    marks: tuple[str, str] | None

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        """As long as a square image of that many rows may be."""
        unit = self.patch * self.merge
        return self if max_rows is None else replace(self, longest=min(self.longest, unit * math.isqrt(max_rows)))

    def plan(self, height: int, width: int) -> Cutting:
        unit, ratio = self.patch * self.merge, max(height, width) / self.longest
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return Cutting((((height - 1) // unit * unit + unit, (width - 1) // unit * unit + unit),))

    def pieces(self, grid: Grid) -> list[int | Sequence[int]]:
        if self.marks is None:
            return [self.rows(grid)]
        height, width = (side // self.merge for side in grid.tiles[0])
        line, end = (self.encode(mark) for mark in self.marks)
        lines: list[int | Sequence[int]] = [width, line]
        return [*(lines * (height - 1)), width, end]


def processor(c: dict[str, Any], p: ImageOptions, encode: Encode) -> Processor:
    token, patch = c.get("image_token_index", c.get("image_token_id", 10)), c["vision_config"].get("patch_size", 16)
    longest = sides(p, "size", {}).get("longest_edge") or c["vision_config"].get("image_size", 1024)
    return LinesProcessor(
        image=token, placeholder=token, patch=patch, merge=_merge(c), longest=longest,
        marks=None if c["model_type"] == "lighton_ocr" else ("[IMG_BREAK]", "[IMG_END]"),
        **pixel_options(p, encode, mean=CLIP_MEAN, std=CLIP_STD),
    )  # fmt: skip


PIXTRAL = VisionFamily(tower, names, {"tower.": "patch_conv.weight", "projector.": "linear_1.weight"}, processor)


def family(c: dict[str, Any]) -> VisionFamily:
    return PIXTRAL
