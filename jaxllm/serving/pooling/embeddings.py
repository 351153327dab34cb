"""/embeddings"""

from __future__ import annotations

import base64

import numpy as np
from fastapi import APIRouter, Request, Response

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import shape_vector
from jaxllm.requests.pooling import PoolingParams
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.pooling.embedding_types import Embedding, EmbeddingList, EmbeddingRequest
from jaxllm.serving.pooling.prompts import input_prompts, pooling_kind
from jaxllm.serving.pooling.run import PoolingRun
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["embeddings"])


@router.post("/embeddings", responses=returns(EmbeddingList))
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text."""
    state: ServerState = request.app.state.server
    name, model = state.find_model(body.model)
    size = model.engine.info.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequestError(f"dimensions is {body.dimensions}; this model has {size}", "dimensions")
    prompts = await input_prompts(state, model, body)
    run = PoolingRun(model, body, "embd")
    vectors = await run.run(request, prompts, PoolingParams(kind=pooling_kind(model)))
    normalize = body.asks_unit_length
    if normalize is None:
        normalize = model.engine.info.tasks.normalize
    shaped = (shape_vector(vector, body.dimensions, normalize) for vector in vectors)
    embeddings = EmbeddingList(
        id=run.id,
        created=run.created,
        model=name,
        data=[
            Embedding(index=index, embedding=encode_vector(vector, body.encoding_format))
            for index, vector in enumerate(shaped)
        ],
        usage=run.usage(),
    )
    return json_response(embeddings, request_id=run.id)


def encode_vector(vector: np.ndarray, encoding_format: str) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
