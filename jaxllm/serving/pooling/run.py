"""Requests that generate nothing: their prompts run side by side, and stopped together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

import numpy as np
from fastapi import Request

from jaxllm.errors import QueueFullError
from jaxllm.requests.outputs import PooledOutput
from jaxllm.requests.pooling import PoolingParams
from jaxllm.serving.http.api_error import unavailable
from jaxllm.serving.http.streaming import until_disconnect
from jaxllm.serving.openai.usage import PromptTokensDetails
from jaxllm.serving.pooling.embedding_types import PoolingFields, PoolingUsage
from jaxllm.serving.served_model import ServedModel


class PoolingRun:
    """One HTTP request's prompts. `usage` counts those that `run` was given, call by call."""

    def __init__(self, model: ServedModel, fields: PoolingFields, kind: str):
        self.id = f"{kind}-{fields.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = model
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
        self._model.check_accepting()
        self._model.running.add(self)
        try:
            outputs = await until_disconnect(request.receive, self._run(prompts, params))
        except QueueFullError:
            self._model.metrics.count_rejected()
            raise
        except asyncio.CancelledError:
            if self._aborted:
                raise unavailable("the server is shutting down", code="shutting_down") from None
            raise
        finally:
            self._model.running.discard(self)
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
        call = self._model.engine.pool(
            prompts, params, request_id=self.id, priority=fields.priority, cache_salt=fields.cache_salt
        )
        self._task = asyncio.create_task(call)
        return await self._task
