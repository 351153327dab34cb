"""What most families spell alike in a GGUF file: metadata keys, rotary settings, tensor names.

Keys and names are llama.cpp's (its conversion scripts and src/llama-arch.cpp).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.gguf_fields import GGUF_FIELDS, or_zero
from jaxllm.models.hf import scaled_length, yarn_mscale
from jaxllm.models.hf_fields import SIZE
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import check_fields, real, shown
from jaxllm.weights.names import AnyOf, Pattern, Source, unpermute_rope

REQUIRED = object()


class Metadata:
    """The keys of one file, without the architecture's name in front.

    Raises:
        KeyError: a required one is missing.
        CheckpointError: one is not as `GGUF_FIELDS` has it, or differs from layer to layer.
    """

    def __init__(self, checkpoint: Checkpoint):
        self._all = checkpoint.config
        self._prefix = checkpoint.config["general.architecture"]

    def __call__(self, key: str, default: Any = REQUIRED) -> Any:
        name = f"{self._prefix}.{key}"
        value = self._all[name] if default is REQUIRED else self._all.get(name, default)
        if isinstance(value, list) and not isinstance(default, list):
            if len(set(value)) != 1:
                raise CheckpointError(f"{name} differs from layer to layer; one value for all is supported")
            value = value[0]
        if name in self._all:
            check_fields({key: value}, {key: GGUF_FIELDS[key]}, f"{self._prefix}.")
        return value

    def by_layer(self, key: str, count: int) -> list[Any]:
        """A key's value in each of `count` layers, whether the file has one for all or one for each.

        Raises:
            CheckpointError: there are more or fewer, or one is not as `GGUF_FIELDS` has it.
        """
        name = f"{self._prefix}.{key}"
        value = self._all[name]
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count:
            raise CheckpointError(f"{name} has {len(values)} entries; accepted is one for each of {count} layers")
        for one in values:
            check_fields({key: one}, {key: or_zero(GGUF_FIELDS[key])}, f"{self._prefix}.")
        return values


def gguf_fields(checkpoint: Checkpoint, **differences: Any) -> dict[str, Any]:
    """DecoderConfig's fields from the keys that most architectures share, then the family's `differences`.

    Biases and norms on queries and keys are there when their tensors are. Layers are all alike unless `differences`
    has `layers`.
    """
    get, tensors = Metadata(checkpoint), checkpoint.tensors
    if not get("attention.causal", True) and differences.get("encoder") is None:
        raise CheckpointError("attention.causal is false; accepted is true, for this is not served as an encoder")
    heads = get("attention.head_count")
    fields: dict[str, Any] = {
        "vocab_size": gguf_rows(checkpoint, "token_embd.weight"),
        "hidden_size": get("embedding_length"),
        "num_heads": heads,
        "head_dim": gguf_head_dim(checkpoint),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "head_bias": "output.bias" in tensors,
    }
    if "intermediate_size" not in differences:
        fields["intermediate_size"] = get("feed_forward_length")
    if "num_kv_heads" not in differences:
        fields["num_kv_heads"] = get("attention.head_count_kv", heads)
    if "intermediate_size" not in differences:
        fields["intermediate_size"] = get("feed_forward_length")
    if "norm_eps" not in differences:
        fields["norm_eps"] = get("attention.layer_norm_rms_epsilon")
    if "layers" not in differences:
        fields["layers"] = (LayerKind(gguf_rope(checkpoint)),) * gguf_layers(checkpoint)
    fields |= differences
    if "max_position_embeddings" not in differences:
        fields["max_position_embeddings"] = scaled_length(fields["max_position_embeddings"], fields["layers"])
    return fields


def gguf_layers(checkpoint: Checkpoint) -> int:
    """The number of layers, without those past the last that predict further tokens, which a file counts too."""
    return Metadata(checkpoint)("block_count") - gguf_further_layers(checkpoint)


def gguf_further_layers(checkpoint: Checkpoint) -> int:
    """How many layers past the last predict further tokens."""
    return Metadata(checkpoint)("nextn_predict_layers", 0)


def gguf_hybrid_heads(checkpoint: Checkpoint) -> tuple[list[bool], int]:
    """Which layers attend, as those without KV heads do not, and the KV heads of each that does.

    Raises:
        CheckpointError: no layer attends, or they have different numbers of them.
    """
    get = Metadata(checkpoint)
    heads = get.by_layer("attention.head_count_kv", get("block_count"))
    different = sorted(set(heads) - {0})
    if len(different) != 1:
        raise CheckpointError(
            f"attention.head_count_kv is {shown(heads)}; accepted is 0 or one and the same in each layer"
        )
    return [count > 0 for count in heads], different[0]


def gguf_rows(checkpoint: Checkpoint, name: str) -> int:
    """Rows of a matrix. Raises CheckpointError where there is no such tensor."""
    info = checkpoint.tensors.get(name)
    if info is None or len(info.shape) != 2 or not SIZE.fits(info.shape[0]):
        found = "missing" if info is None else f"of shape {info.shape}"
        raise CheckpointError(f"tensor {name!r} is {found}; accepted is a matrix, its rows {SIZE.accepted}")
    return info.shape[0]


def gguf_head_dim(checkpoint: Checkpoint) -> int:
    """`attention.key_length`, or the hidden size shared out among the heads."""
    get = Metadata(checkpoint)
    return get("attention.key_length", None) or get("embedding_length") // get("attention.head_count")


def gguf_rope(
    checkpoint: Checkpoint,
    *,
    theta: float = 10_000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    mscale_all_dim: float | None = None,
) -> RopeConfig:
    """The rotary embedding of a file.

    Args:
        theta, partial: where the file has no `rope.freq_base` or `rope.dimension_count`.
        mscale_all_dim: the part of YaRN's factor that is on the logits and not on cosine and sine; None in families
            whose files have no `yarn_log_multiplier`.

    Raises:
        CheckpointError: the kind of scaling is unknown, or one of its keys has a value that is not supported.
    """
    get = Metadata(checkpoint)
    kind = get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise CheckpointError(f"rope.scaling.type is {shown(kind)}; supported are none, linear, yarn and longrope")
    factor = float(get("rope.scaling.factor", 0) or get("rope.scale_linear", 0) or 1)
    longest = get("context_length")
    original = get("rope.scaling.original_context_length", longest)
    fields: dict[str, Any] = {}
    if "rope_factors_long.weight" in checkpoint.tensors:
        kind = "longrope"
        fields |= {f"{n}_divisors": _vector(checkpoint, f"rope_factors_{n}.weight") for n in ("short", "long")}
        fields |= {"factor": longest / original, "original_length": original}
    elif kind == "longrope":
        raise CheckpointError("rope.scaling.type is 'longrope', but tensor 'rope_factors_long.weight' is missing")
    elif kind == "yarn":
        fields |= {"factor": factor, "original_length": original}
        fields |= {key: float(get(f"rope.scaling.yarn_{key}", value)) for key, value in YARN_BETAS.items()}
        fields["attention_factor"] = yarn_mscale(factor) / yarn_mscale(factor, mscale_all_dim or 0.0)
    elif kind == "linear" and factor != 1:
        fields["factor"] = factor
    else:
        kind = "default"
    _check_yarn(get, kind, mscale_all_dim)
    fields["attention_factor"] = fields.get("attention_factor", 1.0) * gguf_attention_factor(checkpoint)
    if "rope_freqs.weight" in checkpoint.tensors:
        fields["divisors"] = _vector(checkpoint, "rope_freqs.weight")
    return RopeConfig(
        dim=get("rope.dimension_count", None) or int(gguf_head_dim(checkpoint) * partial),
        theta=float(get("rope.freq_base", theta)),
        interleaved=interleaved,
        kind=kind,
        **fields,
    )


def gguf_windows(checkpoint: Checkpoint, *, period: int) -> list[int | None]:
    """The sliding window of each layer, None where there is none.

    `attention.sliding_window_pattern` has a flag a layer, or how often a layer without a window comes: `period` where
    the file does not have it.
    """
    get = Metadata(checkpoint)
    count, window = gguf_layers(checkpoint), get("attention.sliding_window", 0) or None
    if f"{checkpoint.config['general.architecture']}.attention.sliding_window_pattern" not in checkpoint.config:
        slides = [(i + 1) % period != 0 for i in range(count)]
    else:
        given = get.by_layer("attention.sliding_window_pattern", count)
        slides = [flag if isinstance(flag, bool) else (i + 1) % flag != 0 for i, flag in enumerate(given)]
    return [window if slide else None for slide in slides]


def gguf_attention_factor(checkpoint: Checkpoint) -> float:
    """What multiplies cosine and sine of every layer, whatever the scaling (`rope_attn_factor` in llama.cpp)."""
    return float(Metadata(checkpoint)("rope.scaling.attn_factor", 1.0))


def _check_yarn(get: Metadata, kind: str, mscale_all_dim: float | None) -> None:
    """Refuses what llama.cpp reads for other architectures: part of YaRN only, or with a factor of its own."""
    get("rope.scaling.yarn_attn_factor", 1.0)
    share, whole_share = get("rope.scaling.yarn_ext_factor", -1.0), int(kind == "yarn")
    if share >= 0 and share != whole_share:
        raise CheckpointError(
            f"rope.scaling.yarn_ext_factor is {shown(share)}; accepted is {whole_share}, or a negative number"
        )
    multiplier = get("rope.scaling.yarn_log_multiplier", 0.0)
    if mscale_all_dim is None and multiplier:
        raise CheckpointError(f"rope.scaling.yarn_log_multiplier is {shown(multiplier)}; accepted is 0")


SIZE_OF_VECTORS = 2**16
"""Of rotary factors, one a pair of a head's channels."""

