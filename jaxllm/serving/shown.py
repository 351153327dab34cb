"""Values in error messages."""

from __future__ import annotations

from itertools import islice
from typing import Any

_LENGTH = 100
_ENTRIES = 10
_DEPTH = 4


def shown(value: Any) -> str:
    """repr, cut to what fits a line; of large values only the beginning is looked at."""
    text = _beginning(value, _DEPTH)
    return text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "…"


def _beginning(value: Any, depth: int) -> str:
    match value:
        case str():
            return repr(value[: _LENGTH + 1])
        case list() | dict() if not depth:
            return "…"
        case list():
            entries = [_beginning(entry, depth - 1) for entry in value[:_ENTRIES]]
            return f"[{', '.join(entries)}{', …' * (len(value) > _ENTRIES)}]"
        case dict():
            pairs = [f"{_beginning(k, 1)}: {_beginning(v, depth - 1)}" for k, v in islice(value.items(), _ENTRIES)]
            return f"{{{', '.join(pairs)}{', …' * (len(value) > _ENTRIES)}}}"
        case _:
            return repr(value)
