"""Ollama's API: its requests as conversations, prompts and texts, and the models that a server has."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxllm.chat.constraint import compiled
from jaxllm.chat.conversation import Conversation, Message, naming
from jaxllm.chat.events import OutputFormats
from jaxllm.chat.formats import detect_formats
from jaxllm.chat.infill import fim_marks, fim_prompt
from jaxllm.chat.prompt import ConversationPrompt, fitted, prepare, sampling_params
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, Field, InvalidRequestError, JaxLLMError, ModelNotFoundError
from jaxllm.serving.access.keys import check_admin, tenant_of
from jaxllm.serving.call import ClientCall, chunk_stream, open_call
from jaxllm.serving.generation import GenerationSettings, Reply, collect_for
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import EventStream, JSONRoute
from jaxllm.serving.ollama import answers, types
from jaxllm.serving.pooling.inputs import PoolingRun
from jaxllm.serving.pooling.routes import embed
from jaxllm.serving.pooling.types import EmbeddingRequest
from jaxllm.serving.served_model import LoadableModel, read_chat_template
from jaxllm.serving.state import Registry, ServerState
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.weights.folder import read_object, the_gguf_file
from jaxllm.weights.source import find_local, find_removable, remove_local, resolve_model

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


SPOKEN = "0.18.3"
"""The release of ollama whose API this is; clients refuse older ones than they know."""
FOREVER = 100 * 365 * 86400.0
"""Seconds that a model is said to stay which is not unloaded."""
REFUSED = {
    "/api/blobs/{digest}": "files are put where --models or --model-directory finds them",
    "/api/copy": "other names of a model are its aliases in the models file",
    "/api/create": "a Modelfile becomes an entry of the models file, see docs/coming-from.md",
    "/api/push": "it publishes no models",
}
"""Routes of ollama's that are not there, and why."""
CONFIG_KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
}  # fmt: skip
"""GGUF's names of what is in a config.json."""
Described = tuple[answers.ListedModel, dict[str, Any]]
"""A model's entry in a list, and more of it under the names of GGUF's metadata."""


@router.get("/version", responses=returns(answers.SpokenVersion, error=answers.OllamaError))
async def show_spoken_version(_: Request) -> Response:
    """The release of ollama whose API is spoken here; /version has jaxllm's own."""
    return json_response(answers.SpokenVersion(SPOKEN))


@router.get("/tags", responses=returns(answers.ModelTags, error=answers.OllamaError))
async def list_tags(request: Request) -> Response:
    """The models of this server, loaded or not."""
    state: ServerState = request.app.state.server
    names = state.registry.names_for(tenant_of(request))
    listed = [(await state.offload(described, state.registry.find(name), name))[0] for name in names]
    return json_response(answers.ModelTags(listed))


@router.get("/ps", responses=returns(answers.ModelTags, error=answers.OllamaError))
async def list_loaded(request: Request) -> Response:
    """The models that are loaded now, and until when."""
    state: ServerState = request.app.state.server
    shown = []
    for name in state.registry.names_for(tenant_of(request)):
        model = state.registry.find(name)
        if model.info is None or not model.is_awake or name != model.name:
            continue
        listed, _ = await state.offload(described, model, name)
        listed.size = model.planned_bytes or listed.size
        listed.size_vram = 0 if model.info.platform == "cpu" else listed.size
        left = math.inf if model.pinned else model.last_used + model.keep_alive - time.monotonic()
        listed.expires_at = datetime.now(UTC) + timedelta(seconds=min(left, FOREVER))
        listed.context_length = model.info.max_model_len
        shown.append(listed)
    return json_response(answers.ModelTags(shown))


@router.post("/show", responses=returns(answers.ShownModel, error=answers.OllamaError))
async def show(body: types.NamedModel, request: Request) -> Response:
    """What a model can do, its sizes and its chat template; loads nothing."""
    state: ServerState = request.app.state.server
    name, model = state.registry.called(body.named, tenant_of(request))
    listed, info = await state.offload(described, model, name)
    template, capabilities = await state.offload(_abilities, model)
    recommended = {} if model.info is None else model.info.default_sampling.fields()
    shown = answers.ShownModel(
        license=str(info.get("general.license", "")),
        modelfile=f"FROM {name}\n",
        parameters="\n".join(f"{types.OPTION_OF.get(key, key)} {value}" for key, value in recommended.items()),
        template=template,
        details=listed.details,
        model_info=info,
        capabilities=capabilities,
        modified_at=listed.modified_at,
    )
    return json_response(shown)


@router.post(
    "/pull",
    responses=returns(
        answers.PullProgress, lines=(answers.PullProgress, answers.OllamaError), error=answers.OllamaError
    ),
)
async def pull(body: types.PullRequest, request: Request) -> Response:
    """Fetch the files of a model that this server has but not yet on its disk."""
    check_admin(request, "fetch models")
    state: ServerState = request.app.state.server
    name, model = state.registry.called(body.named, tenant_of(request))
    fetching = asyncio.ensure_future(asyncio.to_thread(_fetch, model.config))
    if body.stream:
        lines = _progress(name, fetching, state.config.sse_keep_alive)
        return EventStream(uuid.uuid4().hex, lines, headers={"Content-Type": answers.LINES})
    try:
        await fetching
    except JaxLLMError as error:
        raise APIError(404, str(error), code="model_not_found") from None
    return json_response(answers.PullProgress("success"))