DIVISOR = real(1e-3, 1e31)
"""What a frequency is divided by; a huge one says that its channels do not rotate."""

YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def _vector(checkpoint: Checkpoint, name: str) -> tuple[float, ...]:
    info = checkpoint.tensors.get(name)
    if info is None or len(info.shape) != 1 or info.shape[0] > SIZE_OF_VECTORS:
        found = "missing" if info is None else f"of shape {info.shape}"
        raise CheckpointError(f"tensor {name!r} is {found}; accepted is a vector of up to {SIZE_OF_VECTORS} factors")
    values = checkpoint.read(name).expand().tolist()
    if not all(map(DIVISOR.fits, values)):
        raise CheckpointError(f"tensor {name!r} is {shown(values)}; accepted is {DIVISOR.accepted} in each place")
    return tuple(values)


def gguf_linear(path: str, *names: str, fused: str | None = None) -> dict[str, Pattern]:
    """Weight and bias of one product in every layer, as `hf_linear`."""
    return {
        f"layers.*.{path}.{kind}": AnyOf(
            tuple(f"blk.*.{name}.{kind}" for name in names), *([f"blk.*.{fused}.{kind}"] if fused else [])
        )
        for kind in ("weight", "bias")
    }


def _row(weight: np.ndarray) -> np.ndarray:
    return weight.reshape(1, -1)


