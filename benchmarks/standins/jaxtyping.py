"""Where jaxtyping is not installed: annotations that say nothing. What runs is the same."""

from __future__ import annotations

from typing import Any


class _Anything:
    def __class_getitem__(cls, shape: Any) -> type:
        return cls


def __getattr__(name: str) -> type:
    if name.startswith("_"):
        raise AttributeError(name)
    return _Anything
