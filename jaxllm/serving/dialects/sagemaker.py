"""/invocations, where Amazon SageMaker sends requests of every kind: their fields tell which."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Tag

from jaxllm.errors import InvalidRequestError
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import DONE, ErrorResponse, returns
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.openai.chat import create_chat_completion
from jaxllm.serving.openai.chat_types import ChatCompletion, ChatCompletionChunk, ChatRequest
from jaxllm.serving.openai.completions import Completion, CompletionRequest, create_completion
from jaxllm.serving.pooling.routes import ANSWERS, classes_of, rerank, score, vectors_of
from jaxllm.serving.pooling.types import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest

router = APIRouter(route_class=JSONRoute, tags=["SageMaker"])

KINDS = {
    "messages": "chat", "prompt": "completion", "input": "embedding", "query": "rerank",
    "text_1": "score", "queries": "score", "data_1": "score",
}  # fmt: skip
"""A field that only one kind of request must have -> that kind."""


def _kind(body: Any) -> str | None:
    fields = vars(body) if isinstance(body, RequestModel) else body if isinstance(body, dict) else {}
    return next((kind for name, kind in KINDS.items() if fields.get(name) is not None), None)


Invocation = Annotated[
    Annotated[ChatRequest, Tag("chat")]
    | Annotated[CompletionRequest, Tag("completion")]
    | Annotated[EmbeddingRequest, Tag("embedding")]
    | Annotated[RerankRequest, Tag("rerank")]
    | Annotated[ScoreRequest, Tag("score")],
    Discriminator(
        _kind,
        custom_error_type="refused",
        custom_error_message=f"the body has none of {', '.join(KINDS)}, which tell what is asked for",
        custom_error_context={"param": ""},
    ),
]


@router.post(
    "/invocations",
    responses=returns(
        ChatCompletion, Completion, *ANSWERS, events=(ChatCompletionChunk, Completion, ErrorResponse), done=DONE
    ),
)
async def invoke(body: Invocation, request: Request) -> Response:
    """A chat, a completion, embeddings or classes, a ranking or scores: whichever the body's fields ask for.

    `input` asks for what the model is made for, classes if it has a classification head.
    """
    match body:
        case ChatRequest():
            return await create_chat_completion(body, request)
        case CompletionRequest():
            return await create_completion(body, request)
        case EmbeddingRequest():
            return await _of_input(body, request)
        case RerankRequest():
            return await rerank(body, request)
        case _:
            return await score(body, request)


async def _of_input(body: EmbeddingRequest, request: Request) -> Response:
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    if not call.model.engine.info.tasks.labels:
        return await vectors_of(call, body, request)
    known = ClassifyRequest.model_fields.keys()
    if name := next((name for name in body.model_fields_set if name not in known), None):
        raise InvalidRequestError(f"{name} is for vectors; model {call.name!r} classifies", name)
    return await classes_of(call, body, request, raw=body.use_activation is False)