def _join_kv_b(k_b: np.ndarray, v_b: np.ndarray) -> np.ndarray:
    """`[H, L, nope]` and `[H, v, L]` -> `[H * (nope + v), L]`, a head's key rows before its value rows."""
    if k_b.ndim != 3 or v_b.ndim != 3 or (k_b.shape[0], k_b.shape[1]) != (v_b.shape[0], v_b.shape[2]):
        raise CheckpointError(
            f"tensors attn_k_b and attn_v_b are of shapes {k_b.shape} and {v_b.shape}; accepted are (heads, latent, "
            "key) and (heads, value, latent)"
        )
    rows = np.concatenate([np.asarray(k_b, np.float32).swapaxes(1, 2), np.asarray(v_b, np.float32)], axis=1)
    return rows.reshape(-1, rows.shape[-1])


GGUF_NAMES: dict[str, Pattern] = {
    "embed.weight": "token_embd.weight",
    **{f"norm.{kind}": f"output_norm.{kind}" for kind in ("weight", "bias")},
    **{f"head.{kind}": f"output.{kind}" for kind in ("weight", "bias")},
    **gguf_linear("attention_norm", "attn_norm"),
    **gguf_linear("attention_post_norm", "post_attention_norm"),
    **gguf_linear("mlp_norm", "ffn_norm"),
    **gguf_linear("mlp_post_norm", "post_ffw_norm"),
    **gguf_linear("attention.qkv", "attn_q", "attn_k", "attn_v", fused="attn_qkv"),
    **gguf_linear("attention.output", "attn_output"),
    **gguf_linear("attention.q_norm", "attn_q_norm"),
    **gguf_linear("attention.k_norm", "attn_k_norm"),
    **gguf_linear("attention.q", "attn_q"),
    **gguf_linear("attention.q_a", "attn_q_a"),
    **gguf_linear("attention.q_a_norm", "attn_q_a_norm"),
    **gguf_linear("attention.q_b", "attn_q_b"),
    **gguf_linear("attention.kv_a", "attn_kv_a_mqa"),
    **gguf_linear("attention.kv_a_norm", "attn_kv_a_norm"),
    "layers.*.attention.kv_b.weight": AnyOf(
        "blk.*.attn_kv_b.weight", Source("blk.*.attn_k_b.weight", _join_kv_b, also=("blk.*.attn_v_b.weight",))
    ),
    **gguf_linear("mlp.gate_up", "ffn_gate", "ffn_up", fused="ffn_up"),
    **gguf_linear("mlp.up", "ffn_up"),
    **gguf_linear("mlp.down", "ffn_down"),
    "layers.*.mlp.router.weight": "blk.*.ffn_gate_inp.weight",
    "layers.*.mlp.router.correction_bias": "blk.*.exp_probs_b.bias",
    **gguf_linear("mlp.experts.gate_up", "ffn_gate_exps", "ffn_up_exps", fused="ffn_gate_up_exps"),
    **gguf_linear("mlp.experts.up", "ffn_up_exps"),
    **gguf_linear("mlp.experts.down", "ffn_down_exps"),
    **gguf_linear("mlp.shared.gate_up", "ffn_gate_shexp", "ffn_up_shexp"),
    **gguf_linear("mlp.shared.up", "ffn_up_shexp"),
    **gguf_linear("mlp.shared.down", "ffn_down_shexp"),
    "layers.*.mlp.shared_gate.weight": Source("blk.*.ffn_gate_inp_shexp.weight", _row),
}
"""Where all architectures keep their tensors."""


ENCODER_NAMES: dict[str, Pattern] = {
    "places.positions": "position_embd.weight",
    "places.types": "token_types.weight",
    **{f"embedding_norm.{kind}": f"token_embd_norm.{kind}" for kind in ("weight", "bias")},
    **gguf_linear("attention_post_norm", "attn_output_norm"),
    **gguf_linear("mlp_post_norm", "layer_output_norm"),
    **{f"classifier.dense.{kind}": f"cls.{kind}" for kind in ("weight", "bias")},
    **{f"classifier.output.{kind}": f"cls.output.{kind}" for kind in ("weight", "bias")},
}
"""Where encoders keep theirs, whose norms come after the residual sums."""


def permuted_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Q and K of the architectures whose rows llama.cpp stores for interleaved rotation (llama, mistral3, smollm3)."""
    undo = unpermute_rope(config.head_dim)
    return {
        f"layers.*.attention.qkv.{kind}": (
            *(Source(f"blk.*.attn_{p}.{kind}", undo, by_rows=True) for p in "qk"),
            f"blk.*.attn_v.{kind}",
        )
        for kind in ("weight", "bias")
    }
