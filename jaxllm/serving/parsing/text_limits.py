"""What a JSON schema asks of a string, as regular expressions for text that is written raw."""

from __future__ import annotations

import re
from typing import Any

from jaxllm.requests.structured_outputs import ascii_classes

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""Of a regular expression: an escaped character, a class, or one character."""
_UNKNOWN = re.compile(r"\\[bBAZzpPkG1-9]|\(\?(?!:)")
"""Assertions, back references and Unicode's classes, which grammars do not know or know otherwise."""


def text_limits(schema: Any, strict: bool) -> list[str]:
    """Regular expressions of llguidance's, all of which the whole text of a string matches; none if any text will do.

    A pattern that they cannot express is left out, unless the tool is `strict`: the grammar is then refused.
    """
    if not isinstance(schema, dict):
        return []
    limits = []
    least, most = (schema.get(name) for name in ("minLength", "maxLength"))
    least = least if isinstance(least, int) else 0
    if least or isinstance(most, int):
        limits.append(f"(?s:.{{{least},{most if isinstance(most, int) else ''}}})")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (strict or _is_plain(pattern)):
        limits.append(whole_text(pattern).replace("\n", r"\n"))
    return limits


def whole_text(pattern: str) -> str:
    """A pattern, which may match anywhere in a text, as one that matches all of the text.

    Worked example: `whole_text("^a|b")` is `a(?s:.*)|(?s:.*)b`, each in a group.
    """
    return "|".join(f"(?:{_anchored(alternative)})" for alternative in _alternatives(pattern))


def _anchored(alternative: list[str]) -> str:
    starts, ends = alternative[:1] == ["^"], alternative[-1:] == ["$"]
    inner = "".join(alternative[starts : len(alternative) - ends])
    escaped = ascii_classes(inner).replace("\\/", "/").replace("/", "\\/")
    return ("" if starts else "(?s:.*)") + f"(?:{escaped})" + ("" if ends else "(?s:.*)")


def _alternatives(pattern: str) -> list[list[str]]:
    """The pieces of what stands between the bars that are in no group."""
    found: list[list[str]] = [[]]
    depth = 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(piece)
    return found


def _is_plain(pattern: str) -> bool:
    """Whether grammars can have it: a regular expression without assertions but at the ends of its alternatives."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    inside = [piece for found in _alternatives(pattern) for piece in found[found[:1] == ["^"] :]]
    ends = sum(found[-1:] == ["$"] for found in _alternatives(pattern))
    return not _UNKNOWN.search(pattern) and "^" not in inside and inside.count("$") == ends
