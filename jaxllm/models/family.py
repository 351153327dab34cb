"""A model family, and keys of config.json that most read alike: sizes, rotary settings, windows, experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.gguf import GgufFile, Table
from jaxllm.models.hf_fields import LAYER_TYPES, LENGTH
from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.models.names import GGUF_NAMES, hf_names
from jaxllm.weights.fields import FieldKinds, shown
from jaxllm.weights.names import NameMap, Pattern

Names = dict[str, Pattern] | Callable[[DecoderConfig], dict[str, Pattern]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: how its config is read, and which of its tensors have names of their own.

    Attributes:
        models: what people call the models that it serves.
        architectures: `architectures` in config.json.
        model_types: `model_type` in config.json.
        wrappers: `model_type` of multimodal models whose `text_config` is of this family where it does not say its own.
        layer_types: what the entries of `layer_types` in config.json may be.
        fields: what keys of config.json or of GGUF metadata must be, where `HF_FIELDS` and `GGUF_FIELDS` do not say so.
        from_hf: config.json's content -> the config. KeyError: a key is missing.
        gguf_architectures: `general.architecture` in a GGUF file; empty where llama.cpp does not have the family. It
            makes one architecture of several families: one of them reads the files that no other one `owns`.
        gguf: what is read of such a file for the keys of config.json, besides `GGUF_KEYS`; None where another family
            reads it.
        owns: whether a file is of this family, where others have the same architecture.
        ignored: tensors that its checkpoints have besides those of the model that is served.
        hf_names, gguf_names: tensors that the standard tables of `names.py` name otherwise.
        mtp_names: tensors of the module that predicts further tokens, of its config and the number of the model's
            layers; None where none is supported.
    """

    name: str
    models: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    from_hf: Callable[[dict[str, Any]], DecoderConfig]
    layer_types: tuple[str, ...] = LAYER_TYPES
    fields: FieldKinds = field(default_factory=dict)
    gguf_architectures: tuple[str, ...] = ()
    gguf: Table | None = field(default_factory=dict)
    owns: Callable[[GgufFile], bool] | None = None
    ignored: tuple[str, ...] = ()
    hf_names: Names = field(default_factory=dict)
    gguf_names: Names = field(default_factory=dict)
    mtp_names: Callable[[DecoderConfig, int], NameMap] | None = None

    def names(self, format: str, config: DecoderConfig) -> dict[str, Pattern]:
        """The names of a model's tensors in a checkpoint of this format, "gguf" or another."""
        standard, own = (GGUF_NAMES, self.gguf_names) if format == "gguf" else (hf_names(config), self.hf_names)
        return standard | (own(config) if callable(own) else own)


def hf_decoder(
    c: dict[str, Any], *, layers: LayerKind | Iterable[LayerKind] | None = None, attention_bias: bool | None = False,
    **differences: Any,
) -> DecoderConfig:  # fmt: skip
    """A DecoderConfig from the keys of config.json that most families share, changed by the family's `differences`.

    Args:
        layers: one kind for all layers or one for each; without it all have the rotary embedding that `c` describes.
        attention_bias: queries, keys, values and the output have biases; null means no.
    """
    layers = LayerKind(hf_rope(c)) if layers is None else layers
    every = (layers,) * c["num_hidden_layers"] if isinstance(layers, LayerKind) else tuple(layers)
    fields: dict[str, Any] = {
        "vocab_size": c["vocab_size"],
        "hidden_size": c["hidden_size"],
        "intermediate_size": c["intermediate_size"],
        "num_heads": c["num_attention_heads"],
        "num_kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": hf_head_dim(c),
        "max_position_embeddings": c.get("max_position_embeddings") or 2048,
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "hidden_act": c.get("hidden_act") or "silu",
        "tie_word_embeddings": c.get("tie_word_embeddings", False),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": False,
        **differences,
    }
    if "max_position_embeddings" not in differences:
        fields["max_position_embeddings"] = scaled_length(fields["max_position_embeddings"], every)
    flags = ("tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias")  # some files have null for no
    return DecoderConfig(**fields | {name: bool(fields[name]) for name in flags}, layers=every)


def without_groups(c: dict[str, Any]) -> dict[str, Any]:
    """`c` for families whose heads have keys of their own and divide the model's width, whatever else it says."""
    return {key: value for key, value in c.items() if key not in ("num_key_value_heads", "head_dim")}


def hf_experts(c: dict[str, Any], number: str, size: str, **differences: Any) -> MoEConfig:
    """Experts whose `number` and `size` are these keys of config.json, and what the family has otherwise."""
    return MoEConfig(num_experts=c[number], top_k=c["num_experts_per_tok"], hidden=c[size], **differences)


