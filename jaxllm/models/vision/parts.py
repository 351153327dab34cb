"""What several families of towers have alike: layers, names of tensors, and settings of preprocessor_config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.models.config import DecoderConfig, EncoderConfig, LayerKind, Projection
from jaxllm.models.names import in_layers, linear
from jaxllm.models.vision.processor import HALF, Encode, ImageOptions
from jaxllm.weights.fields import FLAG, NULL, OBJECT, FieldKind, FieldKinds, check_fields, either, real, whole
from jaxllm.weights.names import Pattern, Source


def blocks(
    v: dict[str, Any], *, size: int, heads: int, count: int, mlp: int, eps: float = 1e-6, **differences: Any
) -> DecoderConfig:
    """Layers of a tower: SigLIP's, but for a family's `differences`."""
    head_dim = differences.pop("head_dim", size // heads)
    fields: dict[str, Any] = {
        "hidden_act": v.get("hidden_act", "gelu_pytorch_tanh"), "norm": "layer", "gated_mlp": False, "qkv_bias": True,
        "output_bias": True, "mlp_bias": True, **differences,
    }  # fmt: skip
    return DecoderConfig(
        vocab_size=1, hidden_size=size, intermediate_size=mlp, num_heads=heads, num_kv_heads=heads, head_dim=head_dim,
        max_position_embeddings=1, layers=(LayerKind(None),) * count, norm_eps=eps, encoder=EncoderConfig(), **fields,
    )  # fmt: skip


def siglip_blocks(v: dict[str, Any], **differences: Any) -> DecoderConfig:
    """The layers of SigLIP and CLIP, by the keys of their `vision_config`."""
    defaults = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    v = defaults | v
    sizes = {"size": "hidden_size", "heads": "num_attention_heads", "mlp": "intermediate_size"}
    given: dict[str, Any] = {name: v[key] for name, key in sizes.items()}
    given |= {"count": v["num_hidden_layers"], "eps": v.get("layer_norm_eps", 1e-6)}
    return blocks(v, **given | differences)


def flat(name: str) -> Source:
    """A convolution over patches that do not overlap, as a matrix."""
    return Source(name, lambda weight: weight.reshape(len(weight), -1))


SIGLIP_NAMES: dict[str, Pattern] = {
    "patch.weight": flat("tower.embeddings.patch_embedding.weight"),
    "patch.bias": "tower.embeddings.patch_embedding.bias",
    "positions": "tower.embeddings.position_embedding.weight",
    **linear("last_norm", "tower.post_layernorm"),
    **in_layers("tower.encoder.layers.*", {
        "attention_norm": "layer_norm1", "mlp_norm": "layer_norm2", "attention.output": "self_attn.out_proj",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }),
}  # fmt: skip


def unfolded(patches: int) -> Any:
    """Columns that lie channel by channel, all patches of a row together, as patch by patch."""

    def transform(weight: np.ndarray) -> np.ndarray:
        return weight.reshape(len(weight), -1, patches).swapaxes(1, 2).reshape(len(weight), -1)

    return transform


def mlp(hidden: int, out: int, activation: Any = "gelu", bias: bool = True) -> tuple[Projection, ...]:
    return Projection(hidden, activation, bias), Projection(out, "identity", bias)


def text_size(c: dict[str, Any]) -> int:
    """The width of the language model, in newer config.json files and older ones."""
    size: int = (c.get("text_config") or c)["hidden_size"]
    return size


_COLOURS = FieldKind("three numbers", lambda value: isinstance(value, list | tuple) and len(value) == 3)
_PIXELS = whole(1, 2**31)
_FIELDS: FieldKinds = {
    "image_mean": either(_COLOURS, NULL), "image_std": either(_COLOURS, NULL),
    "rescale_factor": either(real(0, 1e3), NULL), "resample": either(whole(0, 5), NULL),
    "do_normalize": either(FLAG, NULL), "do_image_splitting": either(FLAG, NULL),
    "crop_to_patches": either(FLAG, NULL), "min_pixels": either(_PIXELS, NULL), "max_pixels": either(_PIXELS, NULL),
    "min_patches": whole(1, 2**10), "max_patches": whole(1, 2**10), "max_soft_tokens": whole(1, 2**16),
    "size": either(OBJECT, NULL), "max_image_size": either(OBJECT, NULL), "crop_size": either(OBJECT, _PIXELS, NULL),
}  # fmt: skip
_SIZES = dict.fromkeys(("height", "width", "shortest_edge", "longest_edge"), either(_PIXELS, NULL))


def pixel_options(
    p: ImageOptions, encode: Encode, *, mean: Any = HALF, std: Any = HALF, resample: int = 3
) -> dict[str, Any]:
    """Fields that every Processor has, with a family's defaults.

    Raises CheckpointError for values that cannot be meant.
    """
    check_fields(p, _FIELDS)
    for name in ("size", "max_image_size"):
        check_fields(p.get(name) or {}, _SIZES, f"{name}.")
    if p.get("do_normalize") is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    else:
        mean, std = p.get("image_mean") or mean, p.get("image_std") or std
    scale = p.get("rescale_factor") or 1 / 255
    given = p.get("resample")
    return {
        "mean": tuple(mean), "std": tuple(std), "scale": scale, "resample": resample if given is None else given,
        "encode": encode,
    }  # fmt: skip


def sides(p: ImageOptions, key: str, default: dict[str, int]) -> dict[str, int]:
    """`size` or another such key, as an object."""
    found = p.get(key)
    given = {"height": found, "width": found} if isinstance(found, int) else found
    return dict(given) if given else default


def with_class_row(table: np.ndarray, own: np.ndarray, *bias: np.ndarray) -> np.ndarray:
    """Learnt positions, and behind them the embedding of the class row, which has no `bias` of patches."""
    table = table.reshape(-1, table.shape[-1])
    own = own.reshape(1, -1).astype(np.float32)
    return np.concatenate([table, own - bias[0].reshape(1, -1) if bias else own])
