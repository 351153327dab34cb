"""What a model family is, and what most spell alike in a Hugging Face checkpoint: keys, rotary settings, names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.decoder import Decoder
from jaxllm.models.gguf import GgufFile, Table
from jaxllm.models.hf_fields import LAYER_TYPES, LENGTH
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.models.options import BuildOptions
from jaxllm.weights.fields import FieldKinds, shown
from jaxllm.weights.names import AnyOf, NameMap, Pattern, Source, expand

Names = Callable[[DecoderConfig], dict[str, Pattern]]


def _nothing(config: DecoderConfig) -> dict[str, Pattern]:
    return {}


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
        gguf: what is read of such a file for the keys of config.json; None where another family reads it.
        owns: whether a file is of this family, where others have the same architecture.
        module: what it builds of the config; another than Decoder where its decoder has another shape. Encoders are
            all built by `Encoder`.
        ignored: tensors that its checkpoints have besides those of the model that is served.
        hf_names, gguf_names: tensors that the standard tables (`hf_names` here, `GGUF_NAMES`) name otherwise.
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
    gguf: Table | None = None
    owns: Callable[[GgufFile], bool] | None = None
    module: Callable[[DecoderConfig, BuildOptions], Decoder] = Decoder
    ignored: tuple[str, ...] = ()
    hf_names: Names = _nothing
    gguf_names: Names = _nothing
    mtp_names: Callable[[DecoderConfig, int], NameMap] | None = None


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

_FLAGS = ("tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias")
"""Which some files give as null: no."""


def hf_fields(c: dict[str, Any], **differences: Any) -> dict[str, Any]:
    """DecoderConfig's fields from the keys of config.json that most families share, then the family's `differences`.

    Layers are all alike, with the rotary embedding that `c` describes, unless `differences` has `layers`.
    """
    fields: dict[str, Any] = {
        "vocab_size": c["vocab_size"],
        "hidden_size": c["hidden_size"],
        "intermediate_size": c["intermediate_size"],
        "num_heads": c["num_attention_heads"],
        "num_kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": hf_head_dim(c),
        "max_position_embeddings": c.get("max_position_embeddings") or 2048,
        "hidden_act": c.get("hidden_act") or "silu",
        "tie_word_embeddings": c.get("tie_word_embeddings", False),
    }
    if "norm_eps" not in differences:
        fields["norm_eps"] = c.get("rms_norm_eps", 1e-6)
    if "layers" not in differences:
        fields["layers"] = (LayerKind(hf_rope(c, hf_head_dim(c))),) * c["num_hidden_layers"]
    fields |= differences
    if "max_position_embeddings" not in differences:
        fields["max_position_embeddings"] = scaled_length(fields["max_position_embeddings"], fields["layers"])
    return fields | {name: bool(fields[name]) for name in _FLAGS if name in fields}


def scaled_length(stated: int, layers: tuple[LayerKind, ...]) -> int:
    """The longest context of a model whose config states `max_position_embeddings`, as vLLM derives it.

    YaRN's is `factor` times the original length, which is the stated one unless the config has another. Linear and
    dynamic scaling's is `factor` times the stated one. The other kinds state the scaled length.

    Raises:
        CheckpointError: it is not a length.
    """
    rope = next((layer.rope for layer in layers if layer.rope is not None), None)
    if rope is None or rope.kind not in ("linear", "dynamic", "yarn"):
        return stated
    longest = int(rope.factor * (rope.original_length if rope.kind == "yarn" else stated))
    if not LENGTH.fits(longest):
        raise CheckpointError(f"the scaled context is {longest} tokens; accepted is {LENGTH.accepted}")
    return longest


def hf_head_dim(c: dict[str, Any]) -> int:
    """`head_dim`, or the hidden size shared out among the heads."""
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def hf_rope_parameters(c: dict[str, Any], default: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a config.json says of the rotary embedding, by its old key or its new one; else `default`."""
    return c.get("rope_scaling") or c.get("rope_parameters") or default or {}


def hf_rope(
    c: dict[str, Any],
    head_dim: int,
    *,
    parameters: dict[str, Any] | None = None,
    theta: float = 10_000.0,
    partial: float = 1.0,
    interleaved: bool = False,
) -> RopeConfig:
    """The rotary embedding of a config.json, old spelling (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    Args:
        parameters: the entry to read where `c` holds one a layer type.
        theta, partial: the family's defaults for `rope_theta` and `partial_rotary_factor`.

    Raises:
        CheckpointError: the kind of scaling is unknown.
    """
    given = parameters or hf_rope_parameters(c)
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
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
        fields["attention_factor"] = given.get("attention_factor") or longrope_attention_factor(factor, original)
    if given.get("divisors"):
        fields["divisors"] = tuple(given["divisors"])
    if given.get("attn_factor"):  # on cosine and sine, whatever the scaling
        fields["attention_factor"] = fields.get("attention_factor", 1.0) * given["attn_factor"]
    return RopeConfig(
        dim=int(head_dim * (given.get("partial_rotary_factor") or c.get("partial_rotary_factor") or partial)),
        theta=float(given.get("rope_theta") or c.get("rope_theta") or theta),
        interleaved=interleaved,
        kind=kind,
        **fields,
    )


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


