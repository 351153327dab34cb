"""A GGUF file's metadata as the keys of a config.json, by one table an architecture.

Keys are llama.cpp's (its conversion scripts and src/llama-arch.cpp). For a key of config.json, a table has the name of
a key of the file (a text), a function of the file, or a constant; `optional`, `nonzero`, `tensor`, … make functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.hf_fields import (
    CAP,
    COUNT,
    DIVISOR,
    DIVISORS,
    EPSILON,
    FACTOR,
    LAYERS,
    LENGTH,
    ORIGINAL_LENGTH,
    SIZE,
    THETA,
)
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, TEXT, FieldKind, FieldKinds, check_fields, either, many, real, shown, whole

REQUIRED, ABSENT = object(), object()  # without a default; and the default of what a config.json would not mention
Table = dict[str, Any]


class GgufFile:
    """The metadata of a file, without the architecture's name in front, and which tensors it has.

    Values must be as `GGUF_FIELDS` has them, or `fields`, which are those of a family.

    Raises:
        KeyError: a required key is missing.
        CheckpointError: one is not as it must be, or differs from layer to layer.
    """

    def __init__(self, checkpoint: Checkpoint, fields: FieldKinds | None = None):
        self.architecture: str = checkpoint.config["general.architecture"]
        self._all = checkpoint.config
        self._kinds = GGUF_FIELDS | (fields or {})
        self._checkpoint = checkpoint
        self._tensors = {*checkpoint.tensors, *(re.sub(r"^blk\.\d+\.", "blk.*.", name) for name in checkpoint.tensors)}

    def __call__(self, key: str, default: Any = REQUIRED) -> Any:
        name = f"{self.architecture}.{key}"
        value = self._all[name] if default is REQUIRED else self._all.get(name, default)
        if isinstance(value, list) and not isinstance(default, list):
            if len(set(value)) != 1:
                raise CheckpointError(f"{name} differs from layer to layer; one value for all is supported")
            value = value[0]
        if name in self._all:
            check_fields({key: value}, {key: self._kinds[key]}, f"{self.architecture}.")
        return value

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._all

    def by_layer(self, key: str) -> list[Any]:
        """A key's value in each layer. Raises CheckpointError unless the file has one for all, or one for each."""
        name, count = f"{self.architecture}.{key}", self("block_count")
        value = self._all[name]
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count:
            raise CheckpointError(f"{name} has {len(values)} entries; accepted is one for each of {count} layers")
        for one in values:
            check_fields({key: one}, {key: or_zero(self._kinds[key])}, f"{self.architecture}.")
        return values[: self.num_layers]

    @property
    def num_layers(self) -> int:
        """Without those past the last that predict further tokens, which `block_count` counts too."""
        count, further = self("block_count"), self.further_layers
        if further >= count:
            raise CheckpointError(f"nextn_predict_layers is {further}; accepted are fewer than {count} layers")
        return count - further

    @property
    def further_layers(self) -> int:
        return self("nextn_predict_layers", 0)

    @property
    def head_dim(self) -> int:
        """`attention.key_length`, or the hidden size shared out among the heads."""
        return self("attention.key_length", None) or self("embedding_length") // self("attention.head_count")

    def has(self, *names: str) -> bool:
        """True where one of these tensors is there; `blk.*` is any layer."""
        return any(name in self._tensors for name in names)

    def rows(self, name: str) -> int:
        """Rows of a matrix. Raises CheckpointError where there is no such tensor."""
        info = self._checkpoint.tensors.get(name)
        if info is None or len(info.shape) != 2 or not SIZE.fits(info.shape[0]):
            found = "missing" if info is None else f"of shape {info.shape}"
            raise CheckpointError(f"tensor {name!r} is {found}; accepted is a matrix, its rows {SIZE.accepted}")
        return info.shape[0]

    def divisors(self, name: str) -> list[float]:
        """A tensor with what frequencies are divided by."""
        info = self._checkpoint.tensors.get(name)
        if info is None or len(info.shape) != 1 or info.shape[0] > DIVISORS:
            found = "missing" if info is None else f"of shape {info.shape}"
            raise CheckpointError(f"tensor {name!r} is {found}; accepted is a vector of up to {DIVISORS} factors")
        values: list[float] = self._checkpoint.read(name).expand().tolist()
        if not all(map(DIVISOR.fits, values)):
            raise CheckpointError(f"tensor {name!r} is {shown(values)}; accepted is {DIVISOR.accepted} in each place")
        return values


def gguf_config(file: GgufFile, own: Table) -> dict[str, Any]:
    """The config.json of a file, by what all architectures have alike and the table of its `own`."""
    found = {key: _read(file, entry) for key, entry in (GGUF_KEYS | own).items()}
    return {key: value for key, value in found.items() if value is not ABSENT}


def _read(file: GgufFile, entry: Any) -> Any:
    return file(entry) if isinstance(entry, str) else entry(file) if callable(entry) else entry


