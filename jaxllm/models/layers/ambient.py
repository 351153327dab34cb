"""What holds for all that is traced while a block is open, without being handed from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[T]:
    """`variable` has this value while this is open, which it yields, and then again the one from before."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
