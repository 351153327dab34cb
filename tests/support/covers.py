"""A test says what of the HTTP API it shows; docs/api.md links to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])


def covers(subject: str, *fields: str) -> Callable[[Test], Test]:
    """The test shows what a route of the server does, or fields of a section of its requests.

    The decorator changes nothing: `tests.serving.api_coverage` reads it in the sources.
    """
    return lambda test: test
