"""Requests that generate nothing: their prompts run side by side, and stopped together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

import numpy as np
from fastapi import Request

from jaxllm.requests.outputs import PooledOutput
from jaxllm.requests.tasks import PoolingParams
from jaxllm.serving.call import ClientCall
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import until_disconnect
from jaxllm.serving.openai.usage import PromptTokensDetails
from jaxllm.serving.pooling.embedding_types import PoolingFields, PoolingUsage
from jaxllm.serving.request_metrics import Clock, ModelCall


class PoolingRun:
    """One HTTP request's prompts, with the adapter that it names. `usage` counts those that `run` was given.

    Raises InvalidRequestError for a priority that its tenant may not have.
    """

    def __init__(self, call: ClientCall, fields: PoolingFields, kind: str):
        self.id = f"{kind}-{fields.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = call.model
        self._adapters = call.adapter_uses()
        self._fields = fields
        self._call = call
        self._priority = call.tenant.priority(fields.priority)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._task: asyncio.Task[list[PooledOutput]] | None = None
        self._ended_by: APIError | None = None

    async def run(
        self,
        request: Request,
        prompts: Sequence[list[int]],
        params: PoolingParams,
        second_texts: Sequence[int] = (),
    ) -> list[np.ndarray]:
        """The values of every prompt, in order. `second_texts` are `AsyncLLM.pool`'s.

        Raises:
            ClientDisconnected: the client went away first; the engine stops then.
            APIError: what it was aborted with, or 429 when the key has fewer tokens left than the prompts have.
            What the engine raises: InvalidRequestError, QueueFullError, EngineDeadError, JaxLLMError.
        """
        asked = ModelCall(operation="embed", model=self._model.names[0], clock=Clock(time.time()))
        tokens = sum(map(len, prompts))
        async with self._call.asking(self, asked, tokens):
            asked.prompt_tokens = tokens
            try:
                outputs = await until_disconnect(request.receive, self._run(prompts, params, second_texts))
            except asyncio.CancelledError:
                if self._ended_by is not None:
                    raise self._ended_by from None
                raise
            asked.cached_tokens = sum(output.num_cached_tokens for output in outputs)
        self._prompt_tokens += tokens
        self._cached_tokens += asked.cached_tokens
        return [output.values for output in outputs]

    def abort(self, error: APIError) -> None:
        """Stop now; the client gets the error."""
        self._ended_by = error
        if self._task is not None:
            self._task.cancel()

    def usage(self) -> PoolingUsage:
        """Tokens of all prompts run so far."""
        return PoolingUsage(
            prompt_tokens=self._prompt_tokens,
            total_tokens=self._prompt_tokens,
            prompt_tokens_details=PromptTokensDetails(self._cached_tokens),
        )

    async def _run(
        self, prompts: Sequence[list[int]], params: PoolingParams, second_texts: Sequence[int]
    ) -> list[PooledOutput]:
        fields = self._fields
        call = self._model.engine.pool(
            prompts,
            params,
            request_id=self.id,
            priority=self._priority,
            cache_salt=self._call.tenant.cache_salt(fields.cache_salt),
            group=self._call.tenant.group,
            adapters=self._adapters,
            second_texts=second_texts,
        )
        self._task = asyncio.create_task(call)
        return await self._task
