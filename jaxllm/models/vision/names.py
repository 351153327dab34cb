"""The tensors of each family's tower; "tower" and "projector" stand for the prefixes that a checkpoint has."""

from __future__ import annotations

from functools import partial

import numpy as np

from jaxllm.models.names import in_layers, linear
from jaxllm.models.vision.tower import TowerConfig
from jaxllm.weights.names import Pattern, Source, plus_one, transposed

TowerNames = dict[str, Pattern]


def _flat(name: str) -> Source:
    """A convolution over patches that do not overlap, as a matrix."""
    return Source(name, lambda weight: weight.reshape(len(weight), -1))


def _qkv(block: str) -> tuple[str, ...]:
    return tuple(f"{block}.{p}_proj" for p in "qkv")


def _products(first: int = 0) -> TowerNames:
    pairs = (linear(f"merger.products.{first + i}", f"projector.linear_{i + 1}") for i in range(2))
    return {path: name for pair in pairs for path, name in pair.items()}


def _with_class_row(table: np.ndarray, own: np.ndarray, *bias: np.ndarray) -> np.ndarray:
    """Learnt positions, then the embedding of the class row, from which the `bias` that all patches get is taken."""
    table, own = table.reshape(-1, table.shape[-1]), own.reshape(1, -1).astype(np.float32)
    return np.concatenate([table, own - bias[0].reshape(1, -1) if bias else own])


SIGLIP: TowerNames = {
    "patch.weight": _flat("tower.embeddings.patch_embedding.weight"),
    "patch.bias": "tower.embeddings.patch_embedding.bias",
    "positions": "tower.embeddings.position_embedding.weight",
    **linear("first_norm", "tower.pre_layrnorm"),
    **linear("last_norm", "tower.post_layernorm"),
    **in_layers("tower.encoder.layers.*", {
        "attention_norm": "layer_norm1", "mlp_norm": "layer_norm2", "attention.output": "self_attn.out_proj",
        "attention.qkv": _qkv("self_attn"), "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
    }),
}  # fmt: skip
LLAVA_SIGLIP = SIGLIP | _products()
LLAVA = LLAVA_SIGLIP | {
    "positions": Source(
        "tower.embeddings.position_embedding.weight", _with_class_row, also=("tower.embeddings.class_embedding",)
    )
}
IDEFICS3 = SIGLIP | {"merger.products.0.weight": "projector.modality_projection.proj.weight"}
GEMMA3 = SIGLIP | {
    "merger.pooled_norm.weight": Source("projector.mm_soft_emb_norm.weight", plus_one),
    "merger.products.0.weight": Source("projector.mm_input_projection_weight", transposed),
}


def _scaled(path: str, name: str, factor: str) -> TowerNames:
    """The layer multiplies what this product gives by learnt factors; here they go into its weights."""
    block = "tower.encoder.layer.*"
    return {
        f"layers.*.{path}.{kind}": Source(f"{block}.{name}.{kind}", _rows_scaled, also=(f"{block}.{factor}",))
        for kind in ("weight", "bias")
    }


