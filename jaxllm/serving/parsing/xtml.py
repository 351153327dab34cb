"""Scanner of Kimi K3's calls, whose tags are made of special tokens: <|open|>call tool="NAME" index="1"<|sep|>."""

from __future__ import annotations

from jaxllm.serving.parsing.calls import closing, json_arguments, tool_name
from jaxllm.serving.parsing.source import Scan, Source, any_left, expect, next_of, one_of, skip_space, text_until
from jaxllm.serving.parsing.values import raw_value
from jaxllm.serving.parsing.writer import CallWriter

SEP = "<|sep|>"
CALL = '<|open|>call tool="'
ARGUMENT = '<|open|>argument key="'
ARGUMENT_END = f"<|close|>argument{SEP}"
CALL_END = f"<|close|>call{SEP}"
TOOLS = f"<|open|>tools{SEP}"
TOOLS_END = f"<|close|>tools{SEP}"
_JSON, _JSON_END = '<|open|>json type="object"<|sep|>', f"<|close|>json{SEP}"
_BEHIND_ARGUMENTS = (ARGUMENT, CALL_END, TOOLS_END)


def xtml_calls(source: Source, writer: CallWriter, *, inside: bool = False) -> Scan[None]:
    """Calls one after the other, and the end of the section. `inside` is behind the first CALL."""
    if not inside:
        yield from skip_space(source)
        yield from expect(source, CALL)
    while True:
        yield from _call(source, writer)
        yield from skip_space(source)
        if not ((yield from any_left(source)) and (yield from next_of(source, (CALL,)))):
            break
        source.take(len(CALL))
    yield from closing(source, writer, TOOLS_END)


def _call(source: Source, writer: CallWriter) -> Scan[None]:
    """The call whose name comes next. A value ends at its closing tag and another tag, so the first may be in it."""
    name = yield from tool_name(source, writer)
    yield from expect(source, '"')
    yield from text_until(source, SEP)
    writer.begin(name)
    stops = [ARGUMENT_END + behind for behind in _BEHIND_ARGUMENTS]
    while (tag := (yield from one_of(source, (*_BEHIND_ARGUMENTS, _JSON)))) == ARGUMENT:
        key = yield from text_until(source, '"')
        yield from expect(source, ' type="')
        kind = yield from text_until(source, '"')
        yield from expect(source, SEP)
        writer.key(key.replace("&quot;", '"').replace("&amp;", "&"))
        yield from raw_value(source, {"string"} if kind == "string" else set(), stops, writer.write)
        yield from expect(source, ARGUMENT_END)
        writer.claim()
    if tag == _JSON:
        yield from json_arguments(source, writer.write)
        yield from closing(source, writer, _JSON_END, CALL_END)
    else:
        writer.end()
