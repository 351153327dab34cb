"""Whether a chat template takes a message's content as one string or as OpenAI's list of parts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from jinja2 import TemplateSyntaxError, nodes

from jaxllm.text.chat_template import syntax_tree

MAX_TEMPLATE = 64 * 1024
"""Characters of a template that is looked into: a stranger's may have megabytes."""


def takes_parts(template: str, content_format: Literal["auto", "string", "openai"]) -> bool:
    """Whether messages are to have lists of parts: as told, otherwise where the template can read nothing else.

    Those that look whether the content is a string can read both, and get a string.
    """
    if content_format == "auto":
        return len(template) <= MAX_TEMPLATE and _needs_parts(template)
    return content_format == "openai"


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """{"role": "user", "content": "hi"} -> {"role": "user", "content": [{"type": "text", "text": "hi"}]}"""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


@lru_cache(maxsize=32)
def _needs_parts(template: str) -> bool:
    try:
        tree = syntax_tree(template)
    except (TemplateSyntaxError, RecursionError):
        return False  # rendering says what is wrong with it
    loops = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return loops and not any(test.name in ("string", "mapping", "iterable") for test in tree.find_all(nodes.Test))


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False