def _rows_scaled(rows: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return rows.astype(np.float32) * factor.reshape(-1, *[1] * (rows.ndim - 1)).astype(np.float32)


INTERNVL: TowerNames = {
    "patch.weight": _flat("tower.embeddings.patch_embeddings.projection.weight"),
    "patch.bias": "tower.embeddings.patch_embeddings.projection.bias",
    "positions": Source(
        "tower.embeddings.position_embeddings", _with_class_row,
        also=("tower.embeddings.cls_token", "tower.embeddings.patch_embeddings.projection.bias"),
    ),
    **in_layers("tower.encoder.layer.*", {
        "attention_norm": "layernorm_before", "mlp_norm": "layernorm_after", "mlp.up": "mlp.fc1",
        "attention.qkv": _qkv("attention"), "attention.q_norm": "attention.q_norm",
        "attention.k_norm": "attention.k_norm",
    }),
    **_scaled("attention.output", "attention.projection_layer", "lambda_1"),
    **_scaled("mlp.down", "mlp.fc2", "lambda_2"),
    **linear("merger.pooled_norm", "projector.layer_norm"),
    **_products(),
}  # fmt: skip


def pixtral(config: TowerConfig) -> TowerNames:
    return {
        "patch.weight": _flat("tower.patch_conv.weight"),
        **linear("first_norm", "tower.ln_pre"),
        **in_layers("tower.transformer.layers.*", {
            "attention_norm": "attention_norm", "mlp_norm": "ffn_norm", "attention.output": "attention.o_proj",
            "attention.qkv": _qkv("attention"), "mlp.down": "feed_forward.down_proj",
            "mlp.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        }),
        **linear("merger.norm", "projector.norm"),
        "merger.products.0.weight": Source(
            "projector.patch_merger.merging_layer.weight", partial(_patch_by_patch, config.merge**2)
        ),
        **_products(len(config.merger.products) - 2),
    }  # fmt: skip


def _patch_by_patch(patches: int, weight: np.ndarray) -> np.ndarray:
    """Columns in the order (channel, patch of the row), as (patch, channel)."""
    return weight.reshape(len(weight), -1, patches).swapaxes(1, 2).reshape(len(weight), -1)


def qwen(config: TowerConfig) -> TowerNames:
    """Qwen3 has learnt positions, and other names than Qwen2 and Qwen2.5."""
    if config.table is None:
        norm, products, fc = "ln_q", ("mlp.0", "mlp.2"), "mlp.fc"
    else:
        norm, products, fc = "norm", ("linear_fc1", "linear_fc2"), "mlp.linear_fc"
    names: TowerNames = {
        "patch.weight": _flat("tower.patch_embed.proj.weight"),
        "patch.bias": "tower.patch_embed.proj.bias",
        "positions": "tower.pos_embed.weight",
        **in_layers("tower.blocks.*", {
            "attention_norm": "norm1", "mlp_norm": "norm2", "attention.qkv": "attn.qkv", "mlp.up": f"{fc}1",
            "attention.output": "attn.proj", "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": "mlp.down_proj" if config.blocks.gated_mlp else f"{fc}2",
        }),
    }  # fmt: skip
    mergers = {"merger": "merger"}
    mergers |= {f"deep_mergers.{i}": f"deepstack_merger_list.{i}" for i in range(len(config.deepstack))}
    for path, block in mergers.items():
        names |= linear(f"{path}.norm", f"tower.{block}.{norm}")  # of patches: in the first merger
        names |= linear(f"{path}.pooled_norm", f"tower.{block}.{norm}")
        names |= linear(f"{path}.products.0", f"tower.{block}.{products[0]}")
        names |= linear(f"{path}.products.1", f"tower.{block}.{products[1]}")
    return names


def gemma4(config: TowerConfig) -> TowerNames:
    layer, pairs_apart = "tower.encoder.layers.*", partial(_pairs_apart, config.blocks.head_dim)
    names: TowerNames = {
        "patch.weight": "tower.patch_embedder.input_proj.weight",
        "positions": Source("tower.patch_embedder.position_embedding_table", lambda t: t.reshape(-1, t.shape[-1])),
        "merger.bias": "tower.std_bias",
        "merger.factor": "tower.std_scale",
        "merger.products.0.weight": "projector.embed_vision.embedding_projection.weight",
        **in_layers(layer, {
            "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
        }),
        **in_layers(f"{layer}.self_attn", {"attention.q_norm": "q_norm", "attention.k_norm": "k_norm"}, pairs_apart),
    }  # fmt: skip
    products = {
        "attention.qkv": _qkv("self_attn"), "attention.output": ("self_attn.o_proj",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",),
    }  # fmt: skip
    turned = ("self_attn.q_proj", "self_attn.k_proj")
    ends = ("input_min", "input_max", "output_min", "output_max")
    for path, parts in products.items():
        weights = tuple(
            Source(f"{layer}.{part}.linear.weight", pairs_apart if part in turned else None, by_rows=True)
            for part in parts
        )
        first, *others = (f"{layer}.{part}.{end}" for part in parts for end in ends)
        names |= {f"layers.*.{path}.parts.{i}.weight": weight for i, weight in enumerate(weights)}  # if clipped
        names[f"layers.*.{path}.bounds"] = Source(first, _bounds, also=(*others,))
        names[f"layers.*.{path}.weight"] = weights
    return names


def _bounds(*bounds: np.ndarray) -> np.ndarray:
    return np.stack([np.asarray(bound).reshape(()) for bound in bounds]).reshape(-1, 4)


def _pairs_apart(head_dim: int, rows: np.ndarray) -> np.ndarray:
    """A head's rows, whose halves are rotated each by itself, in the order for rotating the whole head.

    Worked example, head_dim 8: rows 0 1 | 2 3 (of columns) and 4 5 | 6 7 (of rows) -> 0 1 4 5 2 3 6 7.
    """
    quarters = rows.reshape(-1, 2, 2, head_dim // 4, *rows.shape[1:])
    return quarters.swapaxes(1, 2).reshape(rows.shape)
