"""Scanner of MiniCPM5's calls: <function name="NAME"><param name="KEY">value</param></function>, as in XML."""

from __future__ import annotations

from xml.sax.saxutils import unescape

from jaxllm.serving.parsing.calls import tool_name
from jaxllm.serving.parsing.json_text import quoted_text
from jaxllm.serving.parsing.source import (
    Emit,
    Scan,
    Source,
    copy_until,
    expect,
    next_of,
    one_of,
    skip_space,
    text_until,
)
from jaxllm.serving.parsing.values import json_from_raw, parameter_types, raw_value
from jaxllm.serving.parsing.writer import CallWriter

FUNCTION, FUNCTION_END = "<function", "</function>"
PARAM, PARAM_END = "<param", "</param>"
CDATA, CDATA_END = "<![CDATA[", "]]>"
NAMES = (" name=", "name=")
"""What follows the tags' names; models write the second where <function is a token and the space is lost."""
_PARAMS = tuple(PARAM + name for name in NAMES)
_QUOTES = ('"', "'")
_ENTITIES = {"&quot;": '"', "&apos;": "'"}


def function_elements(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind <function name=: the name in quotes, >, parameters, and </function>."""
    quote = yield from one_of(source, _QUOTES)
    name = yield from tool_name(source, writer)
    yield from expect(source, f"{quote}>")
    writer.begin(name)
    yield from skip_space(source)
    while (yield from one_of(source, (*_PARAMS, FUNCTION_END))) != FUNCTION_END:
        quote = yield from one_of(source, _QUOTES)
        key = yield from text_until(source, quote)
        yield from expect(source, ">")
        writer.key(key)
        yield from _value(source, parameter_types(writer, name, key), writer.write)
        writer.claim()
        yield from skip_space(source)
    writer.end()


def _value(source: Source, types: set[str], write: Emit) -> Scan[None]:
    """A value and </param>, which may be missing: text as it is in CDATA, or alone, where a string has entities."""
    start = source.position
    yield from skip_space(source)
    if (yield from next_of(source, (CDATA,))):
        source.take(len(CDATA))
        stops = [f"{CDATA_END}{space}{PARAM_END}" for space in ("", "\n")]
        stop = yield from raw_value(source, types, stops, write)
        yield from expect(source, stop)
        return
    source.put_back(source.position - start)
    pieces: list[str] = []
    stop = yield from copy_until(source, (PARAM_END, FUNCTION_END, *_PARAMS), pieces.append)
    text = "".join(pieces)
    write(f'"{quoted_text(unescape(text, _ENTITIES))}"' if types == {"string"} else json_from_raw(text, types))
    if stop == PARAM_END:
        yield from expect(source, stop)
