"""/embeddings, /pooling, /score, /rerank, /classify, and Cohere's /v2/embed and /v2/rerank"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import ClassVar, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import PoolingParams, shape_vector
from jaxllm.requests.sampling import INT32_MAX
from jaxllm.serving.call import ClientCall, open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.request_model import Label, ModelFields, RequestModel, refuse
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.openai.messages import TextPart
from jaxllm.serving.pooling import types as bodies
from jaxllm.serving.pooling.inputs import PoolingRun, PoolingUsage, class_scores, input_prompts, score_pairs

router = APIRouter(route_class=JSONRoute, tags=["embeddings"])
scoring_router = APIRouter(route_class=JSONRoute, tags=["scoring"])
embed_v2_router = APIRouter(route_class=JSONRoute, tags=["embeddings"])
rerank_v2_router = APIRouter(route_class=JSONRoute, tags=["scoring"])


class _Listed(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(_Listed, kw_only=True):
    data: list[Embedding]
    usage: PoolingUsage


class Pooled(msgspec.Struct, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str


class PoolingList(_Listed, kw_only=True):
    data: list[Pooled]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(_Listed, kw_only=True):
    data: list[Score]
    usage: PoolingUsage


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(_Listed, kw_only=True):
    data: list[Classification]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct):
    text: str


class Rank(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class TextRank(msgspec.Struct, kw_only=True):
    """TEI's."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class APIVersion(msgspec.Struct):
    version: Literal["1", "2"]


class RankingMeta(msgspec.Struct):
    """Cohere's."""

    api_version: APIVersion


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[Rank]
    usage: PoolingUsage
    meta: RankingMeta


ANSWERS = (EmbeddingList, ClassificationList, Ranking, list[TextRank], ScoreList)
"""Of the routes whose requests /invocations takes."""

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
PROMPT_NAMES = {"search_query": "query", "search_document": "document"}
"""`input_type`, and the name that sentence-transformers has for the prompt."""


class CohereInput(RequestModel):
    content: list[TextPart] = Field(min_length=1, max_length=bodies.MAX_INPUTS)
    """Parts of one text; they are joined by newlines."""


class CohereEmbedRequest(ModelFields):
    unsupported: ClassVar[frozenset[str]] = frozenset({"images"})
    path: ClassVar[str] = "/v2/embed"
    called_here: ClassVar[Mapping[str, str]] = {
        "dimensions": "output_dimension", "input": "texts", "encoding_format": "embedding_types",
        "truncate_prompt_tokens": "truncate",
    }  # fmt: skip

    texts: list[str] | None = Field(default=None, min_length=1, max_length=bodies.MAX_INPUTS)
    """The texts to make vectors of."""
    inputs: list[CohereInput] | None = Field(default=None, min_length=1, max_length=bodies.MAX_INPUTS)
    """The same, each text as a list of parts."""
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    """Puts the model's own prompt for queries or documents before a text, where its files have one; else no effect."""
    embedding_types: list[EmbeddingType] = Field(default=["float"], min_length=1, max_length=4)
    """The forms of vectors: numbers, base64 of float32, or a bit a number, in bytes with a sign or without."""
    output_dimension: int | None = Field(default=None, ge=1)
    """Keep this many leading channels, for models that were trained for it (Matryoshka)."""
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """Cut longer texts to this many tokens; by default to the context."""
    truncate: Literal["NONE", "START", "END"] = "END"
    """Which end of a longer text is cut off; NONE refuses it."""
    priority: int = Field(default=0, ge=0, le=999)
    """Lower runs earlier."""
    request_id: str | None = Label
    """Becomes part of the response's id."""

    @model_validator(mode="after")
    def _one_source(self) -> CohereEmbedRequest:
        if (self.texts is None) == (self.inputs is None):
            problem = "neither is given" if self.texts is None else "both are given"
            raise refuse(f"give texts or inputs; {problem}", "texts")
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise refuse("max_tokens cuts texts, which truncate 'NONE' forbids", "max_tokens")
        return self

    def texts_given(self) -> list[str]:
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in one.content) for one in self.inputs or ()]

    def as_embeddings(self, prompts: Collection[str] = ()) -> bodies.EmbeddingRequest:
        """The same in OpenAI's words, for a model with prompts of these names."""
        prompt = PROMPT_NAMES.get(self.input_type or "")
        kind = _OfTexts if self.texts is not None else _OfInputs
        return kind(
            model=self.model,
            input=self.texts_given(),
            dimensions=self.output_dimension,
            truncate_prompt_tokens=None if self.truncate == "NONE" else self.max_tokens or -1,
            truncation_side="left" if self.truncate == "START" else "right",
            priority=self.priority,
            request_id=self.request_id,
            prompt_name=prompt if prompt in prompts else None,
        )


