"""Scanners of the calls of Solar Open and Solar Open 2, all of whose marks are tokens of their own."""

from __future__ import annotations

import re
import secrets
import string

from jaxllm.serving.parsing.calls import closing, named_arguments, tool_name
from jaxllm.serving.parsing.source import Scan, Source, any_left, expect, next_of, one_of, skip_space, text_until
from jaxllm.serving.parsing.values import parameter_types, raw_value
from jaxllm.serving.parsing.writer import CallWriter

SECTION, SECTION_END = "<|tool_calls|>", "<|calls|>"
CALL, NAME, ARGUMENTS, CALL_END = (f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end"))
CALL_2, CALL_2_END = "<|tool_call:start|>", "<|tool_call:end|>"
ARGUMENT, VALUE, ARGUMENT_END = (f"<|tool_arg:{part}|>" for part in ("start", "value", "end"))
_ALPHANUMERIC = string.ascii_lowercase + string.digits
_ID_CHARACTERS = re.compile(r"[\w-]+")
_ID = re.compile(r"[a-z0-9]{10}")


def solar_id() -> str:
    """Solar's calls have ids of ten small letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(10))


def identified_calls(source: Source, writer: CallWriter, *, inside: bool = False) -> Scan[None]:
    """CALL, the call's id, NAME, the function's name, ARGUMENTS, {…}, CALL_END, one after the other; SECTION_END.

    `inside` is behind the first CALL. An id that the family would not write is replaced.
    """
    if not inside:
        yield from skip_space(source)
        yield from expect(source, CALL)
    while True:
        call_id = yield from _call_id(source)
        yield from expect(source, NAME)
        name = yield from tool_name(source, writer)
        yield from skip_space(source)
        yield from expect(source, ARGUMENTS)
        yield from named_arguments(source, writer, name, call_id if _ID.fullmatch(call_id) else None, (CALL_END,))
        yield from closing(source, writer, CALL_END)
        yield from skip_space(source)
        if not ((yield from any_left(source)) and (yield from next_of(source, (CALL,)))):
            break
        source.take(len(CALL))
    yield from closing(source, writer, SECTION_END)


def _call_id(source: Source) -> Scan[str]:
    text = ""
    while (yield from any_left(source)) and (piece := source.take_run(_ID_CHARACTERS)):
        text += piece
    return text


def tagged_call(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind CALL_2: the name, ARGUMENT key VALUE raw value ARGUMENT_END …, CALL_2_END. ARGUMENT_END may be missing."""
    yield from skip_space(source)
    name = yield from tool_name(source, writer)
    writer.begin(name)
    yield from skip_space(source)
    while (yield from one_of(source, (ARGUMENT, CALL_2_END))) == ARGUMENT:
        key = yield from text_until(source, VALUE)
        writer.key(key)
        stops = (ARGUMENT_END, ARGUMENT, CALL_2_END)
        stop = yield from raw_value(source, parameter_types(writer, name, key), stops, writer.write)
        if stop == ARGUMENT_END:
            yield from expect(source, stop)
            writer.claim()
        yield from skip_space(source)
    writer.end()
