"""/embeddings and /pooling"""

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
from jaxllm.requests.outputs import shape_vector
from jaxllm.requests.sampling import INT32_MAX
from jaxllm.requests.tasks import PoolingParams
from jaxllm.serving.call import ClientCall, open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.request_model import Label, RequestModel, refuse
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.openai.messages import TextPart
from jaxllm.serving.pooling.embedding_types import (
    MAX_INPUTS,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    Pooled,
    PoolingList,
    PoolingRequest,
    VectorFields,
)
from jaxllm.serving.pooling.inputs import class_scores, input_prompts, pooling_kind
from jaxllm.serving.pooling.run import PoolingRun
from jaxllm.serving.pooling.scoring_types import APIVersion
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["embeddings"])
cohere_router = APIRouter(route_class=JSONRoute, tags=["embeddings"])
"""What has a version of its own in its path."""

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
PROMPT_NAMES = {"search_query": "query", "search_document": "document"}
"""`input_type`, and the name that sentence-transformers has for the prompt."""


class CohereInput(RequestModel):
    content: list[TextPart] = Field(min_length=1, max_length=MAX_INPUTS)
    """Parts of one text; they are joined by newlines."""


class CohereEmbedRequest(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"images"})
    path: ClassVar[str] = "/v2/embed"
    called_here: ClassVar[Mapping[str, str]] = {
        "dimensions": "output_dimension", "input": "texts", "encoding_format": "embedding_types",
        "truncate_prompt_tokens": "truncate",
    }  # fmt: skip

    model: str | None = None
    """A name that /v1/models lists; by default the first."""
    texts: list[str] | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    """What to make vectors of."""
    inputs: list[CohereInput] | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    """The same, each text as a list of parts."""
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    """Puts the model's own prompt for queries or documents before a text, where its files have one; else no effect."""
    embedding_types: list[EmbeddingType] = Field(default=["float"], min_length=1, max_length=4)
    """How vectors are written: numbers, base64 of float32, or a bit a number, in bytes with a sign or without."""
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
        """One a vector."""
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in one.content) for one in self.inputs or ()]

    def as_embeddings(self, prompts: Collection[str] = ()) -> EmbeddingRequest:
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


class _OfTexts(EmbeddingRequest):
    called: ClassVar = {"input": "texts", "dimensions": "output_dimension"}


class _OfInputs(EmbeddingRequest):
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
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text."""
    return await vectors_of(await open_call(request, body.model, keep_alive=body.keep_alive), body, request)


async def vectors_of(call: ClientCall, body: EmbeddingRequest, request: Request) -> Response:
    """What /embeddings answers, of a model that has been taken."""
    run = PoolingRun(call, body, "embd")
    vectors = await embed(request.app.state.server, call.model, request, body, run)
    embeddings = EmbeddingList(
        id=run.id,
        created=run.created,
        model=call.name,
        data=[Embedding(index=index, embedding=body.encoded(vector)) for index, vector in enumerate(vectors)],
        usage=run.usage(),
    )
    return json_response(embeddings, request_id=run.id)


@router.post("/pooling", responses=returns(PoolingList))
async def pool(body: PoolingRequest, request: Request) -> Response:
    """What the model makes of each text: a vector, or with a classification head the probabilities of its classes."""
    state: ServerState = request.app.state.server
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    model = call.model
    run = PoolingRun(call, body, "pool")
    classifies = bool(model.engine.info.tasks.labels)
    if body.task == "classify" or (body.task is None and classifies):
        for field in ("dimensions", "normalize"):
            if getattr(body, field) is not None:
                raise InvalidRequestError(f"{field} is for vectors; task is 'classify'", field)
        rows = await class_scores(state, call, request, body, run, raw=body.use_activation is False)
    else:
        rows = await embed(state, model, request, body, run)
    pooled = PoolingList(
        id=run.id,
        created=run.created,
        model=call.name,
        data=[Pooled(index=index, data=body.encoded(row)) for index, row in enumerate(rows)],
        usage=run.usage(),
    )
    return json_response(pooled, request_id=run.id)


@cohere_router.post("/v2/embed", responses=returns(CohereEmbedResponse))
async def embed_v2(body: CohereEmbedRequest, request: Request) -> Response:
    """A vector for each text; Cohere's second shape."""
    state: ServerState = request.app.state.server
    call = await open_call(request, body.model)
    model = call.model
    fields = body.as_embeddings(model.engine.info.tasks.prompts)
    run = PoolingRun(call, fields, "embd")
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