def sliding_layers(rope: RopeConfig, window: int | None, kinds: Iterable[str]) -> tuple[LayerKind, ...]:
    """Layers of these `layer_types`, of which the sliding ones have the `window`."""
    return tuple(LayerKind(rope, window if kind == "sliding_attention" else None) for kind in kinds)


def scaled_length(stated: int, layers: tuple[LayerKind, ...]) -> int:
    """The longest context of a model whose config states `max_position_embeddings`, as vLLM derives it.

    YaRN's is `factor` times the original length, which is the stated one unless the config has another. Linear and
    dynamic scaling's is `factor` times the stated one. The other kinds state the scaled length.

    Raises CheckpointError if it is not a length.
    """
    rope = next((layer.rope for layer in layers if layer.rope is not None), None)
    if rope is None or rope.kind not in ("linear", "dynamic", "yarn"):
        return stated
    longest = int(rope.factor * (rope.original_length if rope.kind == "yarn" else stated))
    if not LENGTH.fits(longest):
        raise CheckpointError(f"the scaled context is {longest} tokens; accepted is {LENGTH.accepted}")
    return longest


def hf_head_dim(c: dict[str, Any]) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def hf_rope_parameters(c: dict[str, Any], default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The entry of a config.json about the rotary embedding, by its old key or its new one; else `default`."""
    return c.get("rope_scaling") or c.get("rope_parameters") or default or {}


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def hf_rope(
    c: dict[str, Any], head_dim: int | None = None, *, parameters: dict[str, Any] | None = None,
    theta: float = 10_000.0, partial: float = 1.0, interleaved: bool = False,
) -> RopeConfig:  # fmt: skip
    """The rotary embedding of a config.json, old spelling (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    Args:
        head_dim: of the heads, where it is not `hf_head_dim`.
        parameters: the entry to read where `c` holds one a layer type.
        theta, partial: the family's defaults for `rope_theta` and `partial_rotary_factor`.

    Raises CheckpointError if the kind of scaling is unknown.
    """
    head_dim, given = head_dim or hf_head_dim(c), parameters or hf_rope_parameters(c)
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"the rope type is {shown(kind)}; supported are {', '.join(ROPE_KINDS)}")
    longest = c.get("max_position_embeddings") or 2048
    original = c.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or longest
    if kind == "dynamic":
        original = longest
    factor = float(given.get("factor") or longest / original)
    fields: dict[str, Any] = {}
    if kind != "default":
        fields["factor"] = factor
    if kind not in ("default", "linear"):
        fields["original_length"] = int(original)
    if kind == "llama3":
        fields |= {key: float(given[key]) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        fields |= {key: float(given[key]) for key in ("beta_fast", "beta_slow") if given.get(key)}
        fields["truncate"] = given.get("truncate", True)
        fields["attention_factor"] = given.get("attention_factor") or _yarn_attention_factor(given, factor)
    if kind == "longrope":
        fields |= {f"{name}_divisors": tuple(map(float, given[f"{name}_factor"])) for name in ("short", "long")}
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        fields["attention_factor"] = given.get("attention_factor") or usual
    if given.get("divisors"):
        fields["divisors"] = tuple(given["divisors"])
    if given.get("attn_factor"):  # on cosine and sine, whatever the scaling
        fields["attention_factor"] = fields.get("attention_factor", 1.0) * given["attn_factor"]
    if given.get("mrope_section"):
        fields |= {"sections": tuple(given["mrope_section"]), "mixed": bool(given.get("mrope_interleaved"))}
    return RopeConfig(
        dim=int(head_dim * (given.get("partial_rotary_factor") or c.get("partial_rotary_factor") or partial)),
        theta=float(given.get("rope_theta") or c.get("rope_theta") or theta), interleaved=interleaved, kind=kind,
        **fields,
    )  # fmt: skip


def hf_windows(c: dict[str, Any], *, period: int) -> list[int | None]:
    """The sliding window of each layer, None where there is none, of families that have both kinds.

    `layer_types` says it, or `sliding_window_pattern`: how often a layer without a window comes, `period` where the
    file has no such key; or a text of L (local) and G (global) that repeats, with which the last layer is global.
    """
    number, window = c["num_hidden_layers"], c.get("sliding_window")
    pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or period
    if c.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    elif isinstance(pattern, str):
        slides = [pattern[i % len(pattern)] == "L" and i < number - 1 for i in range(number)]
    else:
        slides = [(i + 1) % pattern != 0 for i in range(number)]
    return [window if slide else None for slide in slides]


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The factor on attention at `factor` times the original context in YaRN (arXiv:2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(given: dict[str, Any], factor: float) -> float:
    if given.get("mscale") and given.get("mscale_all_dim"):
        return yarn_mscale(factor, given["mscale"]) / yarn_mscale(factor, given["mscale_all_dim"])
    return yarn_mscale(factor)
