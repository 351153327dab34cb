"""Whether the sizes of a decoder go together; each by itself was looked at where it was read."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.hf_fields import BIDIRECTIONAL
from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.fields import shown


def check_decoder(c: DecoderConfig) -> None:
    """Raises CheckpointError naming the sizes that do not fit, whatever format they were read from."""
    if c.hidden_act not in ACTIVATIONS:
        _refuse("the activation", shown(c.hidden_act), ", ".join(ACTIVATIONS))
    if not c.layers:
        _refuse("the number of layers", 0, "1 or more")
    if c.attends:
        _check_heads(c)
    if c.ssd is None and any(layer.mixer == "ssd" for layer in c.layers):
        _refuse("the number of state-space heads", 0, "1 or more in a model with state-space layers")
    if c.ssd is not None and c.ssd.heads % c.ssd.groups:
        _refuse("the number of state-space groups", c.ssd.groups, f"a divisor of {c.ssd.heads} heads")
    if c.ssd is not None and c.ssd.kernel < 2:
        _refuse("the number of tokens that a convolution sees", c.ssd.kernel, "2 or more")
    if c.conv is None and any(layer.mixer == "conv" for layer in c.layers):
        _refuse("the number of tokens that a convolution sees", 0, "2 or more in a model with convolutions")
    if c.conv is not None and c.conv.kernel < 2:
        _refuse("the number of tokens that a convolution sees", c.conv.kernel, "2 or more")
    if any(layer.chunked and layer.window is None for layer in c.layers):
        _refuse("the size of attention's chunks", "missing", "1 or more in a model with layers of chunks")
    if (delta := c.delta) is not None and delta.value_heads % delta.key_heads:
        _refuse("the number of key heads of linear attention", delta.key_heads, f"a divisor of {delta.value_heads}")
    if c.moe is None and any(layer.sparse for layer in c.layers):
        _refuse("the number of experts", 0, "1 or more in a model with sparse layers")
    for layer in dict.fromkeys(c.layers):
        if layer.rope is not None:
            _check_rope(layer.rope, c.mla.qk_rope_head_dim if c.mla else c.head_dim_of(layer))


def check_direction(c: dict[str, Any], config: DecoderConfig) -> None:
    """Raises CheckpointError where a config.json asks for attention to later tokens, which its family has none of."""
    for key, value in BIDIRECTIONAL:
        if c.get(key) is value and config.encoder is None:
            _refuse(key, value, f"{not value} or null, since this family is not served as an encoder")


def _check_heads(c: DecoderConfig) -> None:
    if c.head_dim < 1:
        _refuse("the size of a head", c.head_dim, f"1 or more, {c.num_heads} of which share {c.hidden_size} channels")
    for count in map(c.num_kv_heads_of, c.layers):
        if c.mla is None and c.num_heads % count:
            _refuse("the number of key-value heads", count, f"a divisor of {c.num_heads} heads")
    if c.mla and min(c.mla.qk_nope_head_dim, c.mla.qk_rope_head_dim, c.mla.v_head_dim) < 1:
        _refuse("one of the head sizes of latent attention", c.mla, "1 or more")


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    least = 4 if rope.kind == "dynamic" else 2  # dynamic scaling divides by two less
    if rope.dim % 2 or not least <= rope.dim <= head_dim:
        _refuse("the number of rotary channels", rope.dim, f"an even number from {least} to a head's {head_dim}")
    if rope.kind == "llama3" and rope.high_freq_factor < rope.low_freq_factor:
        _refuse("high_freq_factor", rope.high_freq_factor, f"low_freq_factor ({rope.low_freq_factor}) or more")
    for name in ("short_divisors", "long_divisors", "divisors"):
        divisors = getattr(rope, name)
        wanted = bool(divisors) or (rope.kind == "longrope" and name != "divisors")
        if wanted and len(divisors) != rope.dim // 2:
            _refuse(f"the number of {name} of the rotary embedding", len(divisors), str(rope.dim // 2))


def _refuse(what: str, value: object, accepted: str) -> None:
    raise CheckpointError(f"{what} is {value}; accepted is {accepted}")
