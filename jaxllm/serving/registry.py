"""The models of one server, by the names that requests ask for, and their states as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from fastapi import Query
from msgspec import UNSET, UnsetType

from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.serving.access.keys import OTHERS, Tenant
from jaxllm.serving.access.limits import refused
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.loadable import LoadableModel, ModelState
from jaxllm.serving.model_loader import ModelLoader
from jaxllm.serving.served_model import ServedModel
from jaxllm.wording import did_you_mean

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM

RELEASE_SECONDS = 5.0
"""How long requests that were cancelled when the server stopped may take to give their models back."""
MAX_NAMES_SHOWN = 20
MAX_NEAR = 3
"""Names like an unknown one that are told."""
MAX_COMPARED = 200
"""Characters of an unknown name that is compared with those of models: a stranger's may have megabytes."""

ModelName = Annotated[str | None, Query(description="A name that /v1/models lists; by default the first.")]
"""The query parameter of routes whose request has no body."""

_encode = msgspec.json.Encoder().encode


class Registry:
    """Every model of a server. Iterating gives each once, the default first.

    With `any_name` the default model also answers requests for names that no model has. At most `max_loaded` models
    are loaded at a time, which take at most `memory` bytes; by default all that there are. For `min_seconds` see
    ModelLoader.

    Raises ConfigError when two models have a name in common, or there is none.
    """

    def __init__(
        self,
        models: Iterable[LoadableModel],
        *,
        any_name: bool = False,
        max_loaded: int | None = None,
        memory: int | None = None,
        min_seconds: float = 0.0,
    ):
        self._by_name: dict[str, LoadableModel] = {}
        self._any_name = any_name
        for model in models:
            for name in model.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise ConfigError(f"served_model_name is {name!r} for two models; each needs names of its own")
        owners = dict(self._by_name)
        for model in dict.fromkeys(self._by_name.values()):
            for adapter in model.adapters:
                if owners.setdefault(adapter.name, model) is not model or adapter.name in self._by_name:
                    raise ConfigError(
                        f"lora_modules has the name {adapter.name!r}, which another model or adapter has already"
                    )
        if not self._by_name:
            raise ConfigError("model is missing: a server needs at least one")
        self.loader = ModelLoader(list(self), max_loaded, memory, min_seconds)
        self.draining = False
        """Whether the server is stopping."""
        self.changes = Changes()
        """Of the models, and of `draining`."""
        for model in self:
            model.on_change = self.changes.ring

    def __iter__(self) -> Iterator[LoadableModel]:
        return iter(dict.fromkeys(self._by_name.values()))

    @property
    def names(self) -> list[str]:
        """All names that are listed: of models, those of the default one first, and then of their adapters."""
        shown = [model for model in self if not model.hidden]
        names = [name for name, model in self._by_name.items() if not model.hidden]
        return names + [adapter.name for model in shown for adapter in model.adapters]

    def names_for(self, tenant: Tenant) -> list[str]:
        """Those of them that a tenant may use."""
        named = ((name, self._named(name)) for name in self.names)
        return [name for name, model in named if model is not None and self._may_use(tenant, model, name)]

    def _may_use(self, tenant: Tenant, model: LoadableModel, name: str) -> bool:
        """Who may use a model may use its adapters; others may where they are given an adapter's own name."""
        return tenant.may_use([*model.names, name] if model.adapters.get(name) else model.names)

    def default_name_for(self, tenant: Tenant) -> str | None:
        """What a request asks for that names no model: the default one, or the first that its tenant may use."""
        first = (name for name, model in self._by_name.items() if tenant.may_use(model.names))
        return next(first, None)

    @property
    def default_name(self) -> str:
        """What a request asks for that names no model."""
        return next(iter(self._by_name))

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that are loaded now."""
        return [model.served for model in self if model.served is not None]

    def serves(self, name: str) -> bool:
        """Whether requests for a model of this name are answered."""
        return self._any_name or self.has_name(name)

    def has_name(self, name: str) -> bool:
        """Whether a model, or an adapter of one, has this name."""
        return self._named(name) is not None

    def _named(self, name: str) -> LoadableModel | None:
        """The model that has this name, or an adapter of it."""
        return self._by_name.get(name) or next((model for model in self if model.adapters.get(name)), None)

    def find(self, name: str | None, tenant: Tenant = OTHERS) -> LoadableModel:
        """The model of that name, or of that adapter, or the default one, for whoever only looks at it: it is neither
        held nor loaded. Raises as `called`.
        """
        return self.called(name, tenant)[1]

    def called(self, name: str | None, tenant: Tenant = OTHERS) -> tuple[str, LoadableModel]:
        """The same, after the name that it is asked for by: its own where the request names none.

        Raises 404 for an unknown name, which is also one that the tenant may not use.
        """
        name = self.default_name_for(tenant) if name is None else name
        if name is not None and self.serves(name):
            model = self._named(name) or self._by_name[self.default_name]
            if self._may_use(tenant, model, name):
                return name, model
        raise _unknown(name, self.names_for(tenant))

    def find_loaded(self, name: str | None, tenant: Tenant = OTHERS) -> ServedModel:
        """The same, for who needs its tokenizer or its template. Raises 503 where the model is not loaded now."""
        model = self.find(name, tenant)
        if model.served is None:
            message = f"model {model.name!r} is {model.state}; a request for it, or POST /models/load, loads it"
            raise unavailable(message, code="model_not_loaded")
        return model.served

    def check_concurrency(self, tenant: Tenant) -> None:
        """Raises 429 where a tenant holds models with more requests than it may have under way."""
        most = tenant.max_concurrency
        if most is not None and sum(call.tenant.name == tenant.name for m in self for call in m.calls) > most:
            raise refused(f"this API key may have {most} requests under way at once", 1.0)

    def drain(self) -> None:
        """From now on no model is loaded, and no request begins."""
        self.draining = True
        self.changes.ring()
        self.loader.drain()
        for model in self.loaded:
            model.draining = True

    def dead(self) -> list[LoadableModel]:
        """The loaded models whose engines have stopped."""
        return [model for model in self if model.is_dead]

    def check_alive(self) -> None:
        """Raises EngineDeadError when the engines of all models have stopped; an unloaded model has none to stop."""
        if all(model.is_dead for model in self):
            names = ", ".join(model.name for model in self)
            raise EngineDeadError(f"the engine has stopped; no request to {names} can be answered")

    async def check_released(self) -> None:
        """Asserts that no request holds a model any more, once no request can begin."""
        deadline = asyncio.get_running_loop().time() + RELEASE_SECONDS
        while any(model.calls for model in self) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        held = {model.name: len(model.calls) for model in self if model.calls}
        assert not held, f"calls that were never ended, by model: {held}"


def single_model(config: ServeConfig, engine: AsyncLLM) -> Registry:
    """The registry of a server that was started with one model. Raises ConfigError, see ServedModel."""
    model = LoadableModel.loaded(ServedModel(config.of_model, engine))
    return Registry([model], any_name=config.serve_any_model_name)


class Changes:
    """Rings the bells of all who watch; any thread, and a signal handler, may ring."""

    def __init__(self) -> None:
        self._bells: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def ring(self) -> None:
        """Something has changed."""
        for bell, loop in list(self._bells.items()):
            with suppress(RuntimeError):  # the loop was closed, and who watched there is gone
                loop.call_soon_threadsafe(bell.set)

    @contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """A bell on the running event loop that is set at each change."""
        bell = asyncio.Event()
        self._bells[bell] = asyncio.get_running_loop()
        try:
            yield bell
        finally:
            del self._bells[bell]


class LoadProgress(msgspec.Struct, kw_only=True):
    stages: list[str]
    """What is known of what a load does: what it does now."""
    current: str
    """The same, in words."""
    value: float
    """How much of that is done, from 0 to 1; 0 where nothing is counted."""


class LoadedInfo(msgspec.Struct, kw_only=True):
    """What a model was found to be."""

    max_model_len: int
    has_chat_template: bool | None
    num_parameters: int


class ModelEventData(msgspec.Struct, kw_only=True):
    status: ModelState
    progress: LoadProgress | UnsetType = UNSET
    """While it loads."""
    info: LoadedInfo | UnsetType = UNSET
    """Once it is loaded."""
    error: str | UnsetType = UNSET
    """Why it could not be loaded."""


class ModelEvent(msgspec.Struct, kw_only=True):
    model: str
    """A name that /v1/models lists."""
    event: Literal["model_status"] = "model_status"
    data: ModelEventData


async def model_events(registry: Registry, tenant: Tenant, silence: float) -> AsyncIterator[list[bytes]]:
    """The state of every listed model that the tenant may use, and from then on each change, until the server stops.

    Changes that come faster than they are read are told together. An empty list stands for `silence` seconds without.
    """
    told: dict[str, ModelEventData] = {}
    with registry.changes.watched() as bell:
        while not registry.draining:
            bell.clear()
            now = {name: _data(registry.find(name)) for name in registry.names_for(tenant)}
            news = [ModelEvent(model=name, data=data) for name, data in now.items() if told.get(name) != data]
            told = now
            if news:
                yield [b"data: " + _encode(event) + b"\n\n" for event in news]
            with suppress(TimeoutError):
                await asyncio.wait_for(bell.wait(), silence)
                continue
            yield []


def _unknown(name: str | None, names: list[str]) -> APIError:
    """`names` are those that the caller may know."""
    if name is None:
        return APIError(404, "this API key may use no model of this server", param="model", code="model_not_found")
    near = did_you_mean(name, names, MAX_NEAR).removesuffix("?") if len(name) <= MAX_COMPARED else ""
    shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", …" if len(names) > MAX_NAMES_SHOWN else "")
    message = f"model {name!r} is not served here{near}; this server has {shown}"
    return APIError(404, message, param="model", code="model_not_found")


def _data(model: LoadableModel) -> ModelEventData:
    data, stage = ModelEventData(status=model.state), model.stage
    if data.status == "loading" and stage is not None:
        done = stage.done / stage.total if stage.total else 0.0
        data.progress = LoadProgress(stages=[stage.doing], current=stage.doing, value=done)
    elif data.status == "loaded" and model.info is not None:
        data.info = LoadedInfo(
            max_model_len=model.info.max_model_len,
            has_chat_template=model.has_chat_template,
            num_parameters=model.info.num_parameters,
        )
    elif data.status == "failed" and model.error is not None:
        data.error = model.error
    return data
