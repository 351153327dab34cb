"""Every family's tower and its preparation of images, as tables.

Throughout, `c` is config.json, `v` its `vision_config` with the family's defaults, and `p` preprocessor_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxllm.models.config import DecoderConfig, EncoderConfig, LayerKind, Projection
from jaxllm.models.vision import names
from jaxllm.models.vision.processor import CLIP, HALF, Colours, Encode, ImageOptions, Processor, pixel_fields
from jaxllm.models.vision.processors import (
    AreaProcessor,
    AspectProcessor,
    FixedProcessor,
    LinesProcessor,
    PixelsProcessor,
    TilesProcessor,
)  # fmt: skip
from jaxllm.models.vision.tower import AxialRope, MergerConfig, PositionTable, TowerConfig

Config = dict[str, Any]
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # Pillow's numbers


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """One family's tower and its preparation of images.

    Attributes:
        defaults: the values of keys that `vision_config` lacks.
        tower_of: from `c` and `v`.
        names: the tensors of the tower's parameters; "tower" and "projector" stand for the checkpoint's prefixes.
        anchors: for each of the two, the rest of the name of a tensor that every checkpoint has.
        prepared: the class of its processor.
        fields: those of a processor that only this class has, or that differ here; from `c`, `v` and `p`.
        image: the token of an image's rows, if `c` has none.
        colours: mean and standard deviation, if `p` has none.
        resample: Pillow's number of the filter for resizing, if `p` has none.
    """

    defaults: Config
    tower_of: Callable[[Config, Config], TowerConfig]
    names: names.TowerNames | Callable[[TowerConfig], names.TowerNames]
    anchors: dict[str, str]
    prepared: type[Processor]
    fields: Callable[[Config, Config, ImageOptions], Config]
    image: int
    colours: Colours = CLIP
    resample: int = BICUBIC

    def tower(self, c: Config) -> TowerConfig:
        """Raises KeyError for a key that is missing."""
        return self.tower_of(c, self._vision(c))

    def processor(self, c: Config, p: ImageOptions, encode: Encode) -> Processor:
        """The processor for a tokenizer's `encode`. Raises CheckpointError for options that are not valid."""
        v, pixels = self._vision(c), pixel_fields(p, self.colours, self.resample)
        token = c.get("image_token_index", c.get("image_token_id", self.image))
        usual = {
            "image": token, "placeholder": token, "patch": v["patch_size"], "merge": self.tower_of(c, v).merge,
            "frames": v.get("temporal_patch_size", 1), "encode": encode,
        }  # fmt: skip
        return self.prepared(**usual | pixels | self.fields(c, v, p))

    def _vision(self, c: Config) -> Config:
        """Sizes are lists of two equal numbers in some files."""
        v = self.defaults | c["vision_config"]
        return v | {key: v[key][0] for key in ("image_size", "patch_size") if isinstance(v.get(key), list)}


# Shared by towers
RMS_GATED = {"norm": "rms", "gated_mlp": True}
NO_BIAS = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _tower(v: Config, merge: int, merger: MergerConfig, layers: Config | None = None, **fields: Any) -> TowerConfig:
    """The layers are SigLIP's, except for what `layers` says."""
    size, heads = v["hidden_size"], v["num_attention_heads"]
    differences: Config = {
        "head_dim": size // heads, "norm_eps": v.get("layer_norm_eps", 1e-6), "norm": "layer", "gated_mlp": False,
        "hidden_act": v.get("hidden_act", "gelu_pytorch_tanh"), "qkv_bias": True, "output_bias": True, "mlp_bias": True,
    } | (layers or {})  # fmt: skip
    blocks = DecoderConfig(
        vocab_size=1, hidden_size=size, intermediate_size=v["intermediate_size"], num_heads=heads, num_kv_heads=heads,
        max_position_embeddings=1, layers=(LayerKind(None),) * v["num_hidden_layers"], encoder=EncoderConfig(),
        **differences,
    )  # fmt: skip
    inputs = 3 * v.get("temporal_patch_size", 1) * v["patch_size"] ** 2
    return TowerConfig(blocks=blocks, inputs=inputs, merge=merge, merger=merger, **fields)


def _text_size(c: Config) -> int:
    """The width of the language model, whose keys stand at the top of older files."""
    size: int = (c.get("text_config") or c)["hidden_size"]
    return size


def _product(c: Config) -> tuple[Projection, ...]:
    return (Projection(_text_size(c), bias=False),)


def _mlp(c: Config, hidden: int | None = None, out: int | None = None, bias: bool = True) -> tuple[Projection, ...]:
    size, activation = out or _text_size(c), c.get("projector_hidden_act", "gelu")
    return Projection(hidden or size, activation, bias), Projection(size, "identity", bias)


