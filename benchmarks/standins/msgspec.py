"""Where msgspec is not installed: the records that an engine in a thread passes on. Nothing is encoded or checked."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

field = dataclasses.field
structs = SimpleNamespace(replace=dataclasses.replace)


class MsgspecError(Exception):
    pass


class ValidationError(MsgspecError):
    pass


class DecodeError(MsgspecError):
    pass


class Struct:
    """A dataclass whose empty lists and dicts are each object's own."""

    def __init_subclass__(cls, *, kw_only: bool = False, **_: Any) -> None:
        for name in cls.__annotations__:
            default = cls.__dict__.get(name)
            if isinstance(default, (list, dict)):
                setattr(cls, name, field(default_factory=type(default)))
        dataclasses.dataclass(kw_only=kw_only)(cls)


def convert(values: dict[str, Any], kind: type, *, strict: bool = True) -> Any:
    """The dataclass `kind` with those of `values` that it has a field for."""
    return kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})
