"""/api/tags, /api/show, /api/ps, /api/pull, /api/delete and /api/version: the models that a server has."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxllm.chat.formats import detect_formats
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
from jaxllm.weights.folder import read_object, the_gguf_file
from jaxllm.weights.source import find_local, find_removable, remove_local, resolve_model

router = APIRouter(prefix="/api", route_class=OllamaRoute, tags=["ollama"])

SPOKEN = "0.18.3"
"""The release of ollama whose API this is; clients refuse older ones than they know."""
FOREVER = 100 * 365 * 86400.0
"""Seconds that a model is said to stay which is not unloaded."""
EPOCH = datetime.fromtimestamp(0, UTC)
REFUSED = {
    "/api/blobs/{digest}": "files are put where --models or --model-directory finds them",
    "/api/copy": "other names of a model are its aliases in the models file",
    "/api/create": "a Modelfile becomes an entry of the models file, see docs/coming-from.md",
    "/api/push": "it publishes no models",
}
"""Routes of ollama's that are not there, and why."""


@dataclass(frozen=True)
class Files:
    """What the files of a model say of it; empty where they are not on this machine."""

    nbytes: int = 0
    modified: datetime = EPOCH
    digest: str = ""
    format: str = ""
    architecture: str = ""
    quantization: str = ""
    num_parameters: int = 0
    license: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """Under ollama's names, which are those of GGUF's metadata."""


@router.get("/version", responses=returns(answers.SpokenVersion, error=answers.OllamaError))
async def show_spoken_version(_: Request) -> Response:
    """The release of ollama whose API is spoken here; /version has jaxllm's own."""
    return json_response(answers.SpokenVersion(SPOKEN))


@router.get("/tags", responses=returns(answers.TagList, error=answers.OllamaError))
async def list_tags(request: Request) -> Response:
    """The models of this server, loaded or not."""
    state: ServerState = request.app.state.server
    listed = []
    for name in state.registry.names_for(tenant_of(request)):
        model = state.registry.find(name)
        files = await state.offload(files_of, model.config)
        listed.append(
            answers.ListedModel(
                name=name, model=name, modified_at=files.modified, size=files.nbytes, digest=files.digest,
                details=_details(name, model, files),
            )
        )  # fmt: skip
    return json_response(answers.TagList(listed))


@router.get("/ps", responses=returns(answers.LoadedList, error=answers.OllamaError))
async def list_loaded(request: Request) -> Response:
    """The models that are loaded now, and until when."""
    state: ServerState = request.app.state.server
    shown = []
    for name in state.registry.names_for(tenant_of(request)):
        model = state.registry.find(name)
        if model.info is None or not model.is_awake or name != model.name:
            continue
        files = await state.offload(files_of, model.config)
        left = math.inf if model.pinned else model.last_used + model.keep_alive - time.monotonic()
        size = model.planned_bytes or files.nbytes
        shown.append(
            answers.LoadedModel(
                name=name,
                model=name,
                size=size,
                digest=files.digest,
                details=_details(name, model, files),
                expires_at=answers.now() + timedelta(seconds=min(left, FOREVER)),
                size_vram=0 if model.info.platform == "cpu" else size,
                context_length=model.info.max_model_len,
            )
        )
    return json_response(answers.LoadedList(shown))