def _table(v: Config, kind: Any = "fixed", class_row: bool = False) -> PositionTable:
    return PositionTable(v["image_size"] // v["patch_size"], kind, class_row)


def _theta(v: Config, default: float) -> float:
    theta: float = (v.get("rope_parameters") or {}).get("rope_theta") or v.get("rope_theta") or default
    return theta


def _edge(p: ImageOptions, edge: str, key: str = "size") -> int | None:
    found: int | None = (p.get(key) or {}).get(f"{edge}_edge")
    return found


# SigLIP and CLIP: LLaVA, Gemma 3, Idefics 3, SmolVLM and SmolVLM2
SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16,
}  # fmt: skip
CLIP_LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
PATCH_EMBEDDING = {"tower": "embeddings.patch_embedding.weight"}


def _llava_tower(c: Config, v: Config, **fields: Any) -> TowerConfig:
    """An early layer of the tower, and a row for each patch."""
    layer = c.get("vision_feature_layer", -2)
    v = v | {"num_hidden_layers": v["num_hidden_layers"] + 1 + layer if layer < 0 else layer}
    merger = MergerConfig(products=_mlp(c, bias=c.get("multimodal_projector_bias", True)))
    return _tower(v, 1, merger, **fields)


def _gemma3_tower(c: Config, v: Config) -> TowerConfig:
    table, eps = _table(v), v.get("layer_norm_eps", 1e-6)
    merger = MergerConfig(pool="mean", pooled_norm="rms", norm_eps=eps, products=_product(c))
    return _tower(
        v, table.side // math.isqrt(c.get("mm_tokens_per_image", 256)), merger, last_norm="layer", table=table
    )


def _gemma3_fields(c: Config, v: Config, p: ImageOptions) -> Config:
    begin, end, lines = c.get("boi_token_index", 255_999), c.get("eoi_token_index", 256_000), "\n\n"
    return {
        "size": (v["image_size"],) * 2, "both_ways": True, "placeholder": begin, "before": (lines, (begin,)),
        "after": ((end,), lines),
    }  # fmt: skip


def _idefics_fields(c: Config, v: Config, p: ImageOptions) -> Config:
    tile = _edge(p, "longest", "max_image_size") or v["image_size"]
    longest = _edge(p, "longest") or 4 * tile
    return {"tile": tile, "longest": longest, "split": p.get("do_image_splitting") is not False}


LLAVA_USUAL: Config = {
    "anchors": PATCH_EMBEDDING | {"projector": "linear_1.weight"}, "prepared": FixedProcessor, "image": 32_000
}  # fmt: skip
LLAVA = VisionFamily(
    defaults=CLIP_LARGE, names=names.LLAVA, **LLAVA_USUAL,
    tower_of=lambda c, v: _llava_tower(c, v, patch_bias=False, table=_table(v, class_row=True), first_norm="layer"),
    fields=lambda c, v, p: {
        "size": (v["image_size"],) * 2, "shortest": _edge(p, "shortest") if p.get("size") else v["image_size"]
    },
)  # fmt: skip
LLAVA_SIGLIP = VisionFamily(
    defaults=SIGLIP, tower_of=lambda c, v: _llava_tower(c, v, table=_table(v)), names=names.LLAVA_SIGLIP, **LLAVA_USUAL,
    fields=lambda c, v, p: {"size": (v["image_size"],) * 2, "shortest": _edge(p, "shortest")},
)  # fmt: skip
GEMMA3 = VisionFamily(
    defaults=SIGLIP, tower_of=_gemma3_tower, names=names.GEMMA3, prepared=FixedProcessor, fields=_gemma3_fields,
    anchors=PATCH_EMBEDDING | {"projector": "mm_soft_emb_norm.weight"}, image=262_144, colours=HALF, resample=BILINEAR,
)  # fmt: skip
IDEFICS3 = VisionFamily(
    defaults=SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}, names=names.IDEFICS3,
    tower_of=lambda c, v: _tower(
        v, c.get("scale_factor", 2), MergerConfig(products=_product(c)), table=_table(v, "fraction"), last_norm="layer"
    ),
    anchors=PATCH_EMBEDDING | {"projector": "modality_projection.proj.weight"}, prepared=TilesProcessor,
    fields=_idefics_fields, image=128_257, colours=HALF, resample=LANCZOS,
)  # fmt: skip


