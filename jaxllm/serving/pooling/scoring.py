"""/score, /rerank and /classify"""

from __future__ import annotations

from typing import Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from jaxllm.serving.call import ClientCall, open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.pooling.embedding_types import InputFields
from jaxllm.serving.pooling.inputs import class_scores, score_pairs
from jaxllm.serving.pooling.run import PoolingRun
from jaxllm.serving.pooling.scoring_types import (
    APIVersion,
    Classification,
    ClassificationList,
    ClassifyRequest,
    DocumentRerankRequest,
    Rank,
    RankedDocument,
    Ranking,
    RankingMeta,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    TextRank,
)
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["scoring"])
cohere_router = APIRouter(route_class=JSONRoute, tags=["scoring"])
"""What has a version of its own in its path."""


@router.post("/score", responses=returns(ScoreList))
async def score(body: ScoreRequest, request: Request) -> Response:
    """How well each text goes with the query."""
    state: ServerState = request.app.state.server
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    model = call.model
    run = PoolingRun(call, body, "score")
    scores = await score_pairs(state, model, request, body.pairs, body, run)
    result = ScoreList(
        id=run.id,
        created=run.created,
        model=call.name,
        data=[Score(index=index, score=value) for index, value in enumerate(scores)],
        usage=run.usage(),
    )
    return json_response(result, request_id=run.id)


@router.post("/rerank", responses=returns(Ranking, list[TextRank]))
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Documents by their relevance, best first; Jina's shape, and Cohere's first. With `texts` a list, as TEI's."""
    if body.texts is not None:
        return await _rank_texts(body, request)
    return await _rank(body, request, "1", return_documents=body.return_documents is not False)


@cohere_router.post("/v2/rerank", responses=returns(Ranking))
async def rerank_v2(body: DocumentRerankRequest, request: Request) -> Response:
    """Documents by their relevance, best first; Cohere's second shape."""
    return await _rank(body, request, "2", return_documents=body.return_documents is True)


@router.post("/classify", responses=returns(ClassificationList))
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """The class of each text, for models with a classification head."""
    return await classes_of(
        await open_call(request, body.model, keep_alive=body.keep_alive), body, request, raw=not body.use_activation
    )


async def classes_of(call: ClientCall, body: InputFields, request: Request, *, raw: bool) -> Response:
    """What /classify answers, of a model that has been taken."""
    model = call.model
    run = PoolingRun(call, body, "classify")
    probs = await class_scores(request.app.state.server, call, request, body, run, raw=raw)
    labels = model.engine.info.tasks.labels
    result = ClassificationList(
        id=run.id,
        created=run.created,
        model=call.name,
        data=[
            Classification(index=index, label=labels[int(np.argmax(row))], probs=row.tolist(), num_classes=len(labels))
            for index, row in enumerate(probs)
        ],
        usage=run.usage(),
    )
    return json_response(result, request_id=run.id)


async def _rank(
    body: DocumentRerankRequest, request: Request, version: Literal["1", "2"], *, return_documents: bool
) -> Response:
    state: ServerState = request.app.state.server
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    model = call.model
    run = PoolingRun(call, body, "rerank")
    texts = body.candidates
    scores, best_first = await _ranked(state, model, request, body, run)
    result = Ranking(
        id=run.id,
        model=call.name,
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


async def _rank_texts(body: RerankRequest, request: Request) -> Response:
    state: ServerState = request.app.state.server
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    model = call.model
    run = PoolingRun(call, body, "rerank")
    scores, best_first = await _ranked(state, model, request, body, run)
    ranks = [
        TextRank(index=index, score=scores[index], text=body.candidates[index] if body.return_text else UNSET)
        for index in best_first
    ]
    return json_response(ranks, request_id=run.id)


async def _ranked(
    state: ServerState, model: ServedModel, request: Request, body: DocumentRerankRequest, run: PoolingRun
) -> tuple[list[float], list[int]]:
    """The candidates' scores, and their places from the best on."""
    pairs = [(body.query, text) for text in body.candidates]
    scores = await score_pairs(state, model, request, pairs, body, run)
    return scores, sorted(range(len(scores)), key=lambda index: -scores[index])
