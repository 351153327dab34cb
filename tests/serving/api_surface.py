"""What the server's API consists of, read off the application: its routes, and every field that a request may have."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from jaxllm.config import ModelConfig, ServeConfig
from jaxllm.mcp.servers import ToolServers
from jaxllm.mcp.tools import ServerTool, ToolResult
from jaxllm.requests.outputs import ModelTasks
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.ollama.routes import REFUSED
from jaxllm.serving.served_model import LoadableModel
from tests.serving.fake_engine import NEW_WEIGHTS, FakeEngine, app_of

INERT = "Accepted, without effect"
"""How the docstring of a field begins that is accepted only because OpenAI or Anthropic document it as inert."""

NOT_API = {
    "/", "/openapi.json", "/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/slots/{id_slot}", *REFUSED,
}  # fmt: skip
"""Pages, and what is always refused."""
STREAMS = {"text/event-stream", "application/x-ndjson"}
"""What streams are made of: events, and lines of JSON."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    """With /v1, where the same route answers without it too."""
    summary: str
    streams: bool
    models: tuple[type[RequestModel], ...]
    """Of its body: none or one."""
    parameters: dict[str, dict[str, Any]] = field(compare=False)
    """Name -> JSON schema of what goes into its address or form."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Section:
    """Fields declared together: by one class, or as the parameters of one route."""

    title: str
    intro: str
    routes: list[Route]
    parents: list[str]
    """`Class.field` of the objects that this one is part of; none for bodies."""
    fields: dict[str, dict[str, Any]]
    """Name -> JSON schema, with the description and `required`."""
    refused: list[str]

    @property
    def of_body(self) -> bool:
        """Whether the fields are those of a request's body itself."""
        return not self.parents and not self.routes[0].parameters


class EveryOfThem(ModelTasks):
    """Classifies and writes, which no real model does, so that every route has an answer."""

    why_no_text = None  # type: ignore[assignment]


CLASSIFIER = EveryOfThem(labels=("good",), activation="sigmoid")

HELLO = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 4}
RANKING = {"query": "a", "documents": ["b", "c"]}
ITEM = {"role": "user", "content": "Hi"}
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}

TWO = [{"value": "a"}, {"value": "b"}]

BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/v1/chat/completions/input_tokens": CHAT,
    "/v1/chat/completions/control": {"id": "chatcmpl-1", "action": "reasoning_end"},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/completion": {"prompt": "Hi", "n_predict": 4},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4},
    "/embedding": {"content": "Hi"},
    "/v1/tokenize": {"prompt": "Hi"},
    "/v1/detokenize": {"tokens": [72, 105]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/conversations": {"items": [ITEM], "metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}": {"metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}/items": {"items": [ITEM]},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/pooling": {"input": "Hi"},
    "/v1/apply-template": {"messages": HELLO},
    "/v1/invocations": CHAT,
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/v1/rerank": RANKING,
    "/v2/rerank": RANKING,
    "/v2/embed": {"texts": ["Paris"]},
    "/v1/classify": {"input": "Hi"},
    "/v1/decisions": {"input": "Hi", "questions": [{"type": "choice", "instructions": "?", "choices": TWO}]},
    "/v1/systemone": {"state": "Hi", "questions": {"a": {"type": "score", "criteria": ["low", "high"]}}},
    "/v1/models/load": {"model": "fake"},
    "/v1/models/unload": {"model": "other"},
    "/v1/load_lora_adapter": {"lora_name": "new", "lora_path": "."},
    "/v1/unload_lora_adapter": {"lora_name": "old"},
    "/v1/update_weights": {"model_path": NEW_WEIGHTS},
    "/v1/lora-adapters": [{"id": 0, "scale": 1.0}],
    "/v1/mcp/tools/{name}": {"arguments": {"a": 1}},
    "/v1/files": {"file": (json.dumps(LINE) + "\n").encode(), "purpose": "batch"},
    "/v1/files/text": {"file": b"a text"},
    "/v1/batches": {"endpoint": LINE["url"], "completion_window": "24h"},
    "/api/chat": {"model": "fake", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "Hi", "stream": False},
    "/api/embed": {"model": "fake", "input": "Hi"},
    "/api/embeddings": {"model": "fake", "prompt": "Hi"},
    "/api/show": {"model": "fake"},
    "/api/pull": {"model": "fake"},
}
"""What each POST route answers with 200; batches need the id of a file too."""


class EveryTask(FakeEngine):
    """Has an answer on every route."""

    def __init__(self) -> None:
        super().__init__(tasks=CLASSIFIER)
        assert self.tokenizer is not None
        self.tokenizer.backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])