class _OfTexts(bodies.EmbeddingRequest):
    called: ClassVar = {"input": "texts", "dimensions": "output_dimension"}


class _OfInputs(bodies.EmbeddingRequest):
    called: ClassVar = {"input": "inputs", "dimensions": "output_dimension"}


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """Vectors by how they are written."""

    floats: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    base64: list[str] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class BilledUnits(msgspec.Struct):
    input_tokens: int


class CohereMeta(msgspec.Struct):
    api_version: APIVersion
    billed_units: BilledUnits


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


@router.post("/embeddings", responses=returns(EmbeddingList))
async def create_embeddings(body: bodies.EmbeddingRequest, request: Request) -> Response:
    """A vector for each text."""
    return await vectors_of(await open_call(request, body.model, keep_alive=body.keep_alive), body, request)


async def vectors_of(call: ClientCall, body: bodies.EmbeddingRequest, request: Request) -> Response:
    """The answer of /embeddings, of a model that has been taken."""
    run = PoolingRun(request, call, body, "embd")
    vectors = await embed(run, body)
    data = [Embedding(index=index, embedding=body.encoded(vector)) for index, vector in enumerate(vectors)]
    return run.listed(EmbeddingList, data)


@router.post("/pooling", responses=returns(PoolingList))
async def pool(body: bodies.PoolingRequest, request: Request) -> Response:
    """What the model makes of each text: a vector, or with a classification head the probabilities of its classes."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    run = PoolingRun(request, call, body, "pool")
    if body.task == "classify" or (body.task is None and run.tasks.labels):
        for field in ("dimensions", "normalize"):
            if getattr(body, field) is not None:
                raise InvalidRequestError(f"{field} is for vectors; task is 'classify'", field)
        rows = await class_scores(run, body, raw=body.use_activation is False)
    else:
        rows = await embed(run, body)
    return run.listed(PoolingList, [Pooled(index=index, data=body.encoded(row)) for index, row in enumerate(rows)])


@embed_v2_router.post("/v2/embed", responses=returns(CohereEmbedResponse))
async def embed_v2(body: CohereEmbedRequest, request: Request) -> Response:
    """A vector for each text; Cohere's second shape."""
    call = await open_call(request, body.model)
    fields = body.as_embeddings(call.model.engine.info.tasks.prompts)
    run = PoolingRun(request, call, fields, "embd")
    vectors = await embed(run, fields)
    answer = CohereEmbedResponse(
        id=run.id,
        embeddings=written(vectors, body.embedding_types),
        texts=body.texts_given(),
        meta=CohereMeta(APIVersion("2"), BilledUnits(run.usage().prompt_tokens)),
    )
    return json_response(answer, request_id=run.id)


async def embed(run: PoolingRun, body: bodies.VectorFields) -> list[np.ndarray]:
    """A vector for each input. Raises InvalidRequestError naming the field."""
    size = run.model.engine.info.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        name = body.called.get("dimensions", "dimensions")
        raise InvalidRequestError(f"{name} is {body.dimensions}; this model has {size}", name)
    prompts = await input_prompts(run, body)
    vectors = await run.run(prompts, PoolingParams(kind=run.pooling))
    asked = body.use_activation if body.normalize is None else body.normalize
    normalize = run.tasks.normalize if asked is None else asked
    return [shape_vector(vector, body.dimensions, normalize) for vector in vectors]


