"""A server of several models whose engines are canned, and started when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from jaxllm.config import ModelConfig
from jaxllm.config.server import ServerConfig
from jaxllm.engine.messages import MemoryRoom
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.mcp.settings import OFF
from jaxllm.progress import tell
from jaxllm.serving.app import create_app
from jaxllm.serving.served_model import LoadableModel
from jaxllm.serving.state import Registry
from tests.serving.batches.running import Running
from tests.serving.fake_engine import FakeEngine


class Starts:
    """Starts canned engines, and notes what happens to them.

    A name in `held` is not started before it is let go; one in `broken` fails with the error that is there, and one
    in `misfits` while it is planned, before it asks for room. `sizes` are the bytes that engines ask for.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.engines: dict[str, FakeEngine] = {}
        self.held: dict[str, threading.Event] = {}
        self.broken: dict[str, Exception] = {}
        self.misfits: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.delays: dict[str, float] = {}

    def __call__(self, config: ModelConfig, given_up: threading.Event, room: MemoryRoom) -> FakeEngine:
        name = config.names[0]
        if name in self.misfits:
            raise ConfigError(self.misfits[name])
        room.ask(self.sizes.get(name))
        self.events.append(f"start {name}")
        tell(f"Loading {name}", 3, 7)
        while name in self.held and not self.held[name].wait(0.01):
            if given_up.is_set():
                raise EngineDeadError("the engine was shut down while it started")
        if name in self.broken:
            raise self.broken[name]
        engine = Noted(self, name, delay=self.delays.get(name, 0.0), reply=f"I am {name}.")
        self.engines[name] = engine
        self.events.append(f"started {name}")
        return engine


class Noted(FakeEngine):
    """Says when it is shut down."""

    def __init__(self, starts: Starts, name: str, **fields: Any):
        super().__init__(**fields)
        self._starts, self._name = starts, name

    def shutdown(self) -> None:
        super().shutdown()
        self._starts.events.append(f"stopped {self._name}")


def make_models(starts: Starts, models: Mapping[str, Mapping[str, Any]]) -> list[LoadableModel]:
    """By name, with what CatalogEntry says of how the server treats each."""
    return [LoadableModel(ModelConfig(model=name), starts, **fields) for name, fields in models.items()]  # type: ignore[arg-type]


class Several(Running):
    """A server of models that `starts` starts; closing it stops their engines."""

    def __init__(
        self,
        data_dir: Path,
        starts: Starts,
        models: Mapping[str, Mapping[str, Any]],
        *,
        max_loaded: int | None = 1,
        memory: int | None = None,
        min_seconds: float = 0.0,
        **settings: Any,
    ):
        self.starts = starts
        self.models = make_models(starts, models)
        self.registry = Registry(self.models, max_loaded=max_loaded, memory=memory, min_seconds=min_seconds)
        self.begin(self._app(ServerConfig(data_dir=data_dir, mcp_config=OFF, **settings)), settings.get("api_key"))

    def _app(self, config: ServerConfig) -> FastAPI:
        for model in self.models:
            if model.awaited:
                model.load()
        return create_app(config, self.registry)

    def ask(self, model: str | None, **fields: Any) -> str:
        """The text of an answer. Raises openai's errors."""
        body = {"model": model, "prompt": "Hi", "max_tokens": 50} | fields
        return self.client.completions.create(**body).choices[0].text

    def status(self, name: str) -> dict[str, Any]:
        return self.client.models.retrieve(name).model_dump()["status"]

    def states(self) -> dict[str, str]:
        return {model.id: model.model_dump()["status"]["value"] for model in self.client.models.list().data}

    def post(self, path: str, model: str) -> Any:
        """The answer of one of llama.cpp's routes; raises openai's errors."""
        return self.client.post(path, body={"model": model}, cast_to=object)

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """While an answer of this model is read."""
        stream = self.client.completions.create(model=name, prompt="Hi", max_tokens=200, stream=True)
        next(iter(stream))
        try:
            yield
        finally:
            stream.close()


Serve = Callable[..., Several]


@pytest.fixture
def starts() -> Starts:
    return Starts()


@pytest.fixture
def serve(tmp_path: Path, starts: Starts) -> Iterator[Serve]:
    servers: list[Several] = []

    def begin(*names: str, max_loaded: int | None = 1, memory: int | None = None, **others: Any) -> Several:
        """Models by name; of others, mappings say how the server treats a model, and the rest are its settings."""
        models = {name: fields for name, fields in others.items() if isinstance(fields, Mapping)}
        settings = {name: value for name, value in others.items() if name not in models}
        described = {name: {} for name in names} | models
        server = Several(tmp_path / "data", starts, described, max_loaded=max_loaded, memory=memory, **settings)
        servers.append(server)
        return server

    yield begin
    for gate in starts.held.values():
        gate.set()
    for server in servers:
        server.stop()
        for engine in starts.engines.values():
            engine.shutdown()


def refusal(error: openai.APIStatusError) -> tuple[int, str | None, str]:
    """Status, code and message."""
    return error.status_code, error.code, error.message
