"""Scanners of calls whose marks are tokens of their own: those of Kimi K3, Solar Open and Solar Open 2."""

from __future__ import annotations

import re
import secrets
import string

from jaxllm.chat.calls import closing, json_arguments, named_arguments, tool_name
from jaxllm.chat.events import CallWriter
from jaxllm.chat.source import Scan, Source
from jaxllm.chat.values import parameter_types, raw_value

XTML_SEP = "<|sep|>"
XTML_CALL = '<|open|>call tool="'
XTML_ARGUMENT = '<|open|>argument key="'
XTML_ARGUMENT_END = f"<|close|>argument{XTML_SEP}"
XTML_CALL_END = f"<|close|>call{XTML_SEP}"
XTML_TOOLS = f"<|open|>tools{XTML_SEP}"
XTML_TOOLS_END = f"<|close|>tools{XTML_SEP}"
_JSON, _JSON_END = '<|open|>json type="object"<|sep|>', f"<|close|>json{XTML_SEP}"
_AFTER_XTML_ARGUMENTS = (XTML_ARGUMENT, XTML_CALL_END, XTML_TOOLS_END)


def xtml_calls(source: Source, writer: CallWriter, *, inside: bool = False) -> Scan[None]:
    """Kimi K3's calls, <|open|>call tool="NAME" index="1"<|sep|> …, and the end of the section.

    `inside` is after the first XTML_CALL.
    """
    if not inside:
        yield from source.skip_space()
        yield from source.expect(XTML_CALL)
    while True:
        yield from _xtml_call(source, writer)
        yield from source.skip_space()
        if not ((yield from source.any_left()) and (yield from source.next_of((XTML_CALL,)))):
            break
        source.take(len(XTML_CALL))
    yield from closing(source, writer, XTML_TOOLS_END)


def _xtml_call(source: Source, writer: CallWriter) -> Scan[None]:
    """The call whose name comes next. A value ends at its closing tag and another tag, so the first may be in it."""
    name = yield from tool_name(source, writer)
    yield from source.expect('"')
    yield from source.text_until(XTML_SEP)
    writer.begin(name)
    stops = [XTML_ARGUMENT_END + behind for behind in _AFTER_XTML_ARGUMENTS]
    while (tag := (yield from source.one_of((*_AFTER_XTML_ARGUMENTS, _JSON)))) == XTML_ARGUMENT:
        key = yield from source.text_until('"')
        yield from source.expect(' type="')
        kind = yield from source.text_until('"')
        yield from source.expect(XTML_SEP)
        writer.key(key.replace("&quot;", '"').replace("&amp;", "&"))
        yield from raw_value(source, {"string"} if kind == "string" else set(), stops, writer.write)
        yield from source.expect(XTML_ARGUMENT_END)
        writer.claim()
    if tag == _JSON:
        yield from json_arguments(source, writer.write)
        yield from closing(source, writer, _JSON_END, XTML_CALL_END)
    else:
        writer.end()


SOLAR_SECTION, SOLAR_SECTION_END = "<|tool_calls|>", "<|calls|>"
SOLAR_CALL, SOLAR_NAME, SOLAR_ARGUMENTS, SOLAR_CALL_END = (
    f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")
)
SOLAR_CALL_2, SOLAR_CALL_2_END = "<|tool_call:start|>", "<|tool_call:end|>"
SOLAR_ARGUMENT, SOLAR_VALUE, SOLAR_ARGUMENT_END = (f"<|tool_arg:{part}|>" for part in ("start", "value", "end"))
_ALPHANUMERIC = string.ascii_lowercase + string.digits
_ID_CHARACTERS = re.compile(r"[\w-]+")
_ID = re.compile(r"[a-z0-9]{10}")


def solar_id() -> str:
    """Solar's calls have ids of ten small letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(10))


def identified_calls(source: Source, writer: CallWriter, *, inside: bool = False) -> Scan[None]:
    """Solar Open's calls, each with its id, the function's name and {…}, and the end of the section.

    `inside` is after the first SOLAR_CALL. An id that the family would not write is replaced.
    """
    if not inside:
        yield from source.skip_space()
        yield from source.expect(SOLAR_CALL)
    while True:
        call_id = yield from _call_id(source)
        yield from source.expect(SOLAR_NAME)
        name = yield from tool_name(source, writer)
        yield from source.skip_space()
        yield from source.expect(SOLAR_ARGUMENTS)
        yield from named_arguments(source, writer, name, call_id if _ID.fullmatch(call_id) else None, (SOLAR_CALL_END,))
        yield from closing(source, writer, SOLAR_CALL_END)
        yield from source.skip_space()
        if not ((yield from source.any_left()) and (yield from source.next_of((SOLAR_CALL,)))):
            break
        source.take(len(SOLAR_CALL))
    yield from closing(source, writer, SOLAR_SECTION_END)


def _call_id(source: Source) -> Scan[str]:
    text = ""
    while (yield from source.any_left()) and (piece := source.take_run(_ID_CHARACTERS)):
        text += piece
    return text


def tagged_call(source: Source, writer: CallWriter) -> Scan[None]:
    """After Solar Open 2's SOLAR_CALL_2: the name, keys and raw values, whose SOLAR_ARGUMENT_END may be missing."""
    yield from source.skip_space()
    name = yield from tool_name(source, writer)
    writer.begin(name)
    yield from source.skip_space()
    while (yield from source.one_of((SOLAR_ARGUMENT, SOLAR_CALL_2_END))) == SOLAR_ARGUMENT:
        key = yield from source.text_until(SOLAR_VALUE)
        writer.key(key)
        stops = (SOLAR_ARGUMENT_END, SOLAR_ARGUMENT, SOLAR_CALL_2_END)
        stop = yield from raw_value(source, parameter_types(writer, name, key), stops, writer.write)
        if stop == SOLAR_ARGUMENT_END:
            yield from source.expect(stop)
            writer.claim()
        yield from source.skip_space()
    writer.end()
