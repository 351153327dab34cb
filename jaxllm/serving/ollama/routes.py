"""/api/chat, /api/generate, /api/embed and /api/embeddings: ollama's requests as conversations, prompts and texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxllm.chat.constraint import compiled
from jaxllm.chat.conversation import Conversation, Message, naming
from jaxllm.chat.events import OutputFormats
from jaxllm.chat.infill import fim_prompt
from jaxllm.chat.prompt import ConversationPrompt, fitted, prepare, sampling_params
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.call import ClientCall, chunk_stream, open_call
from jaxllm.serving.generation import GenerationSettings, Reply, collect_for
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.ollama import answers, types
from jaxllm.serving.pooling.inputs import PoolingRun
from jaxllm.serving.pooling.routes import embed
from jaxllm.serving.pooling.types import EmbeddingRequest
from jaxllm.serving.state import Registry

_OF_A_PAGE = ("origin", "sec-fetch-site")
"""Headers that browsers write."""


class OllamaRoute(JSONRoute):
    """A route whose errors have ollama's shape, and whose body is JSON whatever it is said to be, as ollama's are.

    A browser says where a request comes from; of its pages the Content-Type stays what decides.
    """

    @staticmethod
    def error_event(body: bytes) -> bytes:
        return body + b"\n"

    @staticmethod
    def error_response(error: APIError) -> Response:
        body = msgspec.json.encode(answers.told(error))
        return Response(body, error.status, error.headers, media_type="application/json")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if not any(name in request.headers for name in _OF_A_PAGE):
                others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
                request.scope["headers"] = [*others, (b"content-type", b"application/json")]
                request = Request(request.scope, request.receive)
            return await handler(request)

        return handle


router = APIRouter(prefix="/api", route_class=OllamaRoute, tags=["ollama"])


_ANSWERS: Any = returns(
    answers.OllamaAnswer, lines=(answers.OllamaAnswer, answers.OllamaError), error=answers.OllamaError
)


@router.post("/chat", responses=_ANSWERS)
async def chat(body: types.OllamaChatRequest, request: Request) -> Response:
    """Continue a conversation, as ollama does: in lines of JSON unless `stream` is false."""
    return await _answered(body, request)


@router.post("/generate", responses=_ANSWERS)
async def generate(body: types.GenerateRequest, request: Request) -> Response:
    """Answer one prompt, as ollama does: in lines of JSON unless `stream` is false."""
    return await _answered(body, request)


@router.post("/embed", responses=returns(answers.OllamaEmbedAnswer, error=answers.OllamaError))
async def embed_texts(body: types.OllamaEmbedRequest, request: Request) -> Response:
    """A vector of unit length for each text."""
    came = time.monotonic()
    call = await _open(body, request)
    loaded = time.monotonic()
    vectors, num_tokens = await _vectors(call, request, body.as_embeddings()) if body.input else ([], 0)
    total, load = (answers.nanoseconds(seconds) for seconds in (time.monotonic() - came, loaded - came))
    return json_response(answers.OllamaEmbedAnswer(body.model, vectors, total, load, num_tokens))


@router.post("/embeddings", responses=returns(answers.OllamaEmbeddingsAnswer, error=answers.OllamaError))
async def embed_prompt(body: types.OllamaEmbeddingsRequest, request: Request) -> Response:
    """The vector of one text, as long as the model made it; /api/embed replaces it."""
    call = await _open(body, request)
    vectors, _ = await _vectors(call, request, body.as_embeddings()) if body.prompt else ([[]], 0)
    return json_response(answers.OllamaEmbeddingsAnswer(vectors[0]))


async def _answered(body: types.OllamaChatRequest | types.GenerateRequest, request: Request) -> Response:
    came = time.monotonic()
    if body.says_nothing and body.keep_alive == 0:
        registry: Registry = request.app.state.server.registry
        model = registry.find(body.model, tenant_of(request))
        if model.served is not None:
            await registry.loader.unload(model)
        return json_response(answers.answer(body, done=True, done_reason="unload"))
    call = await _open(body, request)
    loaded = time.monotonic()
    if body.says_nothing:
        return json_response(answers.answer(body, done=True, done_reason="load"))
    settings = body.settings()
    call.model.check_accepting()
    with naming(types.FIELD_NAMES):
        _check_thinking(call, body)
        reply = Reply(call, await _prompt(call, body, settings), settings, "chat-")
    writer = answers.AnswerWriter(reply, body, came, loaded)
    if body.stream:
        return await chunk_stream(call, reply.generation, writer, {"Content-Type": answers.LINES})
    [choice] = await collect_for(request, reply.generation)
    return json_response(writer.whole(choice), request_id=reply.generation.id)


async def _open(body: types.OllamaFields, request: Request) -> ClientCall:
    """A call of the model, with no comments while it loads: ollama's clients take every line for JSON."""
    registry: Registry = request.app.state.server.registry
    model = registry.find(body.model, tenant_of(request))
    return await open_call(request, body.model, keep_alive=None if model.pinned else body.keep_alive)


async def _prompt(
    call: ClientCall, body: types.OllamaChatRequest | types.GenerateRequest, settings: GenerationSettings
) -> ConversationPrompt:
    """A text that is continued as it is, or a conversation, perhaps after the tokens of an earlier answer."""
    asked = body if isinstance(body, types.GenerateRequest) else None
    if asked and (asked.raw or asked.suffix or not (call.model.has_chat_template or asked.template)):
        return await call.state.offload_grammar(_text, call, asked, settings)
    ready = await call.prepare(prepare, body.conversation(), settings)
    if asked and asked.context:
        ids, bos = ready.prompt.token_ids, call.model.tokenizer.bos_token_id
        later = ids[1:] if ids[:1] == asked.context[:1] == [bos] else ids  # the sequence begins once
        all_ids, params = [*asked.context, *later], ready.prompt.params
        ready.prompt = await call.state.offload(fitted, call.model, all_ids, params, settings, Field("context"))
    return ready


def _check_thinking(call: ClientCall, body: types.AnswerFields) -> None:
    """Raises InvalidRequestError where a model is to think that shows no reasoning, as in ollama."""
    model = call.model
    if body.think and model.formats(model.chat_template or model.tokenizer.chat_template or "").reasoning is None:
        raise InvalidRequestError([Field("think"), f" is set, but model {body.model!r} does not support thinking"])


def _text(call: ClientCall, body: types.GenerateRequest, settings: GenerationSettings) -> ConversationPrompt:
    """The prompt of a text that is continued as it is."""
    if body.system:
        raise InvalidRequestError(f"system needs a model with a chat template; {body.model!r} has none", "system")
    if body.images:
        raise InvalidRequestError(f"images need a model with a chat template; {body.model!r} has none", "images")
    model, context = call.model, body.context or []
    params = sampling_params(model, settings, structured_outputs=compiled(body.constraint(), Field("format")))
    if body.suffix:
        ids, stops = fim_prompt(model, body.prompt, body.suffix)
        params = replace(params, stop_token_ids=[*params.stop_token_ids, *stops])
    else:
        ids = context + model.encode(body.prompt, Field("prompt"), add_special_tokens=not context)
    prompt = fitted(model, ids, params, settings, Field("prompt"))
    said = Conversation(messages=[Message("user", body.prompt)])
    return ConversationPrompt(prompt, OutputFormats(None, None), said, in_reasoning=False)


async def _vectors(call: ClientCall, request: Request, body: EmbeddingRequest) -> tuple[list[list[float]], int]:
    run = PoolingRun(request, call, body, "embd")
    found = await embed(run, body)
    return [vector.tolist() for vector in found], run.usage().prompt_tokens
