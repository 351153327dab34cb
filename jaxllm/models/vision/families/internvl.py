"""InternVL 3 and 3.5 in transformers' format: tiles of one size with a class row each, four patches to a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxllm.models.names import in_layers, linear
from jaxllm.models.vision import VisionFamily
from jaxllm.models.vision.parts import blocks, flat, mlp, pixel_options, text_size, with_class_row
from jaxllm.models.vision.processor import CLIP_MEAN, CLIP_STD, Cutting, Encode, Grid, ImageOptions, Processor
from jaxllm.models.vision.tower import MergerConfig, PositionTable, TowerConfig
from jaxllm.weights.names import Pattern, Source

DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
}  # fmt: skip


def _vision(c: dict[str, Any]) -> dict[str, Any]:
    """Sizes are lists of two in some files."""
    v = DEFAULTS | c["vision_config"]
    return v | {key: v[key][0] for key in ("image_size", "patch_size") if isinstance(v[key], list)}


def _merge(c: dict[str, Any]) -> int:
    return round(1 / c.get("downsample_ratio", 0.5))


def tower(c: dict[str, Any]) -> TowerConfig:
    v, size = _vision(c), text_size(c)
    layers = blocks(
        v, size=v["hidden_size"], heads=v["num_attention_heads"], count=v["num_hidden_layers"],
        mlp=v["intermediate_size"], eps=v["layer_norm_eps"], qkv_bias=v.get("attention_bias", False),
        norm="rms" if v.get("norm_type") == "rms_norm" else "layer",
        qk_norm="rms_whole" if v.get("use_qk_norm") else None,
    )  # fmt: skip
    products = mlp(size, size, c.get("projector_hidden_act", "gelu"))
    return TowerConfig(
        blocks=layers, inputs=3 * v["patch_size"] ** 2, merge=_merge(c),
        table=PositionTable(v["image_size"] // v["patch_size"], class_row=True),
        merger=MergerConfig(pooled_norm="layer", norm_eps=1e-5, products=products),
    )  # fmt: skip


def names(c: dict[str, Any], config: TowerConfig) -> dict[str, Pattern]:
    """What an attention or an MLP gives is multiplied by learnt factors, here by its last matrix's rows."""
    layer, embeddings = "tower.encoder.layer.*", "tower.embeddings"
    patch, attention = f"{embeddings}.patch_embeddings.projection", f"{layer}.attention"
    own = (f"{embeddings}.cls_token", f"{patch}.bias")
    found: dict[str, Pattern] = {
        "patch.weight": flat(f"{patch}.weight"),
        "patch.bias": f"{patch}.bias",
        "positions": Source(f"{embeddings}.position_embeddings", with_class_row, also=own),
        **in_layers(layer, {
            "attention_norm": "layernorm_before", "mlp_norm": "layernorm_after", "mlp.up": "mlp.fc1",
            "attention.q_norm": "attention.q_norm", "attention.k_norm": "attention.k_norm",
        }),
        **linear("layers.*.attention.qkv", *(f"{attention}.{p}_proj" for p in "qkv")),
        **linear("merger.pooled_norm", "projector.layer_norm"),
        **linear("merger.products.0", "projector.linear_1"),
        **linear("merger.products.1", "projector.linear_2"),
    }  # fmt: skip
    scaled = {"attention.output": ("attention.projection_layer", 1), "mlp.down": ("mlp.fc2", 2)}
    for path, (name, number) in scaled.items():
        for kind in ("weight", "bias"):
            factor = f"{layer}.lambda_{number}"
            found[f"layers.*.{path}.{kind}"] = Source(f"{layer}.{name}.{kind}", _scaled, also=(factor,))
    return found


def _scaled(rows: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return rows.astype(np.float32) * factor.reshape(-1, *[1] * (rows.ndim - 1)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class AspectProcessor(Processor):
    """Up to `most` square tiles, in the arrangement nearest to the image's shape, and the whole image as one more."""

    tile: int
    least: int = 1
    most: int = 12

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        if max_rows is None:
            return self
        most = max(1, min(self.most, max_rows // (self.tile // self.patch // self.merge) ** 2 - 1))
        return replace(self, most=most, least=min(self.least, most))

    def plan(self, height: int, width: int) -> Cutting:
        sides, nearest, best = range(1, self.most + 1), float("inf"), (1, 1)
        shapes = [(w, h) for w in sides for h in sides if self.least <= w * h <= self.most]
        for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            away = abs(width / height - columns / rows)
            wide = height * width > 0.5 * self.tile**2 * columns * rows
            if away < nearest or (away == nearest and wide):
                nearest, best = away, (rows, columns)
        rows, columns = best
        whole = (self.tile, self.tile) if rows * columns > 1 else None
        return Cutting(((rows * self.tile, columns * self.tile),), None, best, whole)

    def pieces(self, grid: Grid) -> list[int | Sequence[int]]:
        return [self.encode("<img>"), self.rows(grid), self.encode("</img>")]


def processor(c: dict[str, Any], p: ImageOptions, encode: Encode) -> Processor:
    """Its whole processor cuts images, whatever the default of its preparation of images is."""
    v, token = _vision(c), c.get("image_token_id", 151_667)
    most = p.get("max_patches", 12) if p.get("crop_to_patches") is not False else 1
    return AspectProcessor(
        image=token, placeholder=token, patch=v["patch_size"], merge=_merge(c), tile=v["image_size"],
        least=min(p.get("min_patches", 1), most), most=most, **pixel_options(p, encode, mean=CLIP_MEAN, std=CLIP_STD),
    )  # fmt: skip


INTERNVL = VisionFamily(
    tower, names,
    {"tower.": "embeddings.patch_embeddings.projection.weight", "projector.": "linear_1.weight"}, processor,
)  # fmt: skip


def family(c: dict[str, Any]) -> VisionFamily:
    return INTERNVL
