"""Chat templates: Jinja in a sandbox, set up as transformers sets it up, and the contents that they read.

A template comes with the checkpoint, so it is untrusted code: it runs in jinja2's immutable sandbox and gets
plain JSON values only. Source of the environment's settings: transformers.utils.chat_template_utils."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import jinja2
from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxllm.errors import Field, InvalidRequestError, one_line

MAX_TEMPLATE_CHARACTERS = 2**20
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda layout: datetime.datetime.now().strftime(layout),
    }
    return environment


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def json_text(values: dict[str, Any]) -> str:
    """Arguments of `render`. Raises InvalidRequestError if they are no JSON values."""
    try:
        return json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages are no JSON values: {error}", param="messages") from None


def render(
    template: str, messages: list[dict[str, Any]], *, continue_final_message: bool = False, **values: Any
) -> str:
    """Render `messages` and return the prompt text, special tokens included as text.

    With `continue_final_message` the text ends where the last message's content ends, for the model to go on with.
    Raises InvalidRequestError with the template's own words when it refuses, and when it fails on these messages.
    """
    if continue_final_message:
        messages = [*messages[:-1], _tagged(messages)]
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidRequestError(
            f"the chat template has {len(template)} characters; accepted are {MAX_TEMPLATE_CHARACTERS}",
            param="chat_template",
        )
    try:
        text = _compile(template).render(messages=messages, **values)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"the chat template is invalid at line {error.lineno}: {one_line(error.message)}"
        ) from None
    except SyntaxError as error:  # what Jinja accepts and Python does not: too many blocks inside each other
        raise InvalidRequestError(f"the chat template is invalid: {one_line(error.msg)}") from None
    except (RecursionError, MemoryError) as error:
        kind = "memory" if isinstance(error, MemoryError) else "recursion"
        raise InvalidRequestError(f"the chat template needs too much {kind} to render", param="chat_template") from None
    except Exception as error:  # whatever the template's own code comes to
        raise InvalidRequestError(f"the chat template refuses these messages: {one_line(error)}", "messages") from None
    return _cut_at_tag(text) if continue_final_message else text


def _tagged(messages: list[dict[str, Any]]) -> dict[str, Any]:
    match messages[-1:]:
        case [{"content": str(content)} as message]:
            return {**message, "content": content + _CONTINUE}
        case [{"content": [*parts, {"text": str(text), **rest}]} as message]:
            return {**message, "content": [*parts, {**rest, "text": text + _CONTINUE}]}
    raise InvalidRequestError("continue_final_message needs a last message whose content is text", param="messages")


def _cut_at_tag(text: str) -> str:
    place = text.rfind(_CONTINUE.strip())
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template leaves out the last message's content", param="messages"
        )
    # A template that trims content ate the tag's trailing space; then the content's own must go as well.
    return text[:place] if text.startswith(_CONTINUE, place) else text[:place].rstrip()


MAX_TEMPLATE = 64 * 1024  # characters of a template that is looked into: a stranger's may have megabytes
_MEDIA = ("audio", "audios", "image", "images", "video", "videos")  # messages' keys of pictures and sounds
_OF_TEXT = ("type", "text", "cache_control")


def check_text(messages: Sequence[Any], known: type | tuple[()] = ()) -> None:
    """Raises InvalidRequestError for the first thing that is no text, or `known`: a template might ignore it."""
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
                if problem := not isinstance(part, known) and _problem(part):
                    raise _refused(Field("messages", at, "content", number), problem)
        elif content is not None and not isinstance(content, str):
            raise _refused(Field("messages", at, "content"), _problem(content) or "is a part without a list around it")


def _problem(part: Any) -> str | None:
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
    messages: Sequence[Mapping[str, Any]], template: str, asked: Literal["auto", "string", "openai"] = "auto",
    as_text: Callable[[list[Any]], str] = lambda parts: "\n".join(part["text"] for part in parts),
) -> list[dict[str, Any]]:  # fmt: skip
    """Checked messages whose contents are strings or lists, as asked, or as the template can read them.

    Worked example: "hi" is [{"type": "text", "text": "hi"}] for a template that goes through lists and never looks
    whether it has a string. One that goes through no list gets a list `as_text`, by default joined by newlines.
    """
    wanted = asked if asked != "auto" else "string" if len(template) > MAX_TEMPLATE else _read_by(template)

    def content(given: Any) -> Any:
        if wanted == "openai" and isinstance(given, str):
            return [{"type": "text", "text": given}]
        if wanted == "string" and isinstance(given, list):
            return as_text(given)
        return given

    return [
        {**message, "content": content(message["content"])} if "content" in message else dict(message)
        for message in messages
    ]


@lru_cache(maxsize=32)
def _read_by(template: str) -> Literal["string", "openai"] | None:
    """The form of contents that a template can read; None where that is both."""
    try:
        tree = _environment().parse(template)
    except (TemplateSyntaxError, RecursionError):  # the latter for blocks that are too deep
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