class OneTool(ToolServers):
    """A tool server's only tool, which no process is needed for."""

    def tools(self) -> list[ServerTool]:
        return [ServerTool("a", "tool", "a_tool", "Does nothing.", {"type": "object"})]

    async def call(self, tool: ServerTool, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult("done")


def make_app(data_dir: Path, engine: FakeEngine | None = None) -> FastAPI:
    """A server that can do everything: the model has a class for /classify, and the engine writes text all the same.

    Another model, which is not loaded, is there to be loaded and unloaded.

    The page is no part of the API.
    """
    engine = engine or EveryTask()
    modules = [{"name": "kept", "path": "."}, {"name": "old", "path": "."}]
    config = ServeConfig(
        model="fake", data_dir=data_dir, mcp_inject=False, web=False, enable_lora=True, lora_modules=modules
    )
    other = LoadableModel(ModelConfig(model="other"), lambda config, given_up, room: FakeEngine())
    app = app_of(config, engine, unloaded=[other])
    app.state.server.tool_servers = OneTool()
    return app


def addresses(app: FastAPI) -> dict[tuple[str, str], Any]:
    """(method, path) of everything that answers, described or not, and the function that does."""
    return {
        (method, context.path_format): context.endpoint
        for context in iter_route_contexts(app.routes)
        for method in context.methods - {"HEAD"}
        if context.path_format not in NOT_API
    }


@cache
def described_app() -> FastAPI:
    """An application that is read and never run; its OpenAPI document takes half a second to make."""
    return make_app(Path("unused"))


@cache
def routes() -> list[Route]:
    app = described_app()
    document = app.openapi()
    found = []
    for context in iter_route_contexts(app.routes):
        if not context.include_in_schema:
            continue
        for method in context.methods:
            operation = document["paths"][context.path_format][method.lower()]
            found.append(
                Route(
                    method=method,
                    path=context.path_format,
                    summary=inspect.getdoc(context.endpoint) or "",
                    streams=not STREAMS.isdisjoint(operation["responses"]["200"]["content"]),
                    models=tuple(models_in(get_type_hints(context.endpoint).values())),
                    parameters=_parameters(operation, document),
                )
            )
    return found


@cache
def sections() -> list[Section]:
    """Every field once, where it is declared: each body's own, then those it inherits, then those of its parts."""
    shown = [section for section in _declared().values() if section.fields or section.refused]
    return shown + [
        Section(str(route), "", [route], [], route.parameters, []) for route in routes() if route.parameters
    ]


def models() -> list[type[RequestModel]]:
    """Every class that declares fields of requests."""
    return list(_declared())


@cache
def _declared() -> dict[type[RequestModel], Section]:
    found: dict[type[RequestModel], Section] = {}
    for route in routes():
        for model in route.models:
            _collect(model, route, None, found)
    return found


def models_in(annotations: Any) -> Iterator[type[RequestModel]]:
    """The request models in type annotations, unions and lists included."""
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, RequestModel):
            yield annotation
        yield from models_in(get_args(annotation))


def _collect(
    model: type[RequestModel], route: Route, parent: str | None, found: dict[type[RequestModel], Section]
) -> None:
    owners = {name: _owner(model, name) for name in model.model_fields}
    for owner in (base for base in model.__mro__ if base in {model, *owners.values()}):
        if owner not in found:
            found[owner] = _section(owner)
        section = found[owner]
        if route not in section.routes:
            section.routes.append(route)
        if parent is not None and parent not in section.parents:
            section.parents.append(parent)
    for name, owner in owners.items():
        for part in models_in([model.model_fields[name].annotation]):
            _collect(part, route, f"{owner.__name__}.{name}", found)


def _owner(model: type[RequestModel], name: str) -> type[RequestModel]:
    return next(base for base in model.__mro__ if name in inspect.get_annotations(base))


def _section(owner: type[RequestModel]) -> Section:
    schema = owner.model_json_schema(ref_template="{model}")
    own = {info.alias or name for name, info in owner.model_fields.items() if _owner(owner, name) is owner}
    fields = {
        name: value | {"required": name in schema.get("required", ())}
        for name, value in schema["properties"].items()
        if name in own and not (name == "type" and "const" in value)
    }
    kind = schema["properties"].get("type", {}).get("const")
    intro = [inspect.cleandoc(owner.__dict__.get("__doc__") or ""), f'`type` is `"{kind}"`.' if kind else ""]
    refused = sorted(owner.__dict__.get("unsupported", ()))
    return Section(owner.__name__, " ".join(part for part in intro if part), [], [], fields, refused)


def _parameters(operation: dict[str, Any], document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {
        parameter["name"]: parameter["schema"]
        | {"description": parameter.get("description", ""), "required": parameter["required"]}
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "query"
    }
    form = operation.get("requestBody", {}).get("content", {}).get("multipart/form-data")
    if form is not None:
        schema = document["components"]["schemas"][form["schema"]["$ref"].rsplit("/", 1)[1]]
        for name, value in schema["properties"].items():
            found[name] = value | {"required": name in schema["required"]}
    return found