def with_experts(own: Table) -> Table:
    """`GGUF_EXPERTS` and a family's own table, of which nothing is read where no layer has experts."""

    def either(entry: Any) -> Callable[[GgufFile], Any]:
        return lambda file: _read(file, entry) if file.has("blk.*.ffn_gate_inp.weight") else ABSENT

    return {key: either(entry) for key, entry in (GGUF_EXPERTS | own).items()}


def as_stored(file: GgufFile, config: DecoderConfig) -> DecoderConfig:
    """`config` with the biases, norms and factors that the file has tensors of."""
    if not file("attention.causal", True) and config.encoder is None:
        raise CheckpointError("attention.causal is false; accepted is true, for this is not served as an encoder")
    ssd = config.ssd and replace(
        config.ssd, conv_bias=file.has("blk.*.ssm_conv1d.bias"), bias=file.has("blk.*.ssm_in.bias"),
        output_bias=file.has("blk.*.ssm_out.bias"), norm="after_gate" if file.has("blk.*.ssm_norm.weight") else None,
    )  # fmt: skip
    return replace(
        config, qkv_bias=file.has("blk.*.attn_q.bias", "blk.*.attn_qkv.bias", "blk.*.attn_kv_a_mqa.bias"),
        output_bias=file.has("blk.*.attn_output.bias"), mlp_bias=file.has("blk.*.ffn_down.bias"),
        head_bias=file.has("output.bias"), layer_scale=file.has("blk.*.layer_output_scale.weight"),
        conv=config.conv and replace(config.conv, bias=file.has("blk.*.shortconv.in_proj.bias")),
        moe=config.moe and replace(config.moe, correction_bias=file.has("blk.*.exp_probs_b.bias")), ssd=ssd,
    )  # fmt: skip


def optional(key: str, default: Any = ABSENT) -> Callable[[GgufFile], Any]:
    """The key's value, or the default; without one, config.json's key is absent too."""
    return lambda file: file(key, default)


def nonzero(key: str, otherwise: Any = None) -> Callable[[GgufFile], Any]:
    """The key's value, or `otherwise` where it is 0 or absent."""
    return lambda file: file(key, 0) or otherwise


def only(key: str, value: Any, meaning: str) -> Callable[[GgufFile], Any]:
    """Nothing for config.json: the key must be absent or have the `value`, which has this `meaning`."""

    def check(file: GgufFile) -> Any:
        if (found := file(key, value)) != value:
            raise CheckpointError(f"{key} is {shown(found)}; accepted is {shown(value)}, {meaning}")
        return ABSENT

    return check


def tensor(*names: str) -> Callable[[GgufFile], bool]:
    return lambda file: file.has(*names)


def rows(name: str) -> Callable[[GgufFile], int]:
    return lambda file: file.rows(name)


def layer_types(period: int) -> Callable[[GgufFile], list[str]]:
    """Which layers have a window.

    `attention.sliding_window_pattern` has a flag a layer, or how often a layer without a window comes: `period` where
    the file does not have it.
    """

    def types(file: GgufFile) -> list[str]:
        key = "attention.sliding_window_pattern"
        given = file.by_layer(key) if key in file else [period] * file.num_layers
        slides = [flag if isinstance(flag, bool) else (i + 1) % flag != 0 for i, flag in enumerate(given)]
        return ["sliding_attention" if slide else "full_attention" for slide in slides]

    return types


def _norm_eps(file: GgufFile) -> float:
    key = "attention.layer_norm_epsilon"
    return file("attention.layer_norm_rms_epsilon", file(key) if key in file else REQUIRED)


