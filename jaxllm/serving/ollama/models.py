"""/api/tags, /api/show, /api/ps, /api/pull, /api/delete and /api/version: the models that a server has."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from jaxllm.chat.formats import detect_formats
from jaxllm.chat.infill import fim_marks
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, JaxLLMError, ModelNotFoundError
from jaxllm.serving.access.keys import check_admin, tenant_of
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import EventStream
from jaxllm.serving.ollama import answers, types
from jaxllm.serving.ollama.routes import OllamaRoute
from jaxllm.serving.served_model import LoadableModel, read_chat_template
from jaxllm.serving.state import ServerState
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.weights.folder import read_object, the_gguf_file
from jaxllm.weights.source import find_local, find_removable, remove_local, resolve_model

router = APIRouter(prefix="/api", route_class=OllamaRoute, tags=["ollama"])

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
    details = replace(listed.details, parent_model=parent, parameter_size=_in_words(count or 0))
    return replace(listed, name=name, model=name, details=details), info


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
