"""The models of one server, by the names that requests ask for, and the leases by which requests hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fastapi import Request

from jaxllm.config import ServeConfig, did_you_mean
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.route import hold
from jaxllm.serving.loadable import Lease, LoadableModel
from jaxllm.serving.model_loader import ModelLoader
from jaxllm.serving.served_model import ServedModel

if TYPE_CHECKING:
    from jaxllm.engine.front.async_llm import AsyncLLM

RELEASE_SECONDS = 5.0
"""How long requests that were cancelled when the server stopped may take to give their models back."""
MAX_NAMES_SHOWN = 20
MAX_COMPARED = 200
"""Characters of an unknown name that is compared with those of models: a stranger's may have megabytes."""

_TAKEN = "jaxllm.taken"


class Registry:
    """Every model of a server. Iterating gives each once, the default first.

    With `any_name` the default model also answers requests for names that no model has. At most `max_loaded` models
    are loaded at a time; by default as many as there are.

    Raises ConfigError when two models have a name in common, or there is none.
    """

    def __init__(self, models: Iterable[LoadableModel], *, any_name: bool = False, max_loaded: int | None = None):
        self._by_name: dict[str, LoadableModel] = {}
        self._any_name = any_name
        for model in models:
            for name in model.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise ConfigError(f"served_model_name is {name!r} for two models; each needs names of its own")
        if not self._by_name:
            raise ConfigError("model is missing: a server needs at least one")
        self.loader = ModelLoader(list(self), max_loaded or len(self._by_name))

    def __iter__(self) -> Iterator[LoadableModel]:
        return iter(dict.fromkeys(self._by_name.values()))

    @property
    def names(self) -> list[str]:
        """All names that are listed, those of the default model first."""
        return [name for name, model in self._by_name.items() if not model.hidden]

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
        return name in self._by_name or self._any_name

    def find(self, name: str | None) -> LoadableModel:
        """The model of that name, or the default one, for whoever only looks at it: it is neither held nor loaded.

        Raises 404 for an unknown name.
        """
        name = self.default_name if name is None else name
        if not self.serves(name):
            near = did_you_mean(name, self.names).removesuffix("?") if len(name) <= MAX_COMPARED else ""
            shown = ", ".join(self.names[:MAX_NAMES_SHOWN]) + (", …" if len(self.names) > MAX_NAMES_SHOWN else "")
            message = f"model {name!r} is not served here{near}; this server has {shown}"
            raise APIError(404, message, param="model", code="model_not_found")
        return self._by_name.get(name, self._by_name[self.default_name])

    def find_loaded(self, name: str | None) -> ServedModel:
        """The same, for who needs its tokenizer or its template. Raises 503 where the model is not loaded now."""
        model = self.find(name)
        if model.served is None:
            message = f"model {model.name!r} is {model.state}; a request for it, or POST /models/load, loads it"
            raise unavailable(message, code="model_not_loaded")
        return model.served

    async def lease(self, name: str | None) -> Lease:
        """Hold the model that a request asks for, or the default one, and load it where it is not loaded.

        Raises 404 for an unknown name, and 503 as ModelLoader.load.
        """
        model = self.find(name)
        lease = Lease(self.default_name if name is None else name, model)
        try:
            await self.loader.load(model)
        except BaseException:
            lease.release()
            raise
        return lease

    def drain(self) -> None:
        """From now on no model is loaded, and no request begins."""
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
        while any(model.leases for model in self) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        held = {model.name: len(model.leases) for model in self if model.leases}
        assert not held, f"leases that their requests never released, by model: {held}"


async def leased(request: Request, name: str | None) -> Lease:
    """The model that a request asks for, held until the last byte of its answer; each request calls this once.

    Raises 404 for an unknown name, and 503 where the model cannot be loaded now.
    """
    assert _TAKEN not in request.scope, "a request takes its model once"
    request.scope[_TAKEN] = True
    registry: Registry = request.app.state.server.registry
    return hold(request, await registry.lease(name))


def single_model(config: ServeConfig, engine: AsyncLLM) -> Registry:
    """The registry of a server that was started with one model. Raises ConfigError, see ServedModel."""
    model = LoadableModel.loaded(ServedModel(config.of_model, engine))
    return Registry([model], any_name=config.serve_any_model_name)
