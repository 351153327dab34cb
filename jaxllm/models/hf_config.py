"""config.json of a model that came without one: from a GGUF file, or saved by jaxllm."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.layers.rope import RopeConfig


def hf_config(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """What `family.from_hf` reads as `config`; it is tried, so that no file says less than the model needs.

    Raises:
        ConfigError: something of the model has no place in the keys that are written here; it is named.
    """
    content = _content(family, config)
    try:
        read = family.from_hf(content)
    except KeyError as error:
        raise ConfigError(f"a config.json of {family.name} needs {error.args[0]}, which is not known") from None
    lost = [f.name for f in fields(config) if getattr(read, f.name) != getattr(config, f.name)]
    if lost:
        raise ConfigError(
            f"the {', '.join(lost)} of this {family.name} model cannot be said in a config.json made from another "
            "format; accepted is a model in Hugging Face's"
        )
    return content


def _content(family: Family, c: DecoderConfig) -> dict[str, Any]:
    content: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_types[0],
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": c.hidden_act,
        "hidden_activation": c.hidden_act,
        "rms_norm_eps": c.norm_eps,
        "layer_norm_eps": c.norm_eps,
        "norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "attention_bias": c.qkv_bias,
        "attention_out_bias": c.output_bias,
        "mlp_bias": c.mlp_bias,
        "use_bias": c.mlp_bias,
        "use_qk_norm": c.qk_norm is not None,
        "embedding_multiplier": c.embedding_scale,
        "residual_multiplier": c.residual_scale,
        "logits_scaling": 1 / c.logit_scale,
        "logit_scale": c.logit_scale,
        "attn_logit_softcapping": c.attention_softcap,
        "final_logit_softcapping": c.logit_softcap,
    }
    if c.attention_scale:
        content["query_pre_attn_scalar"] = round(c.attention_scale**-2)
        content["attention_multiplier"] = c.attention_scale
    everywhere = next((layer.rope for layer in c.layers if layer.window is None and layer.rope), c.layers[0].rope)
    if everywhere is not None:
        content |= _rope(everywhere, c.head_dim)
    windows = {layer.window for layer in c.layers if layer.window is not None}
    if windows:
        content["sliding_window"] = min(windows)
        slides = {True: "sliding_attention", False: "full_attention"}
        content["layer_types"] = [slides[layer.window is not None] for layer in c.layers]
        local = next(layer.rope for layer in c.layers if layer.window is not None)
        if local is not None and local != everywhere:
            content["rope_local_base_freq"] = local.theta
    else:
        content["sliding_window"] = None
    return content


def _rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.dim != head_dim:
        found["partial_rotary_factor"] = rope.dim / head_dim
    if rope.kind == "default":
        return found
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling["attention_factor"] = rope.attention_factor
    if rope.kind == "longrope":
        scaling |= {"short_factor": list(rope.short_divisors), "long_factor": list(rope.long_divisors)}
        scaling["attention_factor"] = rope.attention_factor
    return found | {"rope_scaling": scaling}
