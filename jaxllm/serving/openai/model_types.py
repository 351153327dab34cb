"""/v1/models and the small status responses."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxllm"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Status(msgspec.Struct):
    status: Literal["ok", "ready"]


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int
    """Requests now generating or waiting to."""