def written(vectors: list[np.ndarray], types: list[EmbeddingType]) -> CohereEmbeddings:
    """The vectors as asked for. A bit is 1 where the number is above 0; `binary` is `ubinary` less 128."""
    found = CohereEmbeddings()
    bits = [np.packbits(vector > 0) for vector in vectors]
    if "float" in types:
        found.floats = [vector.tolist() for vector in vectors]
    if "base64" in types:
        found.base64 = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    if "binary" in types:
        found.binary = [(octets.astype(np.int16) - 128).tolist() for octets in bits]
    if "ubinary" in types:
        found.ubinary = [octets.tolist() for octets in bits]
    return found


@scoring_router.post("/score", responses=returns(ScoreList))
async def score(body: bodies.ScoreRequest, request: Request) -> Response:
    """A score of how well each text goes with the query."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    run = PoolingRun(request, call, body, "score")
    scores = await score_pairs(run, body.pairs, body)
    return run.listed(ScoreList, [Score(index=index, score=value) for index, value in enumerate(scores)])


@scoring_router.post("/rerank", responses=returns(Ranking, list[TextRank]))
@scoring_router.post("/reranking", include_in_schema=False)
async def rerank(body: bodies.RerankRequest, request: Request) -> Response:
    """Documents by their relevance, best first; Jina's shape, and Cohere's first. With `texts` a list, as TEI's."""
    if body.texts is None:
        return await _rank(body, request, "1", return_documents=body.return_documents is not False)
    run, scores, best_first = await _ranked(body, request)
    ranks = [
        TextRank(index=index, score=scores[index], text=body.texts[index] if body.return_text else UNSET)
        for index in best_first
    ]
    return json_response(ranks, request_id=run.id)


@rerank_v2_router.post("/v2/rerank", responses=returns(Ranking))
async def rerank_v2(body: bodies.DocumentRerankRequest, request: Request) -> Response:
    """Documents by their relevance, best first; Cohere's second shape."""
    return await _rank(body, request, "2", return_documents=body.return_documents is True)


@scoring_router.post("/classify", responses=returns(ClassificationList))
async def classify(body: bodies.ClassifyRequest, request: Request) -> Response:
    """The class of each text, for models with a classification head."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    return await classes_of(call, body, request, raw=not body.use_activation)


async def classes_of(call: ClientCall, body: bodies.InputFields, request: Request, *, raw: bool) -> Response:
    """The answer of /classify, of a model that has been taken."""
    run = PoolingRun(request, call, body, "classify")
    probs, labels = await class_scores(run, body, raw=raw), run.tasks.labels
    data = [
        Classification(index=index, label=labels[int(np.argmax(row))], probs=row.tolist(), num_classes=len(labels))
        for index, row in enumerate(probs)
    ]
    return run.listed(ClassificationList, data)


async def _rank(
    body: bodies.DocumentRerankRequest, request: Request, version: Literal["1", "2"], *, return_documents: bool
) -> Response:
    run, scores, best_first = await _ranked(body, request)
    texts = body.candidates
    ranks = [
        Rank(
            index=index,
            relevance_score=scores[index],
            document=RankedDocument(texts[index]) if return_documents else UNSET,
        )
        for index in best_first[: body.top_n or None]
    ]
    meta = RankingMeta(APIVersion(version))
    ranking = Ranking(id=run.id, model=run.call.name, results=ranks, usage=run.usage(), meta=meta)
    return json_response(ranking, request_id=run.id)


async def _ranked(body: bodies.DocumentRerankRequest, request: Request) -> tuple[PoolingRun, list[float], list[int]]:
    """The candidates' scores, and their places from the best on."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    run = PoolingRun(request, call, body, "rerank")
    scores = await score_pairs(run, [(body.query, text) for text in body.candidates], body)
    return run, scores, sorted(range(len(scores)), key=lambda index: -scores[index])
