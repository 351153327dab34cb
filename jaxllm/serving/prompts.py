"""From a request to token ids and sampling parameters that fit the context. Runs on worker threads."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.errors import APIError
from jaxllm.serving.generation import Prompt
from jaxllm.serving.protocol.chat import ChatRequest
from jaxllm.serving.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from jaxllm.serving.protocol.messages import Message, TemplateFields
from jaxllm.serving.state import ServerState


def chat_prompt(state: ServerState, body: ChatRequest) -> Prompt:
    """Render, tokenize and check a chat. Raises InvalidRequestError or APIError naming the field."""
    token_ids = tokenize_chat(state, body.messages, body, body.add_special_tokens)
    field, asked = body.asked_max_tokens
    params = sampling_params(
        state, body, max_tokens=asked, logprobs=body.logprobs_count, prompt_logprobs=body.prompt_logprobs
    )
    return _fit(state, Prompt(token_ids, params), body.truncate_prompt_tokens, source="messages", field=field)


def completion_prompts(state: ServerState, body: CompletionRequest) -> list[Prompt]:
    """Tokenize and check every prompt of a request. Raises InvalidRequestError or APIError naming the field."""
    asked = max(body.max_tokens, 1) if "max_tokens" in body.model_fields_set else None
    params = sampling_params(
        state, body, max_tokens=asked, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs_count
    )
    prompts = []
    for prompt in body.prompts:
        token_ids = state.tokenizer.encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
        fitted = _fit(
            state, Prompt(token_ids, params), body.truncate_prompt_tokens, source="prompt", default=DEFAULT_MAX_TOKENS
        )
        if body.echo:
            if isinstance(prompt, str) and len(fitted.token_ids) == len(token_ids):
                fitted.text = prompt
            else:
                fitted.text = state.tokenizer.decode(fitted.token_ids, params.skip_special_tokens)
        prompts.append(fitted)
    return prompts


def tokenize_chat(
    state: ServerState, messages: list[Message], fields: TemplateFields, add_special_tokens: bool
) -> list[int]:
    tokenizer = state.tokenizer
    text = tokenizer.apply_chat_template(
        [message.for_template() for message in messages], **fields.template_arguments(state.chat_template)
    )
    return tokenizer.encode(text, add_special_tokens)


def sampling_params(state: ServerState, body: ChatRequest | CompletionRequest, **derived: Any) -> SamplingParams:
    detokenize = state.engine.tokenizer is not None
    return body.sampling_params(state.engine.info.default_sampling, detokenize=detokenize, **derived)


def _fit(
    state: ServerState,
    prompt: Prompt,
    truncate: int | None,
    *,
    source: str,
    field: str = "max_tokens",
    default: int | None = None,
) -> Prompt:
    """Cut the prompt if asked to, check it, settle max_tokens: as asked, or `default`, or the rest of the context."""
    context = state.engine.info.max_model_len
    asked = prompt.params.max_tokens
    if truncate is not None:
        keep = truncate if truncate > 0 else max(context - (asked or default or 1), 1)
        prompt.token_ids = prompt.token_ids[-keep:]
    length = len(prompt.token_ids)
    room = context - length
    if room < 1:
        message = f"{source} has {length} tokens; the context holds {context}, prompt and completion together"
        raise APIError(400, message, param=source, code="context_length_exceeded")
    if asked is not None and asked > room:
        message = (
            f"{field} is {asked} and {source} has {length} tokens, {asked + length} together; "
            f"the context holds {context}, so {field} may be at most {room}"
        )
        raise APIError(400, message, param=field, code="context_length_exceeded")
    if asked is None:
        asked = min(default or room, room)
        prompt.params = dataclasses.replace(prompt.params, max_tokens=asked)
    try:
        state.engine.check(prompt.token_ids, prompt.params)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            str(error), source if error.param in (None, "prompt_token_ids") else error.param
        ) from None
    return prompt
