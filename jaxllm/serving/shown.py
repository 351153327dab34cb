"""Values in error messages."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

_LENGTH = 100
_ENTRIES = 10
_DEPTH = 4


def shown(value: Any) -> str:
    """JSON's words for it, or a text in quotes, cut to a line; of large values only the beginning is looked at.

    Worked example: `{"a": [None, True]}` is `{"a": [null, true]}`, and the text `hi` is `'hi'`.
    """
    text = repr(value[: _LENGTH + 1]) if isinstance(value, str) else _beginning(value, _DEPTH)
    return text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "…"


def _beginning(value: Any, depth: int) -> str:
    match value:
        case str():
            beginning = value[: _LENGTH + 1]
            return json.dumps(beginning, ensure_ascii=not beginning.isprintable())
        case None | bool():
            return json.dumps(value)
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
