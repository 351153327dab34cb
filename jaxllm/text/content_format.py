"""The contents of messages: text alone, as the one string or the list of parts that a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from jinja2 import TemplateSyntaxError, nodes

from jaxllm.errors import Field, InvalidRequestError, one_line
from jaxllm.text.chat_template import syntax_tree

MAX_TEMPLATE = 64 * 1024
"""Characters of a template that is looked into: a stranger's may have megabytes."""
_MEDIA = ("audio", "audios", "image", "images", "video", "videos")
"""Keys of messages that some libraries put pictures and sounds into."""
_OF_TEXT = ("type", "text", "cache_control")


def check_text(messages: Sequence[Any]) -> None:
    """Refuse whatever in the messages is not text: a template may leave it out of the prompt without a word.

    Raises InvalidRequestError naming the first.
    """
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                [Field("messages", at), f" is {one_line(message, 100)!r}; it must be an object with role and content"]
            )
        for name in _MEDIA:
            if message.get(name):
                raise InvalidRequestError([Field("messages", at, name), " is not available: only text is served"])
        content = message.get("content")
        if isinstance(content, list):
            for number, part in enumerate(content):
                if problem := _problem(part):
                    raise _refused(Field("messages", at, "content", number), problem)
        elif content is not None and not isinstance(content, str):
            raise _refused(Field("messages", at, "content"), _problem(content) or "is a part without a list around it")


def _problem(part: Any) -> str | None:
    """What keeps a part of a content from being text alone."""
    if not isinstance(part, Mapping):
        return f"is {one_line(part, 100)!r}"
    if part.get("type") != "text":
        return f"has type {part.get('type')!r}"
    if not isinstance(part.get("text"), str):
        return "has no text"
    other = next((name for name, value in part.items() if value is not None and name not in _OF_TEXT), None)
    return None if other is None else f"has {other!r}"


def _refused(place: Field, problem: str) -> InvalidRequestError:
    accepted = 'only text is served: a content must be a string, or a list of {"type": "text", "text": …}'
    return InvalidRequestError([place, f" {problem}; {accepted}"])


def in_format(
    messages: Sequence[Mapping[str, Any]], template: str, asked: Literal["auto", "string", "openai"] = "auto"
) -> list[dict[str, Any]]:
    """Checked messages whose contents are strings or lists, as asked, or as the template can read them.

    Worked example: "hi" is [{"type": "text", "text": "hi"}] for a template that goes through lists and never looks
    whether it has a string. One that goes through no list gets the texts of a list joined by newlines.
    """
    wanted = asked if asked != "auto" else "string" if len(template) > MAX_TEMPLATE else _read_by(template)

    def content(given: Any) -> Any:
        if wanted == "openai" and isinstance(given, str):
            return [{"type": "text", "text": given}]
        if wanted == "string" and isinstance(given, list):
            return "\n".join(part["text"] for part in given)
        return given

    return [
        {**message, "content": content(message["content"])} if "content" in message else dict(message)
        for message in messages
    ]


@lru_cache(maxsize=32)
def _read_by(template: str) -> Literal["string", "openai"] | None:
    """What a template can read; None where that is both."""
    try:
        tree = syntax_tree(template)
    except (TemplateSyntaxError, RecursionError):
        return None  # rendering says what is wrong with it
    if not any(_is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return "string"
    looks = any(test.name in ("string", "mapping", "iterable") for test in tree.find_all(nodes.Test))
    return None if looks else "openai"


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False
