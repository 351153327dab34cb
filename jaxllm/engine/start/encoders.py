"""What an engine of an encoder settles on: texts run whole, each in one step, and nothing is kept of them."""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.models.config import DecoderConfig

_MEANINGLESS = ("speculative_config", "decode_steps", "decode_buckets", "state_cache_memory", "enable_lora")
"""Settings of what only models that generate do, or keep."""


class TextSizes(NamedTuple):
    """The longest text, and the tokens that a step has room for."""

    max_model_len: int
    max_num_batched_tokens: int
    notes: tuple[str, ...] = ()


def text_sizes(config: EngineConfig, model: DecoderConfig, stated: int | None, usual_tokens: int) -> TextSizes:
    """How long a text may be: as long as its model reads, and as a step has room for.

    Args:
        stated: what the checkpoint says of the longest text, if anything.
        usual_tokens: of a step, where no text is longer and nothing is set.

    Raises:
        ConfigError: a setting is one of models that generate, or a step would have no room for the longest text.
    """
    for name in _MEANINGLESS:
        if getattr(config, name):  # sizes of an engine that is started again may be 0
            raise ConfigError(f"{name} is set, but this model is an encoder, which generates nothing; leave it out")
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, but this model is an encoder, which has no KV cache; "
            "accepted is 'auto'"
        )
    wanted = config.max_model_len or min(stated or model.max_position_embeddings, model.max_position_embeddings)
    tokens = config.max_num_batched_tokens
    if tokens is None:
        return TextSizes(wanted, max(usual_tokens, wanted))
    if tokens >= wanted:
        return TextSizes(wanted, tokens)
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_num_batched_tokens is {tokens} and max_model_len is {wanted}; an encoder runs each text whole in one "
            f"step, so the first must be at least the second"
        )
    note = (
        f"texts have up to {tokens} tokens instead of {wanted}: an encoder runs each whole in one step "
        "(max_num_batched_tokens)"
    )
    return TextSizes(tokens, tokens, (note,))
