"""Chat templates: Jinja in a sandbox, set up as transformers sets it up.

A template comes with the checkpoint, so it is untrusted code: it runs in jinja2's immutable sandbox and gets
plain JSON values only. Source of the environment's settings: transformers.utils.chat_template_utils.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxllm.errors import InvalidRequestError, one_line

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


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def syntax_tree(template: str) -> nodes.Template:
    """What a template is made of. Raises jinja2.TemplateSyntaxError, or RecursionError for blocks too deep."""
    return _environment().parse(template)


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
