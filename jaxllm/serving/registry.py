"""The models of one server, by the names that requests ask for, and the leases by which requests hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fastapi import Request

from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import hold
from jaxllm.serving.served_model import ServedModel

if TYPE_CHECKING:
    from jaxllm.engine.front.async_llm import AsyncLLM

RELEASE_SECONDS = 5.0
"""How long requests that were cancelled when the server stopped may take to give their models back."""

_TAKEN = "jaxllm.taken"


class Lease:
    """One request's hold on its model, which stays in place until the request has sent its last byte.

    `name` is what the client calls the model. A context manager that releases the model at its end.
    """

    def __init__(self, name: str, model: ServedModel, held: set[Lease]):
        self.name = name
        self.model = model
        self._held = held
        held.add(self)

    def again(self) -> Lease:
        """A second lease of the model, for work that goes on after the request has ended."""
        return Lease(self.name, self.model, self._held)

    def release(self) -> None:
        """Give the model back; does nothing from the second call on."""
        self._held.discard(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Registry:
    """Every model of a server. Iterating gives each once, the default first.

    With `any_name` the default model also answers requests for names that no model has.

    Raises ConfigError when two models have a name in common, or there is none.
    """

    def __init__(self, models: Iterable[ServedModel], *, any_name: bool = False):
        self._by_name: dict[str, ServedModel] = {}
        self._any_name = any_name
        for model in models:
            for name in model.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise ConfigError(f"served_model_name is {name!r} for two models; each needs names of its own")
        if not self._by_name:
            raise ConfigError("model is missing: a server needs at least one")
        self._held: dict[ServedModel, set[Lease]] = {model: set() for model in self}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(dict.fromkeys(self._by_name.values()))

    @property
    def names(self) -> list[str]:
        """All names, those of the default model first."""
        return list(self._by_name)

    @property
    def default_name(self) -> str:
        """What a request asks for that names no model."""
        return next(iter(self._by_name))

    def serves(self, name: str) -> bool:
        """Whether requests for a model of this name are answered."""
        return name in self._by_name or self._any_name

    def find(self, name: str | None) -> ServedModel:
        """The model of that name, or the default one, for whoever only looks at it: it is not held.

        Raises 404 for an unknown name.
        """
        name = self.default_name if name is None else name
        if not self.serves(name):
            message = f"model {name!r} is not served here; this server has {', '.join(self._by_name)}"
            raise APIError(404, message, param="model", code="model_not_found")
        return self._by_name.get(name, self._by_name[self.default_name])

    async def lease(self, name: str | None) -> Lease:
        """Hold the model that a request asks for, or the default one. Raises 404 for an unknown name."""
        model = self.find(name)
        return Lease(self.default_name if name is None else name, model, self._held[model])

    def num_leases(self, model: ServedModel) -> int:
        """How many requests hold the model now."""
        return len(self._held[model])

    def dead(self) -> list[ServedModel]:
        """The models whose engines have stopped."""
        return [model for model in self if model.engine.is_dead]

    def check_alive(self) -> None:
        """Raises EngineDeadError when the engines of all models have stopped."""
        if len(self.dead()) == len(self._held):
            names = ", ".join(model.names[0] for model in self)
            raise EngineDeadError(f"the engine has stopped; no request to {names} can be answered")

    async def check_released(self) -> None:
        """Asserts that no request holds a model any more, once no request can begin."""
        deadline = asyncio.get_running_loop().time() + RELEASE_SECONDS
        while any(self._held.values()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        held = {model.names[0]: len(leases) for model, leases in self._held.items() if leases}
        assert not held, f"leases that their requests never released, by model: {held}"


async def leased(request: Request, name: str | None) -> Lease:
    """The model that a request asks for, held until the last byte of its answer; each request calls this once.

    Raises 404 for an unknown name.
    """
    assert _TAKEN not in request.scope, "a request takes its model once"
    request.scope[_TAKEN] = True
    registry: Registry = request.app.state.server.registry
    return hold(request, await registry.lease(name))


def single_model(config: ServeConfig, engine: AsyncLLM) -> Registry:
    """The registry of a server that was started with one model. Raises ConfigError, see ServedModel."""
    return Registry([ServedModel(config.of_model, engine)], any_name=config.serve_any_model_name)
