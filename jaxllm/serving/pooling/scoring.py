"""/score, /rerank and /classify"""

from __future__ import annotations

from typing import Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.pooling import PoolingParams
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.pooling.pairs import activate, score_pairs
from jaxllm.serving.pooling.prompts import input_prompts
from jaxllm.serving.pooling.run import PoolingRun
from jaxllm.serving.pooling.scoring_types import (
    APIVersion,
    Classification,
    ClassificationList,
    ClassifyRequest,
    Rank,
    RankedDocument,
    Ranking,
    RankingMeta,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
)
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["scoring"])
cohere_router = APIRouter(route_class=JSONRoute, tags=["scoring"])
"""What has a version of its own in its path."""


@router.post("/score", responses=returns(ScoreList))
async def score(body: ScoreRequest, request: Request) -> Response:
    """How well each text goes with the query."""
    state: ServerState = request.app.state.server
    name, model = state.find_model(body.model)
    run = PoolingRun(model, body, "score")
    scores = await score_pairs(state, model, request, body.pairs, body, run)
    result = ScoreList(
        id=run.id,
        created=run.created,
        model=name,
        data=[Score(index=index, score=value) for index, value in enumerate(scores)],
        usage=run.usage(),
    )
    return json_response(result, request_id=run.id)


@router.post("/rerank", responses=returns(Ranking))
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Documents by their relevance, best first; Jina's shape, and Cohere's first."""
    return await _rank(body, request, "1", return_documents=body.return_documents is not False)


@cohere_router.post("/v2/rerank", responses=returns(Ranking))
async def rerank_v2(body: RerankRequest, request: Request) -> Response:
    """Documents by their relevance, best first; Cohere's second shape."""
    return await _rank(body, request, "2", return_documents=body.return_documents is True)


@router.post("/classify", responses=returns(ClassificationList))
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """The class of each text, for models with a classification head."""
    state: ServerState = request.app.state.server
    name, model = state.find_model(body.model)
    tasks = model.engine.info.tasks
    if not tasks.labels:
        raise InvalidRequestError(f"model {name!r} has no classification head, so it cannot classify", "model")
    prompts = await input_prompts(state, model, body)
    run = PoolingRun(model, body, "classify")
    logits = np.stack(await run.run(request, prompts, PoolingParams(kind="logits")))
    probs = activate(logits, tasks.activation if body.use_activation else "identity")
    result = ClassificationList(
        id=run.id,
        created=run.created,
        model=name,
        data=[
            Classification(
                index=index, label=tasks.labels[int(row.argmax())], probs=row.tolist(), num_classes=len(tasks.labels)
            )
            for index, row in enumerate(probs)
        ],
        usage=run.usage(),
    )
    return json_response(result, request_id=run.id)


async def _rank(
    body: RerankRequest, request: Request, version: Literal["1", "2"], *, return_documents: bool
) -> Response:
    state: ServerState = request.app.state.server
    name, model = state.find_model(body.model)
    run = PoolingRun(model, body, "rerank")
    texts = body.texts
    scores = await score_pairs(state, model, request, [(body.query, text) for text in texts], body, run)
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
    result = Ranking(
        id=run.id,
        model=name,
        results=[
            Rank(
                index=index,
                relevance_score=scores[index],
                document=RankedDocument(texts[index]) if return_documents else UNSET,
            )
            for index in best_first[: body.top_n or None]
        ],
        usage=run.usage(),
        meta=RankingMeta(APIVersion(version)),
    )
    return json_response(result, request_id=run.id)
