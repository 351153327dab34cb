"""Qwen3-Next and Qwen3.5: linear attention by the gated delta rule in three of four layers; dense, or with experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families.llama import gated_experts, sparse_steps
from jaxllm.models.family import Family, hf_decoder, hf_rope
from jaxllm.models.gguf import GGUF_EXPERTS, Table, optional
from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.layers.recurrent import DeltaConfig
from jaxllm.models.names import hf_expert_names, in_layers
from jaxllm.models.names import hf_names as standard_names
from jaxllm.weights.names import AnyOf, NameMap, Pattern, Source, expand, plus_one, renamed, without_middle_axis

LAYER_TYPES = ("full_attention", "linear_attention")
PARTIAL = 0.25  # of each head's channels are rotated
INTERVAL = 4  # one of that many layers has full attention, where nothing else is said

DEFAULTS = {
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 32_768,
}  # fmt: skip
SPARSE_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def next_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Layers have experts unless `mlp_only_layers` or `decoder_sparse_step` says otherwise."""
    c = SPARSE_DEFAULTS | {"intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10} | c
    return _from_hf(c, sparse_steps(c), gated_experts(c, renormalize=bool(c.get("norm_topk_prob", True))))


def dense_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Text has one position in each section of `mrope_section`, so that these are of no account."""
    c = DEFAULTS | {"num_key_value_heads": 4} | c
    return _from_hf(c, [False] * c["num_hidden_layers"], None)


def moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = SPARSE_DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8} | c
    c = c | {"intermediate_size": c["moe_intermediate_size"]}
    return _from_hf(c, [True] * c["num_hidden_layers"], gated_experts(c, renormalize=True))


def _from_hf(c: dict[str, Any], sparse: list[bool], moe: MoEConfig | None) -> DecoderConfig:
    count, interval = c["num_hidden_layers"], c.get("full_attention_interval", INTERVAL)
    kinds = c.get("layer_types") or [LAYER_TYPES[(i + 1) % interval != 0] for i in range(count)]
    rope = hf_rope(c, partial=PARTIAL)
    delta = DeltaConfig(
        key_heads=c["linear_num_key_heads"], value_heads=c["linear_num_value_heads"], key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"], kernel=c["linear_conv_kernel_dim"],
    )  # fmt: skip
    layers = [
        LayerKind(rope, sparse=has) if kind == "full_attention" else LayerKind(None, sparse=has, mixer="delta")
        for kind, has in zip(kinds, sparse, strict=True)
    ]
    bias = c.get("attention_bias", False)
    return hf_decoder(c, layers=layers, delta=delta, moe=moe, qk_norm="rms", attention_gate=True, attention_bias=bias)


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """All norms but the one after the rule are stored without the 1 that is added to them."""
    attention = "model.layers.*.linear_attn"
    return {
        "norm.weight": Source("model.norm.weight", plus_one),
        **in_layers("model.layers.*", {
            "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
            "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
        }, plus_one),
        **in_layers(attention, {
            "delta.qkv": "in_proj_qkv", "delta.gate": "in_proj_z", "delta.beta_decay": ("in_proj_b", "in_proj_a"),
            "delta.norm": "norm", "delta.output": "out_proj",
        }),
        "layers.*.delta.taps": Source(f"{attention}.conv1d.weight", without_middle_axis),
        "layers.*.delta.rate": Source(f"{attention}.A_log", _rate),
        "layers.*.delta.rate_bias": f"{attention}.dt_bias",
        **hf_expert_names(config, shared="shared_expert"),
    }  # fmt: skip


def next_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Qwen3-Next has what linear attention projects in two tensors, a key head's rows next to each other."""
    attention = "model.layers.*.linear_attn"
    return hf_names(config) | _by_key_heads(config, f"{attention}.in_proj_qkvz", f"{attention}.in_proj_ba")


def mtp_names(config: DecoderConfig, num_layers: int) -> NameMap:
    """The module's layer and last norm are spelled as the model's are, under `mtp.`."""
    own: dict[str, Pattern] = {
        "token_norm.weight": Source("mtp.pre_fc_norm_embedding.weight", plus_one),
        "hidden_norm.weight": Source("mtp.pre_fc_norm_hidden.weight", plus_one),
        "join.weight": "mtp.fc.weight",
    }
    as_the_model = expand(standard_names(config) | hf_names(config), 1)
    return expand(own, 1) | renamed(as_the_model, lambda name: f"mtp.{name.removeprefix('model.')}")


def _by_key_heads(config: DecoderConfig, qkvz: str, ba: str) -> dict[str, Source]:
    delta = config.delta
    assert delta is not None
    shared = delta.value_heads // delta.key_heads
    values = shared * delta.value_dim
    q, k, v, z = _parts(delta.key_heads, delta.key_dim, delta.key_dim, values, values)
    beta_decay = _parts(delta.key_heads, shared, shared)
    return {
        "layers.*.delta.qkv.weight": _moved(f"{qkvz}.weight", np.concatenate([q, k, v]), len(z)),
        "layers.*.delta.gate.weight": _moved(f"{qkvz}.weight", z, len(q) + len(k) + len(v)),
        "layers.*.delta.beta_decay.weight": _moved(f"{ba}.weight", np.concatenate(beta_decay)),
    }


def _parts(heads: int, *sizes: int) -> list[np.ndarray]:
    """Which rows are of each part, where every head has `sizes` rows of each, one part after the other."""
    rows = np.arange(heads * sum(sizes)).reshape(heads, -1)
    return [part.ravel() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def _moved(name: str, rows: np.ndarray, others: int = 0) -> Source:
    """These rows of a tensor, in their order, which has so many `others`."""

    def transform(tensor: np.ndarray) -> np.ndarray:
        tensor = without_middle_axis(tensor) if tensor.ndim == 3 else tensor  # a convolution's
        _check_size(name, "rows", len(tensor), len(rows) + others)
        return tensor[rows]

    return Source(name, transform, by_rows=True)


def _columns(name: str, order: np.ndarray, run: int) -> Source:
    def transform(matrix: np.ndarray, columns: int = 1) -> np.ndarray:
        _check_size(name, "columns", matrix.shape[-1] * columns, len(order))
        return matrix[..., order[::columns] // columns]

    return Source(name, transform, column_runs=run)


def _check_size(name: str, what: str, found: int, accepted: int) -> None:
    if found != accepted:
        raise CheckpointError(f"tensor {name!r} has {found} {what}; accepted is {accepted}")


def _rate(logarithm: np.ndarray) -> np.ndarray:
    """The factor on the softplus of a token's logit that makes it the logarithm of its decay."""
    return -np.exp(np.asarray(logarithm, np.float32))


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Tensors that all files have under the same names. Norms have their 1 already."""
    return {
        **in_layers("blk.*", {
            "delta.qkv": "attn_qkv", "delta.gate": "attn_gate", "delta.beta_decay": ("ssm_beta", "ssm_alpha"),
            "delta.norm": "ssm_norm", "delta.output": "ssm_out",
        }),
        "layers.*.delta.taps": Source("blk.*.ssm_conv1d.weight", without_middle_axis),
        "layers.*.delta.rate": "blk.*.ssm_a",
        "layers.*.delta.rate_bias": "blk.*.ssm_dt.bias",
    }  # fmt: skip


def next_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Files of Qwen3-Next have beta and decay by key heads, and older ones the rest as well."""
    by_heads = _by_key_heads(config, "blk.*.ssm_in", "blk.*.ssm_ba")
    either: dict[str, Pattern] = {
        f"layers.*.delta.{path}.weight": AnyOf(f"blk.*.{name}.weight", by_heads[f"layers.*.delta.{path}.weight"])
        for path, name in {"qkv": "attn_qkv", "gate": "attn_gate"}.items()
    }
    return gguf_names(config) | by_heads | either


def tiled_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Files of Qwen3.5 have the value heads in another order: the first of each key head, then the second of each, …

    The order of the output's inputs is one of columns. Quantized ones are moved in whole blocks where a head has some,
    and encoded anew where a block has inputs of several heads.
    """
    delta, names = config.delta, gguf_names(config)
    assert delta is not None
    if delta.value_heads == delta.key_heads:
        return names
    keys = 2 * delta.key_heads * delta.key_dim
    heads, channels = _untiled(delta, 1), _untiled(delta, delta.value_dim)
    qkv = np.concatenate([np.arange(keys), keys + channels])
    beta_decay = (_moved("blk.*.ssm_beta.weight", heads), _moved("blk.*.ssm_alpha.weight", heads))
    return names | {
        "layers.*.delta.qkv.weight": _moved("blk.*.attn_qkv.weight", qkv),
        "layers.*.delta.gate.weight": _moved("blk.*.attn_gate.weight", channels),
        "layers.*.delta.beta_decay.weight": beta_decay,
        "layers.*.delta.taps": _moved("blk.*.ssm_conv1d.weight", qkv),
        "layers.*.delta.rate": _moved("blk.*.ssm_a", heads),
        "layers.*.delta.rate_bias": _moved("blk.*.ssm_dt.bias", heads),
        "layers.*.delta.output.weight": _columns("blk.*.ssm_out.weight", channels, delta.value_dim),
    }


def _untiled(delta: DeltaConfig, size: int) -> np.ndarray:
    """Places of the rows of each value head, in the order of the key heads that they use.

    Worked example, two key heads and four value heads of one row: the file has heads 0 2 1 3.
    """
    heads = np.arange(delta.value_heads).reshape(-1, delta.key_heads).T.reshape(-1, 1)
    return (heads * size + np.arange(size)).ravel()


GGUF: Table = {
    "full_attention_interval": optional("full_attention_interval", INTERVAL),
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_value_head_dim": lambda file: file("ssm.inner_size") // file("ssm.time_step_rank"),
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
MOE_GGUF: Table = {  # files say neither that weights of experts are renormalised nor that some layers are dense
    **GGUF,
    **GGUF_EXPERTS,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "intermediate_size": lambda file: file("feed_forward_length", file("expert_feed_forward_length")),
}


NEXT = Family(
    name="Qwen3-Next", models="Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    architectures=("Qwen3NextForCausalLM",), model_types=("qwen3_next",), layer_types=LAYER_TYPES,
    from_hf=next_from_hf, hf_names=next_hf_names, mtp_names=mtp_names,
    gguf_architectures=("qwen3next",), gguf=MOE_GGUF, gguf_names=next_gguf_names,
)  # fmt: skip

DENSE = Family(
    name="Qwen3.5", models="Qwen3.5, 3.6, 3.8, dense (text)",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_types=("qwen3_5_text",), wrappers=("qwen3_5",), layer_types=LAYER_TYPES,
    from_hf=dense_from_hf, hf_names=hf_names, mtp_names=mtp_names,
    gguf_architectures=("qwen35",), gguf=GGUF, gguf_names=tiled_gguf_names,
)  # fmt: skip

MOE = Family(
    name="Qwen3.5 MoE", models="Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B (text)",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model_types=("qwen3_5_moe_text",), wrappers=("qwen3_5_moe",), layer_types=LAYER_TYPES,
    from_hf=moe_from_hf, hf_names=hf_names, mtp_names=mtp_names,
    gguf_architectures=("qwen35moe",), gguf=MOE_GGUF, gguf_names=tiled_gguf_names,
)  # fmt: skip
