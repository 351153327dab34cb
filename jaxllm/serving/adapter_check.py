"""Whether an engine can use an adapter: one token says so."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import EngineDeadError, InvalidRequestError, JaxLLMError
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.tasks import PoolingParams
from jaxllm.serving.adapters import LoadedAdapter

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM


async def check_adapter(engine: AsyncLLM, adapter: LoadedAdapter) -> None:
    """Have the engine read the adapter, and compute one token with it.

    Raises:
        InvalidRequestError: it cannot be used with this model.
        EngineDeadError, JaxLLMError: the engine has failed.
    """
    writes = engine.info.tasks.why_no_text is None
    request = EngineRequest(
        request_id=f"adapter-{uuid.uuid4().hex}",
        prompt_token_ids=[0],
        sampling_params=SamplingParams(max_tokens=1, temperature=0, detokenize=False),
        pooling=None if writes else PoolingParams(),
        adapters=(adapter.use(1.0),),
    )
    with engine.run([request]) as stream:
        async for gains in stream.arrivals():
            for _, delta in gains:
                if delta.error is not None:
                    raise _error(adapter, delta.error, invalid=delta.invalid, dead=delta.is_dead)


def _error(adapter: LoadedAdapter, message: str, *, invalid: bool, dead: bool) -> Exception:
    kind = EngineDeadError if dead else InvalidRequestError if invalid else JaxLLMError
    reason = message.removeprefix(f"adapter {adapter.name!r}: ")  # which the engine's own errors begin with
    return kind(f"adapter {adapter.name!r} cannot be used: {reason}")