def post_norm_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The norms on what attention and MLP give, in families that have none in front of these."""
    layer = "model.layers.*"
    return {
        "layers.*.attention_post_norm.weight": f"{layer}.post_attention_layernorm.weight",
        "layers.*.mlp_post_norm.weight": f"{layer}.post_feedforward_layernorm.weight",
    }


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much sharper YaRN makes attention at `factor` times the original context (arXiv:2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """LongRoPE's factor on cosine and sine: the root of 1 + ln(factor) / ln(original)."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_attention_factor(given: dict[str, Any], factor: float) -> float:
    if given.get("mscale") and given.get("mscale_all_dim"):
        return yarn_mscale(factor, given["mscale"]) / yarn_mscale(factor, given["mscale_all_dim"])
    return yarn_mscale(factor)


def hf_linear(path: str, *names: str, fused: str | None = None) -> dict[str, Pattern]:
    """Weight and bias of one product: from `names` one after the other, or from the tensor that has them `fused`."""
    return {
        f"{path}.{kind}": AnyOf(tuple(f"{name}.{kind}" for name in names), *([f"{fused}.{kind}"] if fused else []))
        for kind in ("weight", "bias")
    }


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Where most families keep their tensors. Entries that a model has no parameter for are never looked at."""
    layer, attention, mlp = "model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp"
    names = {
        "embed.weight": "model.embed_tokens.weight",
        **hf_linear("norm", "model.norm"),
        **hf_linear("head", "lm_head"),
        **hf_linear("layers.*.attention_norm", f"{layer}.input_layernorm"),
        **hf_linear("layers.*.mlp_norm", f"{layer}.post_attention_layernorm"),
        **hf_linear("layers.*.attention.qkv", *(f"{attention}.{p}_proj" for p in "qkv"), fused=f"{attention}.qkv_proj"),
        **hf_linear("layers.*.attention.output", f"{attention}.o_proj"),
        **hf_linear("layers.*.attention.q_norm", f"{attention}.q_norm"),
        **hf_linear("layers.*.attention.k_norm", f"{attention}.k_norm"),
        **hf_linear("layers.*.mlp.gate_up", f"{mlp}.gate_proj", f"{mlp}.up_proj", fused=f"{mlp}.gate_up_proj"),
        **hf_linear("layers.*.mlp.up", f"{mlp}.up_proj"),
        **hf_linear("layers.*.mlp.down", f"{mlp}.down_proj"),
    }
    return names | hf_expert_names(config, mlp) if config.moe else names


def hf_expert_names(
    config: DecoderConfig,
    block: str,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    shared: str = "shared_experts",
) -> dict[str, Pattern]:
    """Tensors of the sparse MLP `block`: experts one by one, or stacked as transformers 5 keeps them, or as MXFP4."""
    assert config.moe is not None
    count = config.moe.num_experts

    def each(name: str) -> Source:
        return Source(f"{block}.experts.{{}}.{name}.weight", stack=count)

    def stacked(name: str) -> tuple[str, str]:
        return f"{block}.experts.{name}", f"{block}.experts.{name}_blocks"

    return {
        "layers.*.mlp.router.weight": f"{block}.gate.weight",
        "layers.*.mlp.router.correction_bias": f"{block}.gate.e_score_correction_bias",
        "layers.*.mlp.experts.gate_up.weight": AnyOf((each(gate), each(up)), *stacked("gate_up_proj")),
        "layers.*.mlp.experts.down.weight": AnyOf(each(down), *stacked("down_proj")),
        **hf_linear("layers.*.mlp.shared.gate_up", f"{block}.{shared}.gate_proj", f"{block}.{shared}.up_proj"),
        **hf_linear("layers.*.mlp.shared.down", f"{block}.{shared}.down_proj"),
        "layers.*.mlp.shared_gate.weight": f"{block}.shared_expert_gate.weight",
    }


def hf_mtp_names(config: DecoderConfig, own: dict[str, Pattern], number: int) -> NameMap:
    """The module that predicts further tokens, in families that keep it as one more layer, with this number.

    `own` is what the family calls its layers' tensors. What else the module has is under the same prefix.
    """
    layer = "model.layers.*"
    beside: dict[str, Pattern] = {
        "token_norm.weight": f"{layer}.enorm.weight",
        "hidden_norm.weight": f"{layer}.hnorm.weight",
        "join.weight": f"{layer}.eh_proj.weight",
        "norm.weight": f"{layer}.shared_head.norm.weight",
    }
    return expand(hf_names(config) | own | beside, 1, first=number)


_WORD_EMBEDDINGS = ("embed_tokens.weight", "embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
"""Behind what stands before each name of a model; the later ones are encoders'."""


def hf_renaming(tensors: Iterable[str]) -> Callable[[str], str]:
    """How a checkpoint spells `model.…` and `lm_head.…`.

    Embedding models leave `model.` out, and multimodal wrappers put the name of their language model in front. Modules
    that predict further tokens may have a copy of the embedding under a longer name.
    """
    names = [name for name in tensors if "vision" not in name]

    def before(default: str, *suffixes: str) -> str:
        found = (min((name for name in names if name.endswith(end)), key=len, default=None) for end in suffixes)
        return next((name.removesuffix(end) for name, end in zip(found, suffixes, strict=True) if name), default)

    model, head = before("model.", *_WORD_EMBEDDINGS), before("", "lm_head.weight")

    def rename(name: str) -> str:
        return model + name.removeprefix("model.") if name.startswith("model.") else head + name

    return rename
