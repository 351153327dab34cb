"""The classes that a classification head tells apart."""

from __future__ import annotations

import numpy as np
from fastapi import Request

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.tasks import PoolingParams
from jaxllm.serving.loadable import Lease
from jaxllm.serving.pooling.embedding_types import InputFields
from jaxllm.serving.pooling.pairs import activate
from jaxllm.serving.pooling.prompts import input_prompts
from jaxllm.serving.pooling.run import PoolingRun
from jaxllm.serving.state import ServerState


async def class_scores(
    state: ServerState,
    lease: Lease,
    request: Request,
    body: InputFields,
    run: PoolingRun,
    *,
    raw: bool,
) -> list[np.ndarray]:
    """Of each input, its classes' probabilities, or with `raw` the head's own scores.

    Raises InvalidRequestError when the model has no classification head.
    """
    model = lease.model
    tasks = model.engine.info.tasks
    if not tasks.labels:
        raise InvalidRequestError(f"model {lease.name!r} has no classification head, so it cannot classify", "model")
    prompts = await input_prompts(state, model, body)
    logits = np.stack(await run.run(request, prompts, PoolingParams(kind="logits")))
    return list(activate(logits, "identity" if raw else tasks.activation))