# InternVL 3 and 3.5 in transformers' format
def _internvl_tower(c: Config, v: Config) -> TowerConfig:
    layers = {
        "qkv_bias": v.get("attention_bias", False), "norm": "rms" if v.get("norm_type") == "rms_norm" else "layer",
        "qk_norm": "rms_whole" if v.get("use_qk_norm") else None,
    }  # fmt: skip
    merger = MergerConfig(pooled_norm="layer", norm_eps=1e-5, products=_mlp(c))
    return _tower(v, round(1 / c.get("downsample_ratio", 0.5)), merger, layers, table=_table(v, class_row=True))


def _internvl_fields(c: Config, v: Config, p: ImageOptions) -> Config:
    most = p.get("max_patches", 12) if p.get("crop_to_patches") is not False else 1
    tiles = {"tile": v["image_size"], "least": min(p.get("min_patches", 1), most), "most": most}
    return tiles | {"before": ("<img>",), "after": ("</img>",)}


INTERNVL = VisionFamily(
    defaults=CLIP_LARGE | {"image_size": 448, "hidden_act": "gelu", "layer_norm_eps": 1e-6}, tower_of=_internvl_tower,
    names=names.INTERNVL, prepared=AspectProcessor, fields=_internvl_fields, image=151_667,
    anchors={"tower": "embeddings.patch_embeddings.projection.weight", "projector": "linear_1.weight"},
)  # fmt: skip


