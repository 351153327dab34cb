"""/embeddings and /pooling"""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import shape_vector
from jaxllm.requests.tasks import PoolingParams
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.pooling.classes import class_scores
from jaxllm.serving.pooling.cohere_types import (
    BilledUnits,
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereMeta,
    written,
)
from jaxllm.serving.pooling.embedding_types import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    Pooled,
    PoolingList,
    PoolingRequest,
    VectorFields,
)
from jaxllm.serving.pooling.prompts import input_prompts, pooling_kind
from jaxllm.serving.pooling.run import PoolingRun
from jaxllm.serving.pooling.scoring_types import APIVersion
from jaxllm.serving.registry import Lease, leased
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["embeddings"])
cohere_router = APIRouter(route_class=JSONRoute, tags=["embeddings"])
"""What has a version of its own in its path."""


@router.post("/embeddings", responses=returns(EmbeddingList))
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text."""
    return await vectors_of(await leased(request, body.model, keep_alive=body.keep_alive), body, request)


async def vectors_of(lease: Lease, body: EmbeddingRequest, request: Request) -> Response:
    """What /embeddings answers, of a model that has been taken."""
    run = PoolingRun(lease, body, "embd")
    vectors = await embed(request.app.state.server, lease.model, request, body, run)
    embeddings = EmbeddingList(
        id=run.id,
        created=run.created,
        model=lease.name,
        data=[Embedding(index=index, embedding=body.encoded(vector)) for index, vector in enumerate(vectors)],
        usage=run.usage(),
    )
    return json_response(embeddings, request_id=run.id)


@router.post("/pooling", responses=returns(PoolingList))
async def pool(body: PoolingRequest, request: Request) -> Response:
    """What the model makes of each text: a vector, or with a classification head the probabilities of its classes."""
    state: ServerState = request.app.state.server
    lease = await leased(request, body.model, keep_alive=body.keep_alive)
    model = lease.model
    run = PoolingRun(lease, body, "pool")
    classifies = bool(model.engine.info.tasks.labels)
    if body.task == "classify" or (body.task is None and classifies):
        for field in ("dimensions", "normalize"):
            if getattr(body, field) is not None:
                raise InvalidRequestError(f"{field} is for vectors; task is 'classify'", field)
        rows = await class_scores(state, lease, request, body, run, raw=body.use_activation is False)
    else:
        rows = await embed(state, model, request, body, run)
    pooled = PoolingList(
        id=run.id,
        created=run.created,
        model=lease.name,
        data=[Pooled(index=index, data=body.encoded(row)) for index, row in enumerate(rows)],
        usage=run.usage(),
    )
    return json_response(pooled, request_id=run.id)


@cohere_router.post("/v2/embed", responses=returns(CohereEmbedResponse))
async def embed_v2(body: CohereEmbedRequest, request: Request) -> Response:
    """A vector for each text; Cohere's second shape."""
    state: ServerState = request.app.state.server
    lease = await leased(request, body.model)
    model = lease.model
    fields = body.as_embeddings(model.engine.info.tasks.prompts)
    run = PoolingRun(lease, fields, "embd")
    vectors = await embed(state, model, request, fields, run)
    answer = CohereEmbedResponse(
        id=run.id,
        embeddings=written(vectors, body.embedding_types),
        texts=body.texts_given(),
        meta=CohereMeta(APIVersion("2"), BilledUnits(run.usage().prompt_tokens)),
    )
    return json_response(answer, request_id=run.id)


async def embed(
    state: ServerState, model: ServedModel, request: Request, body: VectorFields, run: PoolingRun
) -> list[np.ndarray]:
    """A vector for each input. Raises InvalidRequestError naming the field."""
    size = model.engine.info.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        name = body.called.get("dimensions", "dimensions")
        raise InvalidRequestError(f"{name} is {body.dimensions}; this model has {size}", name)
    prompts = await input_prompts(state, model, body)
    vectors = await run.run(request, prompts, PoolingParams(kind=pooling_kind(model)))
    normalize = body.asks_unit_length
    if normalize is None:
        normalize = model.engine.info.tasks.normalize
    return [shape_vector(vector, body.dimensions, normalize) for vector in vectors]
