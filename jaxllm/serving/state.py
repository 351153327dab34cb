"""The state that every route of a server shares: its models by their names, keys, limits, and threads for work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Annotated, Literal, ParamSpec, TypeVar

import msgspec
from fastapi import Query
from msgspec import UNSET, UnsetType

from jaxllm.chat.conversation import Conversation
from jaxllm.config.server import ServerConfig
from jaxllm.config.values import matches
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.machine import cores
from jaxllm.mcp.servers import ToolServers
from jaxllm.mcp.settings import find_settings
from jaxllm.requests.structured_outputs import MAX_PROCESSES, end_compiling
from jaxllm.serving.access.keys import OTHERS, Keys, RateLimits, Tenant, refused
from jaxllm.serving.access.usage import Ledger
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.json_body import BodyMemory, BodyProcess
from jaxllm.serving.media import Media
from jaxllm.serving.model_loader import ModelLoader
from jaxllm.serving.request_log import AuditLog
from jaxllm.serving.served_model import LoadableModel, ModelState, Running, ServedModel, shutting_down
from jaxllm.wording import did_you_mean, shown

logger = logging.getLogger(__name__)

GRAMMAR_THREADS = 2 * MAX_PROCESSES  # more than compile at once, so that compiled grammars pass the others
IMAGE_THREADS = 2  # for requests with images, which take a tenth of a second and more to decode
TEMPLATE_THREADS = 4  # for requests with templates of their own, which may take seconds to render
RELEASE_SECONDS = 5.0  # for requests that were cancelled at the server's end to give their models back
ONLY_MODELS = "claude-*"
"""Claude Code asks for a large model and a small one; where there is one, it is both."""
MAX_NAMES_SHOWN = 20
MAX_NEAR = 3
LATEST = ":latest"  # ollama's tag of a name without one
MAX_COMPARED = 200  # characters of an unknown name that is compared with others: it may have megabytes

ModelName = Annotated[str | None, Query(description="A name that /v1/models lists; by default the first.")]
"""The query parameter of routes whose request has no body."""

_encode = msgspec.json.Encoder().encode

P = ParamSpec("P")
R = TypeVar("R")


class ServerState:
    """What outlives a request. Raises ConfigError when a file or a store that the settings name cannot be used."""

    def __init__(self, config: ServerConfig, registry: Registry):
        self.config = config
        self.registry = registry
        self.leaving = False
        """True if the server is to stop soon: it answers, and asks to be sent nothing more."""
        self.keys = Keys(config, [name for model in registry for name in model.names])
        self.limits = RateLimits(config.rate_limit_store)
        self.usage = Ledger()
        self.audit = None if config.audit_log is None else AuditLog(config.audit_log)
        self.bodies = BodyProcess(config.max_body_size)
        self.body_memory = BodyMemory(max(config.max_body_memory, config.max_body_size))
        self.tool_servers = ToolServers(find_settings(config.mcp_config)[1], result_limit=config.mcp_result_limit)
        """Begun and ended with the application."""
        self.media = Media(config)
        self.created = int(time.time())
        self._workers = ThreadPoolExecutor(min(4, cores().usable), thread_name_prefix="jaxllm-tokenize")
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-bodies")
        self._grammar_workers = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="jaxllm-grammar")
        self._image_workers = ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="jaxllm-images")
        self._template_workers = ThreadPoolExecutor(TEMPLATE_THREADS, thread_name_prefix="jaxllm-templates")

    @property
    def running(self) -> set[Running]:
        return {request for model in self.registry.loaded for request in model.running}

    @property
    def is_ready(self) -> bool:
        """True if requests to the models loaded at the start wait for no compile."""
        awaited = [model.served for model in self.registry if model.awaited and model.served is not None]
        return all(model.engine.is_dead or model.engine.stats().ready for model in awaited)

    def check_accepting(self) -> None:
        """Raises 503 when no new request can start, whatever model it asks for."""
        self.registry.check_alive()
        if self.registry.draining:
            raise shutting_down()

    def drain(self) -> None:
        """From now on no request begins."""
        self.leaving = True
        self.registry.drain()

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run tokenizer or template work on a thread, so that no stream waits for it."""
        return await self.run_in(self._workers, lambda: function(*args, **kwargs))

    async def offload_grammar(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for work that may compile a grammar, which takes seconds: only others like it wait for that."""
        return await self.run_in(self._grammar_workers, lambda: function(*args, **kwargs))

    def workers_for(self, conversation: Conversation) -> ThreadPoolExecutor:
        """The threads in which it is rendered: only others like it wait for it."""
        if conversation.pictures:
            return self._image_workers
        if conversation.rendering.chat_template is not None:
            return self._template_workers
        constrained = conversation.tools or conversation.structured_outputs is not None
        return self._grammar_workers if constrained else self._workers

    async def read_large(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for what reads a large body, one at a time."""
        context = copy_context()
        return await self.run_in(self._readers, lambda: context.run(function, *args, **kwargs))

    async def run_in(self, workers: ThreadPoolExecutor, function: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(workers, function)

    async def reload(self) -> None:
        """Read the files of keys and of tool servers, and open the audit log again; a wrong file is only logged."""
        self.keys.reload()
        if self.audit is not None:
            self.audit.reopen()
        try:
            path, settings = await self.offload(find_settings, self.config.mcp_config)
        except ConfigError as error:
            logger.error("the tool servers stay as they are: %s", error)
            return
        logger.info("tool servers from %s: %s", path, ", ".join(one.label for one in settings) or "none")
        await self.tool_servers.reload(settings)

    async def close(self) -> None:
        await self.tool_servers.close()
        self.bodies.close()
        for workers in (self._workers, self._readers, self._grammar_workers, self._template_workers):
            workers.shutdown(wait=False, cancel_futures=True)
        if self.audit is not None:
            await asyncio.to_thread(self.audit.close)
        end_compiling()  # what runs on them now; the program's end would wait for it


class Registry:
    """Every model of a server. Iterating gives each once, the default first.

    A name that no model has may match the pattern of one; a server's only model has ONLY_MODELS too. With `any_name`
    the default model also answers requests for all other names. At most `max_loaded` models are loaded at a time,
    which take at most `memory` bytes; by default all. For `min_seconds` see ModelLoader. `look` gives the models that
    are in a folder at this moment: each time that names are listed, or an unknown one is asked for, they are compared.

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
        look: Callable[[], list[LoadableModel]] = list,
    ):
        self._look = look
        self._in_folder = set(look())
        self._by_name: dict[str, LoadableModel] = {}
        self._any_name = any_name
        for model in models:
            for name in model.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise ConfigError(f"served_model_name is {name!r} for two models; each needs names of its own")
        self._by_pattern = self._patterns()
        owners = dict(self._by_name)
        for model in dict.fromkeys(self._by_name.values()):
            for adapter in model.adapters:
                if owners.setdefault(adapter.name, model) is not model or adapter.name in self._by_name:
                    problem = f"{adapter.name!r}, which another model or adapter has already"
                    raise ConfigError(f"lora_modules has the name {problem}")
        if not self._by_name:
            raise ConfigError("model is missing: a server needs at least one")
        self.loader = ModelLoader(self, max_loaded, memory, min_seconds)
        self.draining = False
        self.changes = Changes()
        """Changes of the models, and of `draining`, which is true while the server is stopping."""
        for model in self:
            model.on_change = self.changes.ring

    def __iter__(self) -> Iterator[LoadableModel]:
        return iter(dict.fromkeys(self._by_name.values()))

    def _patterns(self) -> dict[str, LoadableModel]:
        found = {pattern: model for model in self for pattern in model.config.name_patterns}
        if len(set(self._by_name.values())) == 1:
            found.setdefault(ONLY_MODELS, self._by_name[self.default_name])
        return found

    def _look_again(self) -> None:
        """Take in the models that have come to the folder, and drop those that have left it and are not loaded."""
        try:
            found = self._look()
        except ConfigError as error:
            logger.error("the models stay as they are: %s", error)
            return
        before = list(self)
        for model in found:
            self._by_name.setdefault(model.name, model)
            model.on_change = self.changes.ring
        for model in self._in_folder - set(found):
            if not (model.served or model.stage or model.calls) and len(list(self)) > 1:  # a server has at least one
                self._by_name = {name: one for name, one in self._by_name.items() if one is not model}
        self._in_folder.update(found)
        if list(self) != before:
            self._by_pattern = self._patterns()
            self.changes.ring()

    @property
    def names(self) -> list[str]:
        """All names that are listed: of models, those of the default one first, and then of their adapters."""
        shown = [model for model in self if not model.hidden]
        names = [name for name, model in self._by_name.items() if not model.hidden]
        return names + [adapter.name for model in shown for adapter in model.adapters]

    def names_for(self, tenant: Tenant) -> list[str]:
        self._look_again()
        named = ((name, self.named(name)) for name in self.names)
        return [name for name, model in named if model is not None and self._may_use(tenant, model, name)]

    def _may_use(self, tenant: Tenant, model: LoadableModel, name: str) -> bool:
        """Who may use a model may use its adapters; others may where they are given an adapter's own name."""
        is_adapter = name not in model.names and model.adapters.get(name) is not None
        return tenant.may_use([*model.names, name] if is_adapter else model.names)

    @property
    def default_name(self) -> str:
        return next(iter(self._by_name))

    @property
    def loaded(self) -> list[ServedModel]:
        return [model.served for model in self if model.served is not None]

    def serves(self, name: str) -> bool:
        return self._any_name or self.named(name) is not None

    def named(self, name: str) -> LoadableModel | None:
        if model := self._by_name.get(name) or next((model for model in self if model.adapters.get(name)), None):
            return model
        return next((model for pattern, model in self._by_pattern.items() if matches(pattern, name)), None)

    def find(self, name: str | None, tenant: Tenant = OTHERS) -> LoadableModel:
        """The model of that name or of that adapter, or the default one; it is not loaded. Raises as `called`."""
        return self.called(name, tenant)[1]

    def called(self, name: str | None, tenant: Tenant = OTHERS) -> tuple[str, LoadableModel]:
        """The model, after the name that it is asked for by. Raises 404 for a name that the tenant may not know."""
        if name is None:  # the default one, or the first that the tenant may use
            name = next((name for name, model in self._by_name.items() if tenant.may_use(model.names)), None)
        elif self.named(name) is None:
            self._look_again()
            name = name if self.named(name) else name.removesuffix(LATEST)
        if name is not None and self.serves(name):
            model = self.named(name) or self._by_name[self.default_name]
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


class Changes:
    """Rings the bells of all who watch; any thread, and a signal handler, may ring."""

    def __init__(self) -> None:
        self._bells: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def ring(self) -> None:
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
    """The known stages of a load: the one that it is in."""
    current: str
    value: float
    """How much of that is done, from 0 to 1; 0 where nothing is counted."""


class LoadedInfo(msgspec.Struct, kw_only=True):
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
    """The state of every listed model that a tenant may use, and each change; an empty list after `silence` seconds."""
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
    known = ", ".join(names[:MAX_NAMES_SHOWN]) + (", …" if len(names) > MAX_NAMES_SHOWN else "")
    message = f"model {shown(name)} is not served here{near}; this server has {known}"
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
