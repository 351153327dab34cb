"""Tokens used, as chat and text completions count them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from jaxllm.config.server import ServerConfig
from jaxllm.serving import generation
from jaxllm.serving.http.request_model import RequestModel


class StreamOptions(RequestModel):
    include_usage: bool = False
    """Send a last chunk with the usage and no choices."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""

    @property
    def asks(self) -> bool:
        """Whether it asks for anything."""
        return self.include_usage or self.continuous_usage_stats


def stream_options(asked: StreamOptions | None, config: ServerConfig) -> StreamOptions:
    """What a stream tells besides: what was asked for, or all of it where the server always sends the usage."""
    if config.enable_force_include_usage:
        return StreamOptions(include_usage=True, continuous_usage_stats=True)
    return asked or StreamOptions()


def chunk_usage(
    options: StreamOptions, usage: Callable[[], generation.Usage]
) -> CompletionUsage | msgspec.UnsetType | None:
    """What every chunk but the last says of the usage: what it is so far, that it comes later, or nothing."""
    if options.continuous_usage_stats:
        return usage_object(usage())
    return None if options.include_usage else msgspec.UNSET


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Tokens tried ahead that were what the model chose: of a prediction, or from wherever else the engine drafts."""
    rejected_prediction_tokens: int = 0
    """Those that were not. They are no part of completion_tokens."""


class CompletionUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_object(usage: generation.Usage) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            usage.reasoning_tokens, usage.taken_tokens, usage.drafted_tokens - usage.taken_tokens
        ),
    )
