"""Thinking budgets at the door: whose reasoning they bound, and how it is marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from jaxllm.engine.markers import closing_tokens
from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.thinking_markers import ThinkingMarkers
from jaxllm.text.reasoning import prompt_markers, template_reasoning
from jaxllm.text.tokenizer import Tokenizer

FIELD = "max_thinking_tokens"


def with_markers(request: EngineRequest, tokenizer: Tokenizer | None) -> EngineRequest:
    """The same request; its budget, if it has one, knows which markers it is about. Raises as `check_thinking` does."""
    params = request.sampling_params
    if params.max_thinking_tokens is None or params.thinking_markers is not None:
        return request
    markers = _markers(tokenizer, request.prompt_token_ids)
    return msgspec.structs.replace(request, sampling_params=replace(params, thinking_markers=markers))


def check_thinking(params: SamplingParams, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> None:
    """Refuse a budget that could not be enforced.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    if params.max_thinking_tokens is None:
        return
    if tokenizer is None:
        raise InvalidRequestError(f"{FIELD} needs a tokenizer, but skip_tokenizer_init is on", param=FIELD)
    markers = params.thinking_markers or _markers(tokenizer, prompt)
    needed = closing_tokens(markers, tokenizer.backend)
    allowed = params.allowed_token_ids
    missing = [] if allowed is None else [token for token in needed if token not in allowed]
    if missing:
        raise InvalidRequestError(
            f"allowed_token_ids leaves out {missing}; with {FIELD} it must have the tokens {needed}, which end the "
            "reasoning",
            param="allowed_token_ids",
        )


def _markers(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> ThinkingMarkers:
    reasoning = template_reasoning(tokenizer.chat_template if tokenizer is not None else None)
    if tokenizer is None or reasoning is None:
        raise InvalidRequestError(
            f"{FIELD} needs to know how the model marks its reasoning, and its chat template shows no markers; "
            "thinking_markers may say",
            param=FIELD,
        )
    return prompt_markers(reasoning, tokenizer, prompt)
