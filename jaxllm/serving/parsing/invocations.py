"""Scanners of calls written as tags that name what is between them, and behind the word Action."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.serving.parsing.calls import closing, fenced_calls, tool_name
from jaxllm.serving.parsing.source import (
    Scan,
    Source,
    any_left,
    expect,
    literal,
    next_of,
    one_of,
    peek,
    skip_space,
    text_until,
)
from jaxllm.serving.parsing.values import parameter_types, properties_of, raw_value
from jaxllm.serving.parsing.writer import CallWriter

STEP_CALLS, STEP_CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
STEP_CALL, STEP_CALL_END, STEP_SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"

_STATED: dict[str, set[str]] = {'string="true">': {"string"}, 'string="false">': set()}
"""What a parameter's tag may say of its value: text as it is, or JSON."""


def invoked_calls(
    source: Source,
    writer: CallWriter,
    *,
    prefix: str,
    end: str,
    inside: bool = False,
    doubled: bool = False,
    after: Sequence[str] = (),
) -> Scan[None]:
    """<invoke name="NAME">, <parameter name="KEY">raw value</parameter> …, </invoke>, one call after the other; `end`.

    `prefix` begins the tags' names. `inside` is behind the first <invoke name=". A closing tag may be missing where
    another tag, or the text's end, says as much. `after` are tags that come after all of this. `doubled` is
    tool_name's.
    """
    opening = f'<{prefix}invoke name="'
    if not inside:
        yield from skip_space(source)
        yield from expect(source, opening)
    while True:
        tag = yield from _invocation(source, writer, prefix, end, after, doubled)
        yield from skip_space(source)
        if tag != opening and not ((yield from any_left(source)) and (yield from literal(source, opening))):
            break
    yield from closing(source, writer, end)


def step_calls(source: Source, writer: CallWriter, *, inside: bool = False) -> Scan[None]:
    """STEP_CALL, and in it one <steptml:invoke>, one call after the other, and the end of the section.

    `inside` is behind the first STEP_CALL. The call's type, function, and separators may be missing.
    """
    more = (STEP_SEPARATOR, STEP_CALL)
    after = (*more, STEP_CALLS_END)
    if not inside:
        yield from skip_space(source)
        yield from expect(source, STEP_CALL)
    while True:
        yield from skip_space(source)
        if (yield from peek(source)) == "f":
            yield from expect(source, f"function{STEP_SEPARATOR}")
        yield from skip_space(source)
        yield from expect(source, '<steptml:invoke name="')
        if (yield from _invocation(source, writer, "steptml:", STEP_CALL_END, after)) != STEP_CALL_END:
            yield from closing(source, writer, STEP_CALL_END)
        yield from skip_space(source)
        if not ((yield from any_left(source)) and (tag := (yield from next_of(source, more)))):
            break
        source.take(len(tag))
        if tag == STEP_SEPARATOR:
            yield from skip_space(source)
            yield from expect(source, STEP_CALL)
    yield from closing(source, writer, STEP_CALLS_END)


def _invocation(
    source: Source, writer: CallWriter, prefix: str, end: str, after: Sequence[str], doubled: bool = False
) -> Scan[str]:
    """The call whose name comes next; the tag that ended it. `after` are tags that no call is ended by."""
    name = yield from tool_name(source, writer, doubled=doubled)
    writer.begin(name)
    if (yield from one_of(source, ('"/>', '">'))) == '"/>':
        writer.end()
        return ""
    opening = f'<{prefix}invoke name="'
    parameter, finished = f'<{prefix}parameter name="', f"</{prefix}invoke>"
    unknown = list(properties_of(writer.schemas[name], writer.schemas[name]))
    yield from skip_space(source)
    while (tag := (yield from one_of(source, (parameter, finished, end, opening)))) == parameter:
        key = yield from text_until(source, '"')
        yield from skip_space(source)
        stated = yield from one_of(source, (*_STATED, ">"))
        writer.key(key)
        types = _STATED[stated] if stated in _STATED else parameter_types(writer, name, key)
        close = f"</{prefix}parameter>"
        unknown = [other for other in unknown if other != key]
        stops = [f'{parameter}{other}"' for other in unknown]
        stops += [f"{finished}{space}{tag}" for space in ("", "\n") for tag in (end, opening, *after)]
        stops += [f"\n{stop}" for stop in stops]
        last = [f"{before}{finished}{behind}" for before in ("", "\n") for behind in ("", "\n")]
        stop = yield from raw_value(source, types, (close, *stops), writer.write, last)
        if stop == close:
            yield from expect(source, close)
            writer.claim()
        yield from skip_space(source)
    writer.end()
    return tag


def action_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind Action: a fence with JSON calls."""
    yield from skip_space(source)
    yield from expect(source, "```")
    yield from fenced_calls(source, writer)
