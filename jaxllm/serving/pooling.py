"""Requests that generate nothing: their prompts cut to fit, run side by side, and stopped together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

import numpy as np
from fastapi import Request

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import PooledOutput
from jaxllm.requests.pooling import PoolingParams
from jaxllm.requests.tasks import Pooling
from jaxllm.serving.errors import APIError, unavailable
from jaxllm.serving.prompts import render_own_template, tokenize_chat
from jaxllm.serving.protocol.common import PromptTokensDetails
from jaxllm.serving.protocol.embeddings import InputFields, PoolingFields, PoolingUsage
from jaxllm.serving.state import ServerState
from jaxllm.serving.streaming import until_disconnect


class PoolingBatch:
    """One HTTP request's prompts. `usage` counts those that `run` was given, call by call."""

    def __init__(self, state: ServerState, fields: PoolingFields, kind: str):
        self.id = f"{kind}-{fields.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self._state = state
        self._fields = fields
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._task: asyncio.Task[list[PooledOutput]] | None = None
        self._aborted = False

    async def run(self, request: Request, prompts: Sequence[list[int]], params: PoolingParams) -> list[np.ndarray]:
        """The values of every prompt, in order.

        Raises:
            ClientDisconnected: the client went away first; the engine stops then.
            APIError: 503 when the server stops first.
            What the engine raises: InvalidRequestError, QueueFullError, EngineDeadError, JaxLLMError.
        """
        self._state.check_accepting()
        self._state.running.add(self)
        try:
            outputs = await until_disconnect(request.receive, self._run(prompts, params))
        except asyncio.CancelledError:
            if self._aborted:
                raise unavailable("the server is shutting down", code="shutting_down") from None
            raise
        finally:
            self._state.running.discard(self)
        self._prompt_tokens += sum(map(len, prompts))
        self._cached_tokens += sum(output.num_cached_tokens for output in outputs)
        return [output.values for output in outputs]

    def abort(self) -> None:
        """Stop now; the client gets 503."""
        self._aborted = True
        if self._task is not None:
            self._task.cancel()

    def usage(self) -> PoolingUsage:
        """Tokens of all prompts run so far."""
        return PoolingUsage(
            prompt_tokens=self._prompt_tokens,
            total_tokens=self._prompt_tokens,
            prompt_tokens_details=PromptTokensDetails(self._cached_tokens),
        )

    async def _run(self, prompts: Sequence[list[int]], params: PoolingParams) -> list[PooledOutput]:
        fields = self._fields
        call = self._state.engine.pool(
            prompts, params, request_id=self.id, priority=fields.priority, cache_salt=fields.cache_salt
        )
        self._task = asyncio.create_task(call)
        return await self._task


def pooling_kind(state: ServerState) -> Pooling:
    """The server's setting, or what the checkpoint asks for."""
    setting = state.config.pooling
    return state.engine.info.tasks.pooling if setting == "auto" else setting


async def input_prompts(state: ServerState, body: InputFields) -> list[list[int]]:
    """Tokenize, cut and check every input of a request. Raises InvalidRequestError or APIError naming the entry."""
    if body.messages is None:
        return await state.offload(_input_prompts, state, body)
    text = await render_own_template(state, body.messages, body)
    ids = await state.offload(tokenize_chat, state, body.messages, body, bool(body.add_special_tokens), text)
    return [check_length(state, cut(ids, kept_tokens(state, body), body.truncation_side), "messages")]


def text_prompt(state: ServerState, text: str, keep: int, source: str, side: str = "right") -> list[int]:
    """Token ids of a text with its special tokens, which stay when it is cut to `keep` tokens."""
    ids = state.tokenizer.encode(text)
    if len(ids) > keep:
        plain = state.tokenizer.encode(text, add_special_tokens=False)
        start = next(i for i in range(len(ids)) if ids[i : i + len(plain)] == plain)
        before, after = ids[:start], ids[start + len(plain) :]
        room = keep - len(before) - len(after)
        if room < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {keep}; {len(before) + len(after)} special tokens leave no room for text",
                "truncate_prompt_tokens",
            )
        ids = before + cut(plain, room, side) + after
    return check_length(state, ids, source)


def kept_tokens(state: ServerState, fields: PoolingFields) -> int:
    """How many tokens truncate_prompt_tokens leaves; more than any text has where it is not set."""
    longest = longest_prompt(state)
    match fields.truncate_prompt_tokens:
        case None:
            return 2**63
        case -1:
            return longest
        case count:
            return min(count, longest)


def longest_prompt(state: ServerState) -> int:
    """Tokens that a prompt may have: the engine keeps room for one more."""
    return state.engine.info.max_model_len - 1


def cut(ids: list[int], keep: int, side: str = "right") -> list[int]:
    """The first `keep` tokens, or with side "left" the last."""
    return ids if len(ids) <= keep else ids[:keep] if side == "right" else ids[-keep:]


def check_length(state: ServerState, ids: list[int], source: str) -> list[int]:
    """`ids` again. Raises APIError when there are none, or more than the context holds."""
    if not ids:
        raise APIError(400, f"{source} is empty; it must have at least one token", param=source)
    longest = longest_prompt(state)
    if len(ids) > longest:
        message = (
            f"{source} has {len(ids)} tokens; at most {longest} fit the context of {longest + 1}. "
            "truncate_prompt_tokens cuts what is longer"
        )
        raise APIError(400, message, param=source, code="context_length_exceeded")
    return ids


def _input_prompts(state: ServerState, body: InputFields) -> list[list[int]]:
    several = len(body.inputs) > 1 or body.inputs[0] is not body.input
    return [
        _input_prompt(state, body, entry, f"input[{index}]" if several else "input")
        for index, entry in enumerate(body.inputs)
    ]


def _input_prompt(state: ServerState, body: InputFields, entry: str | list[int], source: str) -> list[int]:
    keep = kept_tokens(state, body)
    if isinstance(entry, str):
        if body.add_special_tokens is not False:
            return text_prompt(state, entry, keep, source, body.truncation_side)
        entry = state.tokenizer.encode(entry, add_special_tokens=False)
    vocab_size = state.engine.info.vocab_size
    outside = next((token for token in entry if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InvalidRequestError(f"{source} has token id {outside}; ids go from 0 to {vocab_size - 1}", source)
    return check_length(state, cut(entry, keep, body.truncation_side), source)
