"""Idefics 3, SmolVLM and SmolVLM2: SigLIP over tiles of an image, whose patches are shuffled into fewer rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.models.config import Projection
from jaxllm.models.vision import VisionFamily
from jaxllm.models.vision.parts import SIGLIP_NAMES, pixel_options, sides, siglip_blocks, text_size
from jaxllm.models.vision.processor import HALF, Cutting, Encode, Grid, ImageOptions, Processor
from jaxllm.models.vision.tower import MergerConfig, PositionTable, TowerConfig
from jaxllm.weights.names import Pattern

DEFAULTS = {"intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 32}
MOST_PIXELS = 4096  # of a side
LANCZOS = 1


def tower(c: dict[str, Any]) -> TowerConfig:
    v = DEFAULTS | c["vision_config"]
    side = v["image_size"] // v["patch_size"]
    return TowerConfig(
        blocks=siglip_blocks(v), inputs=3 * v["patch_size"] ** 2, merge=c.get("scale_factor", 2),
        table=PositionTable(side, "fraction"), last_norm="layer",
        merger=MergerConfig(products=(Projection(text_size(c), bias=False),)),
    )  # fmt: skip


def names(c: dict[str, Any], config: TowerConfig) -> dict[str, Pattern]:
    return SIGLIP_NAMES | {"merger.products.0.weight": "projector.modality_projection.proj.weight"}


@dataclass(frozen=True, kw_only=True)
class TilesProcessor(Processor):
    """An image is scaled to `longest` pixels, cut into square tiles, and added as one more of them.

    With `split` off the image is one tile.
    """

    tile: int
    longest: int
    split: bool = True

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        """Fewer tiles, so that those of a square image have no more rows, or the one tile there is at least."""
        if max_rows is None:
            return self
        most = max_rows // (self.tile // self.patch // self.merge) ** 2 - 1
        longest = min(self.longest, self.tile * math.isqrt(max(most, 0)))
        return replace(self, longest=max(longest, self.tile), split=self.split and longest > 0)

    def plan(self, height: int, width: int) -> Cutting:
        first, tile = self._scaled(height, width), self.tile
        if not self.split:
            return Cutting((first, (tile, tile)))
        height, width = first
        ratio = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        if max(height, width) <= tile:
            return Cutting((first, (height, width)))
        return Cutting(
            (first, (height, width)), None, (height // tile, width // tile), (tile, tile), whole_of_last=True
        )

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """The longer side is scaled to `longest`, also up, and the other to an even number."""
        ratio, longest = width / height, self.longest
        if width >= height:
            height, width = int(longest / ratio), longest
            height += height % 2
            if width > MOST_PIXELS:
                height, width = int(MOST_PIXELS / ratio), MOST_PIXELS
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
            if height > MOST_PIXELS:
                height, width = MOST_PIXELS, int(MOST_PIXELS * ratio)
        return max(height, 1), max(width, 1)

    def pieces(self, grid: Grid) -> list[int | Sequence[int]]:
        around, each = "<fake_token_around_image>", self.rows(grid) // len(grid.tiles)
        found: list[int | Sequence[int]] = []
        end = ""
        rows, columns = grid.cut if len(grid.tiles) > 1 else (0, 0)
        for row in range(rows):
            for column in range(columns):
                found += [self.encode(f"{end}{around}<row_{row + 1}_col_{column + 1}>"), each]
                end = ""
            end = "\n"
        end = "\n\n" if rows else ""
        return [*found, self.encode(f"{end}{around}<global-img>"), each, self.encode(around)]


def processor(c: dict[str, Any], p: ImageOptions, encode: Encode) -> Processor:
    v = DEFAULTS | c["vision_config"]
    tile = sides(p, "max_image_size", {}).get("longest_edge") or v["image_size"]
    token = c.get("image_token_id", 128_257)
    return TilesProcessor(
        image=token, placeholder=token, patch=v["patch_size"], merge=c.get("scale_factor", 2), tile=tile,
        longest=sides(p, "size", {}).get("longest_edge") or 4 * tile, split=p.get("do_image_splitting") is not False,
        **pixel_options(p, encode, mean=HALF, std=HALF, resample=LANCZOS),
    )  # fmt: skip


_FAMILY = VisionFamily(
    tower, names,
    {"tower.": "embeddings.patch_embedding.weight", "projector.": "modality_projection.proj.weight"}, processor,
)  # fmt: skip


def family(c: dict[str, Any]) -> VisionFamily:
    return _FAMILY
