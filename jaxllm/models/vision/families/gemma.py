"""Gemma 3: SigLIP of one size of image, pooled. Gemma 4: images of any shape, positions by rows and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.models.config import Projection
from jaxllm.models.names import in_layers
from jaxllm.models.vision import VisionFamily
from jaxllm.models.vision.parts import SIGLIP_NAMES, blocks, pixel_options, siglip_blocks, text_size
from jaxllm.models.vision.processor import HALF, Cutting, Encode, FixedProcessor, Grid, ImageOptions, Processor
from jaxllm.models.vision.tower import AxialRope, MergerConfig, PositionTable, TowerConfig
from jaxllm.weights.names import Pattern, Source, plus_one, transposed

SIGLIP_DEFAULTS = {"image_size": 224, "patch_size": 16, "num_hidden_layers": 12, "hidden_size": 768}
SIGLIP_DEFAULTS |= {"intermediate_size": 3072, "num_attention_heads": 12}
BILINEAR = 2


# Gemma 3
def gemma3_tower(c: dict[str, Any]) -> TowerConfig:
    v = SIGLIP_DEFAULTS | c["vision_config"]
    layers, side = siglip_blocks(v), v["image_size"] // v["patch_size"]
    return TowerConfig(
        blocks=layers, inputs=3 * v["patch_size"] ** 2, merge=_pooled(c, v), last_norm="layer",
        table=PositionTable(side),
        merger=MergerConfig(
            pool="mean", pooled_norm="rms", norm_eps=layers.norm_eps, products=(Projection(text_size(c), bias=False),)
        ),
    )  # fmt: skip


def _pooled(c: dict[str, Any], v: dict[str, Any]) -> int:
    return v["image_size"] // v["patch_size"] // math.isqrt(c.get("mm_tokens_per_image", 256))


def gemma3_names(c: dict[str, Any], config: TowerConfig) -> dict[str, Pattern]:
    return SIGLIP_NAMES | {
        "merger.pooled_norm.weight": Source("projector.mm_soft_emb_norm.weight", plus_one),
        "merger.products.0.weight": Source("projector.mm_input_projection_weight", transposed),
    }


@dataclass(frozen=True, kw_only=True)
class Gemma3Processor(FixedProcessor):
    """Two ends of lines, a mark and as many rows for every image, a mark and two ends of lines."""

    end: int

    def pieces(self, grid: Grid) -> list[int | Sequence[int]]:
        lines = self.encode("\n\n")
        return [lines, [self.placeholder], self.rows(grid), [self.end], lines]


def gemma3_processor(c: dict[str, Any], p: ImageOptions, encode: Encode) -> Processor:
    v = SIGLIP_DEFAULTS | c["vision_config"]
    size = v["image_size"]
    return Gemma3Processor(
        image=c.get("image_token_index", c.get("image_token_id", 262_144)),
        placeholder=c.get("boi_token_index", 255_999), end=c.get("eoi_token_index", 256_000), patch=v["patch_size"],
        merge=_pooled(c, v), size=(size, size), both_ways=True,
        **pixel_options(p, encode, mean=HALF, std=HALF, resample=BILINEAR),
    )  # fmt: skip


# Gemma 4
def gemma4_tower(c: dict[str, Any]) -> TowerConfig:
    defaults = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
        "head_dim": 64, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240,
        "use_clipped_linears": False, "standardize": False, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    v = defaults | c["vision_config"]
    size, eps = v["hidden_size"], v["rms_norm_eps"]
    theta = (v.get("rope_parameters") or {}).get("rope_theta") or 100.0
    layers = blocks(
        {"hidden_act": v.get("hidden_activation", "gelu_pytorch_tanh")}, size=size, heads=v["num_attention_heads"],
        count=v["num_hidden_layers"], mlp=v["intermediate_size"], eps=eps, head_dim=v["head_dim"], norm="rms",
        gated_mlp=True, post_norms=True, qk_norm="rms", value_norm=True, attention_scale=1.0, qkv_bias=False,
        output_bias=False, mlp_bias=False,
    )  # fmt: skip
    return TowerConfig(
        blocks=layers, inputs=3 * v["patch_size"] ** 2, merge=v["pooling_kernel_size"], patch_bias=False,
        rope=AxialRope(v["head_dim"], theta, columns_first=True), clipped=v["use_clipped_linears"],
        table=PositionTable(v["position_embedding_size"], "axes"),
        merger=MergerConfig(
            pool="mean", scale=size**0.5, affine=v["standardize"], pooled_norm="unit", norm_eps=eps,
            products=(Projection(text_size(c), bias=False),),
        ),
    )  # fmt: skip


def gemma4_names(c: dict[str, Any], config: TowerConfig) -> dict[str, Pattern]:
    """Each half of a head is rotated by itself, where here the halves of its pairs lie in the halves of the head."""
    layer, turn = "tower.encoder.layers.*", partial(_pairs_apart, config.blocks.head_dim)
    norms = {
        "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    qkv = [f"{layer}.self_attn.{p}_proj" for p in "qkv"]
    gate_up = [f"{layer}.mlp.{p}_proj" for p in ("gate", "up")]
    out, down = f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"
    inputs = [Source(f"{name}.linear.weight", turn if i < 2 else None, by_rows=True) for i, name in enumerate(qkv)]
    names: dict[str, Pattern] = {
        "patch.weight": "tower.patch_embedder.input_proj.weight",
        "positions": Source("tower.patch_embedder.position_embedding_table", lambda t: t.reshape(-1, t.shape[-1])),
        "merger.bias": "tower.std_bias",
        "merger.factor": "tower.std_scale",
        "merger.products.0.weight": "projector.embed_vision.embedding_projection.weight",
        "layers.*.attention.qkv.weight": tuple(inputs),
        "layers.*.attention.output.weight": f"{out}.linear.weight",
        "layers.*.mlp.gate_up.weight": tuple(f"{name}.linear.weight" for name in gate_up),
        "layers.*.mlp.down.weight": f"{down}.linear.weight",
        **{f"layers.*.attention.{p}_norm.weight": Source(f"{layer}.self_attn.{p}_norm.weight", turn) for p in "qk"},
        **in_layers(layer, norms),
    }
    for path, parts in (("attention.qkv", qkv), ("mlp.gate_up", gate_up)):
        for i, name in enumerate(parts):
            whole = inputs[i] if path == "attention.qkv" else f"{name}.linear.weight"
            names |= {f"layers.*.{path}.parts.{i}.weight": whole, f"layers.*.{path}.parts.{i}.bounds": _bounds(name)}
    names |= {"layers.*.attention.output.bounds": _bounds(out), "layers.*.mlp.down.bounds": _bounds(down)}
    return names


def _bounds(name: str) -> Source:
    first, *others = (f"{name}.{end}" for end in ("input_min", "input_max", "output_min", "output_max"))
    return Source(first, lambda *bounds: np.stack([np.asarray(bound).reshape(()) for bound in bounds]), also=(*others,))


def _pairs_apart(head_dim: int, rows: np.ndarray) -> np.ndarray:
    """Worked example, head_dim 8: rows 0 1 | 2 3 (of columns) and 4 5 | 6 7 (of rows) -> 0 1 4 5 2 3 6 7."""
    quarters = rows.reshape(-1, 2, 2, head_dim // 4, *rows.shape[1:])
    return quarters.swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True, kw_only=True)
class Gemma4Processor(Processor):
    """An image is scaled, up as well, to have as many rows as there may be, and is kept in its shape."""

    most: int
    begin: int
    end: int

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        most = self.most if min_rows is None else max(self.most, min_rows)
        return replace(self, most=most if max_rows is None else min(most, max_rows))

    def plan(self, height: int, width: int) -> Cutting:
        unit = self.patch * self.merge
        factor = math.sqrt(self.most * unit**2 / (height * width))
        down, across = (math.floor(factor * side / unit) for side in (height, width))
        if down == 0 and across == 0:
            raise InvalidRequestError(f"images may have {self.most} tokens, which is too few for {width} × {height}")
        if down == 0:
            down, across = 1, min(width // height, self.most)
        elif across == 0:
            down, across = min(height // width, self.most), 1
        return Cutting(((down * unit, across * unit),))

    def pieces(self, grid: Grid) -> list[int | Sequence[int]]:
        return [[self.begin], self.rows(grid), [self.end]]


def gemma4_processor(c: dict[str, Any], p: ImageOptions, encode: Encode) -> Processor:
    """The tower takes numbers from -1 to 1, though transformers' processor gives them from 0 to 1."""
    v, token = c["vision_config"], c.get("image_token_id", 258_880)
    both_ways = (c.get("text_config") or {}).get("use_bidirectional_attention") == "vision"
    return Gemma4Processor(
        image=token, placeholder=token, begin=c.get("boi_token_id", 255_999), end=c.get("eoi_token_id", 258_882),
        patch=v.get("patch_size", 16), merge=v.get("pooling_kernel_size", 3), order="last", both_ways=both_ways,
        most=p.get("max_soft_tokens") or v.get("default_output_length") or 280,
        **pixel_options({**p, "do_normalize": None, "image_mean": HALF, "image_std": HALF}, encode),
    )  # fmt: skip


GEMMA3 = VisionFamily(
    gemma3_tower, gemma3_names,
    {"tower.": "embeddings.patch_embedding.weight", "projector.": "mm_soft_emb_norm.weight"}, gemma3_processor,
)  # fmt: skip
GEMMA4 = VisionFamily(
    gemma4_tower, gemma4_names,
    {"tower.": "patch_embedder.input_proj.weight", "projector.": "embed_vision.embedding_projection.weight"},
    gemma4_processor,
)  # fmt: skip


def family(c: dict[str, Any]) -> VisionFamily:
    return GEMMA3 if c["model_type"] == "gemma3" else GEMMA4
