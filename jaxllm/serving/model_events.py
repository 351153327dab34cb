"""What becomes of a server's models, as it happens: the events of /models/sse, in llama.cpp's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.serving.access.tenant import Tenant
from jaxllm.serving.loadable import LoadableModel, ModelState
from jaxllm.serving.registry import Registry


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


_encode = msgspec.json.Encoder().encode


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