def rope_scaling(file: GgufFile, mscales: Callable[[float], dict[str, float]] | None = None) -> dict[str, Any]:
    """The stretching of the rotary embedding, as `rope_scaling` of a config.json.

    `mscales` makes two keys of config.json of `yarn_log_multiplier`: what part of YaRN's factor is on the logits and
    not on cosine and sine. Without it, files of the architecture have no such key.

    Raises CheckpointError if the kind of scaling is unknown, or one of its keys has a value that is not supported.
    """
    kind = file("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise CheckpointError(f"rope.scaling.type is {shown(kind)}; supported are none, linear, yarn and longrope")
    factor = float(file("rope.scaling.factor", 0) or file("rope.scale_linear", 0) or 1)
    found: dict[str, Any] = {"attn_factor": file("rope.scaling.attn_factor", 1.0)}
    if "rope.scaling.original_context_length" in file:
        found["original_max_position_embeddings"] = file("rope.scaling.original_context_length")
    if file.has("rope_factors_long.weight"):
        kind = "longrope"
        found |= {f"{name}_factor": file.divisors(f"rope_factors_{name}.weight") for name in ("short", "long")}
        found["attention_factor"] = 1.0
    elif kind == "longrope":
        raise CheckpointError("rope.scaling.type is 'longrope', but tensor 'rope_factors_long.weight' is missing")
    elif kind == "yarn":
        found |= {key: file(f"rope.scaling.yarn_{key}", None) for key in ("beta_fast", "beta_slow")}
        found["factor"] = factor
    elif kind == "linear" and factor != 1:
        found["factor"] = factor
    else:
        kind = "default"
    if file.has("rope_freqs.weight"):
        found["divisors"] = file.divisors("rope_freqs.weight")
    multiplier = _log_multiplier(file, kind, mscales is not None)
    return {"rope_type": kind} | found | (mscales(multiplier) if mscales and multiplier else {})


def _log_multiplier(file: GgufFile, kind: str, accepted: bool) -> float:
    """Refuses what llama.cpp reads for other architectures: part of YaRN only, or with a factor of its own."""
    file("rope.scaling.yarn_attn_factor", 1.0)
    share, whole_share = file("rope.scaling.yarn_ext_factor", -1.0), int(kind == "yarn")
    if share >= 0 and share != whole_share:
        raise CheckpointError(
            f"rope.scaling.yarn_ext_factor is {shown(share)}; accepted is {whole_share}, or a negative number"
        )
    multiplier = file("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier and not accepted:
        raise CheckpointError(f"rope.scaling.yarn_log_multiplier is {shown(multiplier)}; accepted is 0")
    return multiplier


GGUF_KEYS: Table = {  # of all architectures
    "vocab_size": rows("token_embd.weight"),
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": lambda file: file.num_layers,
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": lambda file: file("attention.head_count_kv", file("attention.head_count")),
    "head_dim": lambda file: file.head_dim,
    "max_position_embeddings": "context_length",
    "tie_word_embeddings": lambda file: not file.has("output.weight"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _norm_eps),
    "rope_theta": optional("rope.freq_base", 10_000.0),
    "partial_rotary_factor": lambda file: (
        Fraction(file("rope.dimension_count"), file.head_dim) if file("rope.dimension_count", 0) else ABSENT
    ),
    "rope_scaling": rope_scaling,
}

GGUF_EXPERTS: Table = {  # of those whose models have experts, by any of the names that config.json has for them
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "expert_count"),
}


def or_zero(kind: FieldKind, zero: FieldKind = whole(0, 0)) -> FieldKind:
    """A 0 is as good as absent, or says that the model has none."""
    return either(kind, zero)


GGUF_FIELDS: FieldKinds = {  # by their names without the architecture's in front
    **dict.fromkeys(("block_count", "interleave_moe_layer_step", "full_attention_interval"), LAYERS),
    **dict.fromkeys((
        "embedding_length", "feed_forward_length", "attention.value_length", "attention.key_length_swa",
        "attention.key_length_mla", "attention.value_length_mla", "attention.kv_lora_rank", "rope.dimension_count_swa",
        "expert_feed_forward_length", "ssm.state_size", "ssm.inner_size",
    ), SIZE),
    **dict.fromkeys(("embedding_length_per_layer_input", "expert_shared_feed_forward_length"), whole(0, 2**24)),
    **dict.fromkeys((
        "attention.causal", "rope.scaling.finetuned", "expert_weights_norm", "use_parallel_residual",
    ), FLAG),
    **dict.fromkeys((
        "attention.head_count", "attention.head_count_kv", "ssm.time_step_rank", "ssm.group_count",
    ), COUNT),
    **dict.fromkeys((
        "attention.key_length", "attention.q_lora_rank", "rope.dimension_count", "moe_latent_size",
    ), or_zero(SIZE)),
    **dict.fromkeys((
        "attention.shared_kv_layers", "expert_shared_count", "expert_gating_func", "nextn_predict_layers",
        "leading_dense_block_count", "pooling_type",
    ), whole(0, 2**10)),
    **dict.fromkeys(("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), EPSILON),
    **dict.fromkeys((
        "attention.scale", "attention.clamp_kqv", "embedding_scale", "residual_scale", "rope.scale_linear",
        "rope.scaling.factor",
    ), or_zero(FACTOR, real(0, 0))),
    **dict.fromkeys((
        "attention.max_alibi_bias", "logit_scale", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    ), FACTOR),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), CAP),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), THETA),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "expert_weights_scale"), real(-1e6, 1e6)),
    **dict.fromkeys((
        "expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count",
    ), or_zero(COUNT)),
    **dict.fromkeys(("shortconv.l_cache", "ssm.conv_kernel"), whole(2, 2**10)),
    "context_length": LENGTH,
    "attention.sliding_window": or_zero(LENGTH),
    "attention.sliding_window_pattern": either(FLAG, LAYERS),
    "attention.temperature_scale": real(0, 1e3),
    "rope.scaling.type": TEXT,
    "rope.scaling.original_context_length": ORIGINAL_LENGTH,
    "rope.scaling.yarn_attn_factor": FieldKind("1", lambda value: value == 1 and not isinstance(value, bool)),
    "rope.scaling.yarn_log_multiplier": real(0, 1e2),
    "classifier.output_labels": many(TEXT, 2**16),
}  # fmt: skip