@router.post("/show", responses=returns(answers.ShownModel, error=answers.OllamaError))
async def show(body: types.ShowRequest, request: Request) -> Response:
    """What a model can do, its sizes and its chat template; loads nothing."""
    state: ServerState = request.app.state.server
    name, model = state.registry.called(body.named, tenant_of(request))
    files = await state.offload(files_of, model.config)
    template = await state.offload(_template, model)
    recommended = {} if model.info is None else model.info.default_sampling.fields()
    shown = answers.ShownModel(
        license=files.license,
        modelfile=f"FROM {name}\n",
        parameters="\n".join(f"{types.OPTION_OF.get(key, key)} {value}" for key, value in recommended.items()),
        template=template,
        details=_details(name, model, files),
        model_info=_info(model, files),
        capabilities=_capabilities(model, template),
        modified_at=files.modified,
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
        raise _not_fetched(error) from None
    return json_response(answers.PullProgress(status="success"))


@router.delete("/delete", responses=returns(answers.Emptied, error=answers.OllamaError))
async def delete(body: types.DeleteRequest, request: Request) -> Response:
    """Unload a model and remove its downloaded files; the next request for it fetches them again."""
    check_admin(request, "delete models")
    state: ServerState = request.app.state.server
    _, model = state.registry.called(body.named, tenant_of(request))
    try:
        found = await state.offload(find_removable, model.config.model, model.config.download_dir)
        if model.served is not None:
            await state.registry.loader.unload(model)
        await state.offload(remove_local, found)
    except ModelNotFoundError as error:
        raise APIError(404, str(error), param="model", code="model_not_removable") from None
    _read.cache_clear()
    return json_response(answers.Emptied())


async def refuse(request: Request) -> Response:
    """A route of ollama's that is not here."""
    path = request.scope["route"].path
    raise APIError(501, f"{path} is not supported by this server: {REFUSED[path]}", code="not_supported")


for _path in REFUSED:
    router.add_api_route(_path.removeprefix("/api"), refuse, methods=["POST"], include_in_schema=False)


def files_of(config: ModelConfig) -> Files:
    """What is known of a model without loading it."""
    with suppress(ModelNotFoundError, CheckpointError, OSError):
        return _read(config.model, config.download_dir)
    return Files()


@lru_cache(maxsize=256)
def _read(name: str, download_dir: Path | None) -> Files:
    found = find_local(name, download_dir)
    assert found.path is not None
    written = found.path.stat()
    digest = hashlib.sha256(f"{found.path}\0{found.nbytes}\0{written.st_mtime_ns}".encode()).hexdigest()
    known = {"nbytes": found.nbytes, "modified": datetime.fromtimestamp(written.st_mtime, UTC), "digest": digest}
    if (found.path / "config.json").is_file():
        return Files(**known, **_of_config(read_object(found.path, "config.json")))
    if found.path.is_dir() and not any(found.path.glob("*.gguf")):
        return Files(**known, format="orbax")
    return Files(**known, **_of_gguf(the_gguf_file(found.path)))


def _of_config(config: dict[str, Any]) -> dict[str, Any]:
    inner = config | (config.get("text_config") or {})
    kind = str(inner.get("model_type", ""))
    names = {
        "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }  # fmt: skip
    info = {f"{kind}.{name}": inner[key] for name, key in names.items() if isinstance(inner.get(key), int)}
    stated = (config.get("quantization_config") or {}).get("quant_method")
    return {
        "format": "safetensors",
        "architecture": kind,
        "quantization": str(stated or inner.get("dtype") or inner.get("torch_dtype") or ""),
        "info": {"general.architecture": kind, **info},
    }


def _of_gguf(path: Path) -> dict[str, Any]:
    from gguf import LlamaFileType

    from jaxllm.weights.gguf_file import read_header

    header = read_header(path)
    metadata, kind = header.metadata, header.metadata.get("general.file_type")
    known = {int(one): one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in LlamaFileType}
    shown = {
        key: value
        for key, value in metadata.items()
        if isinstance(value, bool | int | float | str) and not key.startswith("tokenizer.chat_template")
    }
    return {
        "format": "gguf",
        "architecture": str(metadata.get("general.architecture", "")),
        "quantization": known.get(kind, "") if isinstance(kind, int) else "",
        "num_parameters": sum(math.prod(tensor.shape) for tensor in header.tensors.values()),
        "license": str(metadata.get("general.license", "")),
        "info": shown,
    }


def _details(name: str, model: LoadableModel, files: Files) -> answers.ModelDetails:
    adapter = model.adapters.get(name)
    count = files.num_parameters if model.info is None else model.info.num_parameters
    return answers.ModelDetails(
        parent_model="" if adapter is None else adapter.parent,
        format=files.format,
        family=files.architecture,
        families=[files.architecture] if files.architecture else [],
        parameter_size=_in_words(count),
        quantization_level=files.quantization,
    )


def _in_words(count: int) -> str:
    """134_515_008 -> '134.52M', 8_030_261_248 -> '8.0B'."""
    return "" if not count else f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _info(model: LoadableModel, files: Files) -> dict[str, Any]:
    """What the files say, with the context that a request has here."""
    kind = files.architecture or "unknown"
    asked = model.config.max_model_len
    longest = asked if model.info is None else model.info.max_model_len
    found = {"general.architecture": kind, **files.info}
    if isinstance(longest, int):
        found[f"{kind}.context_length"] = longest
    if count := files.num_parameters if model.info is None else model.info.num_parameters:
        found["general.parameter_count"] = count
    return found


def _template(model: LoadableModel) -> str:
    """The chat template, of a model that is not loaded out of its files; an empty one where it has none."""
    if (own := read_chat_template(model.config)) is not None:
        return own
    if model.served is not None:
        tokenizer = model.served.engine.tokenizer
        return (None if tokenizer is None else tokenizer.chat_template) or ""
    from jaxllm.text.tokenizer import load_tokenizer

    with suppress(ModelNotFoundError, CheckpointError):
        found = find_local(model.config.tokenizer or model.config.model, model.config.download_dir)
        return "" if found.path is None else load_tokenizer(found.path).chat_template or ""
    return ""


def _capabilities(model: LoadableModel, template: str) -> list[Any]:
    if model.info is not None and model.info.tasks.why_no_text is not None:
        return ["embedding"]
    formats = detect_formats(template, model.config.tool_call_parser, model.config.reasoning_parser)
    has = {
        "completion": True,
        "tools": bool(template) and formats.tools is not None,
        "thinking": formats.reasoning is not None,
    }
    return [name for name, there in has.items() if there]


def _fetch(config: ModelConfig) -> None:
    resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    _read.cache_clear()


def _not_fetched(error: JaxLLMError) -> APIError:
    return APIError(404, str(error), code="model_not_found")


async def _progress(name: str, fetching: asyncio.Future[None], silence: float) -> AsyncIterator[list[bytes]]:
    """What is being done, again after each silence, until it is done."""
    yield [answers.line(answers.PullProgress(status="pulling manifest"))]
    while not (await asyncio.wait({fetching}, timeout=silence))[0]:
        yield [answers.line(answers.PullProgress(status=f"pulling {name}"))]
    error = fetching.exception()
    if isinstance(error, JaxLLMError):
        yield [answers.line(answers.OllamaError(str(error)))]
    elif error is not None:
        raise error
    else:
        yield [answers.line(answers.PullProgress(status=status)) for status in (f"pulling {name}", "success")]
