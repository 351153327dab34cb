"""Hunyuan, dense and with experts: Llama with norms on queries and keys after their rotation.

A file may stretch the base of the rotation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, Table
from jaxllm.models.hf import hf_expert_names, hf_fields, hf_head_dim, hf_linear, hf_rope, hf_rope_parameters
from jaxllm.models.hf_fields import COUNT, SIZE
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.fields import NULL, either, many, shown
from jaxllm.weights.names import Pattern

WHAT_HUNYUAN_IS: dict[str, Any] = {"qk_norm": "rms", "qk_norm_rotated": True}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_bias` is on q, k, v and o alike."""
    c = {"rms_norm_eps": 1e-5} | c
    layers = (LayerKind(_rope(c)),) * c["num_hidden_layers"]
    return DecoderConfig(**_fields(c, layers))


def moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Experts beside a shared one of the same size in every layer; numbers may be lists with one for each."""
    c = {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1} | c
    for key, accepted in (("moe_intermediate_size", c["intermediate_size"]), ("num_shared_expert", 1)):
        if c.get(key) is not None and _of_all(c, key) != accepted:
            raise CheckpointError(f"{key} is {shown(c[key])}; accepted is {accepted}")
    moe = _experts(_of_all(c, "num_experts"), _of_all(c, "moe_topk"), c["intermediate_size"], c["intermediate_size"])
    layers = (LayerKind(_rope(c), sparse=True),) * c["num_hidden_layers"]
    return DecoderConfig(**_fields(c, layers, moe=moe))


def _of_all(c: dict[str, Any], key: str) -> int:
    given = c[key]
    values = given if isinstance(given, list) else [given]
    if len(set(values)) != 1:
        raise CheckpointError(f"{key} is {shown(given)}; accepted is one number for all layers")
    return values[0]


def _experts(count: int, top_k: int, hidden: int, shared: int) -> MoEConfig:
    return MoEConfig(num_experts=count, top_k=top_k, hidden=hidden, renormalize=True, shared_hidden=shared)


def _fields(c: dict[str, Any], layers: tuple[LayerKind, ...], **differences: Any) -> dict[str, Any]:
    bias = c.get("attention_bias", False)
    return hf_fields(c, layers=layers, qkv_bias=bias, output_bias=bias, **WHAT_HUNYUAN_IS, **differences)


def _rope(c: dict[str, Any]) -> RopeConfig:
    """Dynamic scaling with an `alpha` has the base of a sequence of some length, whatever its length is."""
    given, dim = hf_rope_parameters(c), hf_head_dim(c)
    alpha = given.get("alpha")
    if given.get("rope_type", given.get("type")) != "dynamic" or not alpha:
        return hf_rope(c, dim)
    rope = hf_rope(c, dim, parameters=given | {"rope_type": "default"})
    return replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2)))


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Norms are called after what they are of."""
    attention, block = "model.layers.*.self_attn", "model.layers.*.mlp"
    names: dict[str, Pattern] = {
        **hf_linear("layers.*.attention.q_norm", f"{attention}.query_layernorm"),
        **hf_linear("layers.*.attention.k_norm", f"{attention}.key_layernorm"),
    }
    if config.moe is not None:
        names |= hf_expert_names(config, block, shared="shared_mlp")
        names["layers.*.mlp.router.weight"] = f"{block}.gate.wg.weight"
    return names


FAMILY = Family(
    name="Hunyuan",
    models="Hunyuan 0.5B, 1.8B, 4B, 7B",
    architectures=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("hunyuan-dense",),
    gguf={},
)


def _one_gguf_shared_expert(file: GgufFile) -> int:
    size, key = file("feed_forward_length"), "expert_shared_feed_forward_length"
    if file(key, 0) not in (0, size):
        raise CheckpointError(f"{key} is {file(key)}; accepted is that of a routed expert, {size}")
    return 1


MOE_GGUF: Table = GGUF_EXPERTS | {"moe_topk": "expert_used_count", "num_shared_expert": _one_gguf_shared_expert}


MOE = Family(
    name="Hunyuan MoE",
    models="Hunyuan-A13B",
    architectures=("HunYuanMoEV1ForCausalLM",),
    model_types=("hunyuan_v1_moe",),
    fields={
        "num_experts": either(COUNT, many(COUNT, 2**10)),
        "moe_topk": either(COUNT, many(COUNT, 2**10)),
        "moe_intermediate_size": either(SIZE, many(SIZE, 2**10), NULL),
        "num_shared_expert": either(COUNT, many(COUNT, 2**10), NULL),
    },
    from_hf=moe_from_hf,
    hf_names=hf_names,
    gguf_architectures=("hunyuan-moe",),
    gguf=MOE_GGUF,
)