@router.delete("/delete", responses=returns(answers.Deleted, error=answers.OllamaError))
async def delete(body: types.NamedModel, request: Request) -> Response:
    """Unload a model and remove its downloaded files; the next request for it fetches them again."""
    check_admin(request, "delete models")
    state: ServerState = request.app.state.server
    _, model = state.registry.called(body.named, tenant_of(request))
    try:
        found = await state.offload(find_removable, model.config.model, model.config.download_dir)
    except ModelNotFoundError as error:
        raise APIError(404, str(error), code="model_not_found") from None
    if model.served is not None:
        await state.registry.loader.unload(model)
    await state.offload(remove_local, found)
    _read.cache_clear()
    return json_response(answers.Deleted())


async def refuse(request: Request) -> Response:
    path = request.scope["route"].path
    raise APIError(501, f"{path} is not supported by this server: {REFUSED[path]}", code="not_supported")


for _path in REFUSED:
    router.add_api_route(_path.removeprefix("/api"), refuse, methods=["POST"], include_in_schema=False)


def described(model: LoadableModel, name: str) -> Described:
    """What is known of a model without loading it; next to nothing where its files are not here."""
    info: dict[str, Any] = {}
    listed = answers.ListedModel()
    with suppress(ModelNotFoundError, CheckpointError, OSError):
        listed, info = _read(model.config.model, model.config.download_dir)
    kind, adapter = listed.details.family or "unknown", model.adapters.get(name)
    count, longest = info.get("general.parameter_count"), model.config.max_model_len
    if model.info is not None:
        count, longest = model.info.num_parameters, model.info.max_model_len
    known = {"general.parameter_count": count, f"{kind}.context_length": longest}
    info = {"general.architecture": kind, **info, **{key: value for key, value in known.items() if value}}
    parent = "" if adapter is None else adapter.parent
    details = msgspec.structs.replace(listed.details, parent_model=parent, parameter_size=_in_words(count or 0))
    return msgspec.structs.replace(listed, name=name, model=name, details=details), info


@lru_cache(maxsize=256)
def _read(name: str, download_dir: Path | None) -> Described:
    found = find_local(name, download_dir)
    assert found.path is not None
    info: dict[str, Any]
    written, format = found.path.stat(), "safetensors"
    if (found.path / "config.json").is_file():
        config = read_object(found.path, "config.json")
        inner = config | (config.get("text_config") or {})
        kind = str(inner.get("model_type", ""))
        info = {
            f"{kind}.{key}": inner[named] for key, named in CONFIG_KEYS.items() if isinstance(inner.get(named), int)
        }
        stated = (config.get("quantization_config") or {}).get("quant_method")
        quantization = str(stated or inner.get("dtype") or inner.get("torch_dtype") or "")
    else:
        format, (info, quantization) = "gguf", _of_gguf(the_gguf_file(found.path))
        kind = str(info.get("general.architecture", ""))
    listed = answers.ListedModel(
        modified_at=datetime.fromtimestamp(written.st_mtime, UTC),
        size=found.nbytes,
        digest=hashlib.sha256(f"{found.path}\0{found.nbytes}\0{written.st_mtime_ns}".encode()).hexdigest(),
        details=answers.ModelDetails(
            format=format, family=kind, families=[kind] if kind else [], quantization_level=quantization
        ),
    )
    return listed, info


def _of_gguf(path: Path) -> tuple[dict[str, Any], str]:
    """The metadata, but for lists and the chat template, and the name of the file's type."""
    from gguf import LlamaFileType

    from jaxllm.weights.gguf_file import read_header

    header = read_header(path)
    known = {int(one): one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in LlamaFileType}
    info = {
        key: value
        for key, value in header.metadata.items()
        if isinstance(value, bool | int | float | str) and not key.startswith("tokenizer.chat_template")
    }
    info["general.parameter_count"] = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    return info, known.get(header.metadata.get("general.file_type", -1), "")


def _in_words(count: int) -> str:
    """134_515_008 -> '134.52M', 8_030_261_248 -> '8.0B'."""
    return "" if not count else f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _tokenizer(model: LoadableModel) -> Tokenizer | None:
    """Of a model that is not loaded that of its files, if they are here."""
    if model.served is not None:
        return model.served.engine.tokenizer
    with suppress(ModelNotFoundError, CheckpointError):
        found = find_local(model.config.tokenizer or model.config.model, model.config.download_dir)
        return None if found.path is None else load_tokenizer(found.path)
    return None


def _abilities(model: LoadableModel) -> tuple[str, list[str]]:
    """The chat template, and what requests may ask for."""
    tokenizer, own = _tokenizer(model), read_chat_template(model.config)
    template = own or (tokenizer and tokenizer.chat_template) or ""
    if model.info is not None and model.info.tasks.why_no_text is not None:
        return template, ["embedding"]
    formats = detect_formats(template, model.config.tool_call_parser, model.config.reasoning_parser)
    has = {
        "tools": bool(template) and formats.tools is not None,
        "insert": tokenizer is not None and fim_marks(tokenizer) is not None,
        "thinking": formats.reasoning is not None,
        "vision": model.info is not None and model.info.most_image_rows > 0,
    }
    return template, ["completion", *(name for name, there in has.items() if there)]


def _fetch(config: ModelConfig) -> None:
    resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    _read.cache_clear()


async def _progress(name: str, fetching: asyncio.Future[None], silence: float) -> AsyncIterator[list[bytes]]:
    """What is being done, again after each silence, until it is done."""
    yield [answers.line(answers.PullProgress("pulling manifest"))]
    while not (await asyncio.wait({fetching}, timeout=silence))[0]:
        yield [answers.line(answers.PullProgress(f"pulling {name}"))]
    error = fetching.exception()
    if isinstance(error, JaxLLMError):
        yield [answers.line(answers.OllamaError(str(error)))]
    elif error is not None:
        raise error
    else:
        yield [answers.line(answers.PullProgress("success"))]