# Pixtral's tower: Mistral Small 3.x and 4, Ministral 3, LightOnOCR, and Pixtral 12B, whose wrapper is LLaVA's
def _pixtral_tower(c: Config, v: Config) -> TowerConfig:
    """As in transformers, heads share the hidden size equally, whatever `head_dim` says."""
    in_llava, size = c["model_type"] == "llava", v["hidden_size"]
    merge = c.get("spatial_merge_size", 1 if in_llava else 2)
    products = _mlp(c, bias=c.get("multimodal_projector_bias", in_llava))
    merger = MergerConfig(products=products)
    if merge > 1:
        eps = (c.get("text_config") or {}).get("rms_norm_eps", 1e-6)
        merger = MergerConfig(norm="rms", norm_eps=eps, products=(Projection(size, bias=False), *products))
    return _tower(
        v, merge, merger, RMS_GATED | NO_BIAS | {"norm_eps": 1e-5}, patch_bias=False, first_norm="rms",
        rope=AxialRope(size // v["num_attention_heads"], _theta(v, 10_000.0), alternate=True),
    )  # fmt: skip


PIXTRAL = VisionFamily(
    defaults=CLIP_LARGE | {"image_size": 1024, "patch_size": 16, "hidden_act": "gelu"}, tower_of=_pixtral_tower,
    names=names.pixtral, anchors={"tower": "patch_conv.weight", "projector": "linear_1.weight"}, image=10,
    prepared=LinesProcessor, fields=lambda c, v, p: {
        "longest": _edge(p, "longest") or v["image_size"],
        "marks": None if c["model_type"] == "lighton_ocr" else ("[IMG_BREAK]", "[IMG_END]"),
    },
)  # fmt: skip


# Qwen2-VL, Qwen2.5-VL (windows), Qwen3-VL (learnt positions, DeepStack), Qwen3.5 and 3.6
QWEN = {"num_heads": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
QWEN2 = QWEN | {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu", "patch_size": 14}
QWEN2_5 = QWEN | {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "hidden_act": "silu", "patch_size": 14,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
QWEN3_5 = QWEN | {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}  # fmt: skip
QWEN3 = QWEN3_5 | {"deepstack_visual_indexes": [8, 16, 24]}


def _qwen2_tower(c: Config, v: Config) -> TowerConfig:
    """`hidden_size` is the width of the rows."""
    size, out = v["embed_dim"], v.get("hidden_size")
    own = {"hidden_size": size, "intermediate_size": int(size * v["mlp_ratio"]), "out_hidden_size": out}
    return _qwen_tower(c, v | own, patch_bias=False)


def _qwen2_5_tower(c: Config, v: Config) -> TowerConfig:
    """Layers see windows of `window_size` pixels, except for `fullatt_block_indexes`."""
    window = v["window_size"] // v["patch_size"] // v["spatial_merge_size"]
    full = tuple(v["fullatt_block_indexes"])
    return _qwen_tower(c, v, RMS_GATED, norm="rms", window=window, full_layers=full, patch_bias=False)


def _qwen3_tower(c: Config, v: Config) -> TowerConfig:
    table = PositionTable(math.isqrt(v["num_position_embeddings"]), "bilinear")
    return _qwen_tower(c, v, table=table, deepstack=tuple(v["deepstack_visual_indexes"]))


def _qwen_tower(c: Config, v: Config, layers: Config | None = None, norm: Any = "layer", **fields: Any) -> TowerConfig:
    size, heads, merge = v["hidden_size"], v["num_heads"], v["spatial_merge_size"]
    merger = MergerConfig(norm=norm, products=_mlp(c, size * merge**2, v.get("out_hidden_size")))
    usual = {"num_hidden_layers": v["depth"], "num_attention_heads": heads}
    return _tower(v | usual, merge, merger, layers, rope=AxialRope(size // heads), **fields)


def _qwen_family(
    defaults: Config, tower_of: Callable[[Config, Config], TowerConfig], image: int, least: int, most: int,
    colours: Colours,
) -> VisionFamily:  # fmt: skip
    """A family whose images have between `least` and `most` pixels."""
    return VisionFamily(
        defaults=defaults, tower_of=tower_of, names=names.qwen, anchors={"tower": "patch_embed.proj.weight"},
        image=image, colours=colours, prepared=PixelsProcessor, fields=lambda c, v, p: {
            "min_pixels": p.get("min_pixels") or _edge(p, "shortest") or least,
            "max_pixels": p.get("max_pixels") or _edge(p, "longest") or most,
        },
    )  # fmt: skip


# Gemma 4
def _gemma4_tower(c: Config, v: Config) -> TowerConfig:
    eps, head_dim = v["rms_norm_eps"], v["head_dim"]
    layers = RMS_GATED | NO_BIAS | {
        "head_dim": head_dim, "norm_eps": eps, "post_norms": True, "qk_norm": "rms", "value_norm": True,
        "attention_scale": 1.0, "hidden_act": v["hidden_activation"],
    }  # fmt: skip
    merger = MergerConfig(
        pool="mean", scale=v["hidden_size"] ** 0.5, affine=v["standardize"], pooled_norm="unit", norm_eps=eps,
        products=_product(c),
    )  # fmt: skip
    return _tower(
        v, v["pooling_kernel_size"], merger, layers, patch_bias=False, clipped=v["use_clipped_linears"],
        rope=AxialRope(head_dim, _theta(v, 100.0), columns_first=True),
        table=PositionTable(v["position_embedding_size"], "axes"),
    )  # fmt: skip


def _gemma4_fields(c: Config, v: Config, p: ImageOptions) -> Config:
    """The tower takes numbers from -1 to 1; transformers' processor gives them from 0 to 1, whatever `p` says."""
    (mean, std), begin, end = HALF, c.get("boi_token_id", 255_999), c.get("eoi_token_id", 258_882)
    return {
        "mean": mean, "std": std, "order": "last", "before": ((begin,),), "after": ((end,),),
        "most": p.get("max_soft_tokens") or v["default_output_length"],
        "both_ways": (c.get("text_config") or {}).get("use_bidirectional_attention") == "vision",
    }  # fmt: skip


GEMMA4 = VisionFamily(
    defaults={
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
        "head_dim": 64, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240,
        "use_clipped_linears": False, "standardize": False, "rms_norm_eps": 1e-6, "default_output_length": 280,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    tower_of=_gemma4_tower, names=names.gemma4, prepared=AreaProcessor, fields=_gemma4_fields, image=258_880,
    anchors={"tower": "patch_embedder.input_proj.weight", "projector": "embed_vision.embedding_projection.weight"},
)  # fmt: skip


_OLD, _NEW = (56 * 56, 28 * 28 * 1280, CLIP), (65_536, 16_777_216, HALF)
FAMILIES: dict[str, VisionFamily] = {  # by `model_type` of config.json
    "qwen2_vl": _qwen_family(QWEN2, _qwen2_tower, 151_655, *_OLD),
    "qwen2_5_vl": _qwen_family(QWEN2_5, _qwen2_5_tower, 151_655, *_OLD),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _qwen_family(QWEN3, _qwen3_tower, 151_655, *_NEW)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _qwen_family(QWEN3_5, _qwen3_tower, 248_056, *_NEW)),
    "gemma3": GEMMA3, "gemma4": GEMMA4, "smolvlm": IDEFICS3, "idefics3": IDEFICS3, "internvl": INTERNVL,
    "mistral3": PIXTRAL, "lighton_ocr": PIXTRAL,
}  # fmt: skip
LLAVA_TOWERS = {"clip_vision_model": LLAVA, "siglip_vision_model": LLAVA_SIGLIP, "pixtral": PIXTRAL}


def vision_family(c: Config) -> VisionFamily | None:
    """The family of a config.json; None if it has no tower, or none that is supported. LLaVA wraps several."""
    v, kind = c.get("vision_config"), c.get("model_type")
    if not isinstance(v, dict) or not isinstance(kind, str):
        return None
    return LLAVA_TOWERS.get(v.get("model_type", "clip_vision_model")) if kind == "llava" else FAMILIES.get(kind)
