"""Scanners of tool calls whose arguments stand between marks of their own; they become JSON on the way."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxllm.chat import values
from jaxllm.chat.calls import closing, json_arguments, json_calls, marked, named_arguments, sections, tool_name
from jaxllm.chat.events import CallSyntax, CallWriter, Tags, ToolFormat, Written, random_id
from jaxllm.chat.source import MAX_DEPTH, MalformedError, Scan, Source, quoted_text

_BARE = re.compile(r"[^,:{}\[\]]+")


def _open(form: str, name: str) -> str:
    return f"<{form.format(name)}>"


def _close(form: str, name: str) -> str:
    return f"</{form.format(name)}>"


def keyed_call(
    source: Source, writer: CallWriter, *, form: str = "{}", separator: str = "", as_json: bool = False
) -> Scan[None]:
    """After <tool_call>: name, `separator`, keys and raw values between tags, </tool_call>; or JSON if `as_json`.

    `form` is what the family calls its tags, as in "ifm|{}": <arg_key>key</arg_key><arg_value>raw value</arg_value>; a
    value's type may be between the two, and </arg_value> missing where the text ends with </tool_call>.
    """
    key_tag, value_tag, close = _open(form, "arg_key"), _open(form, "arg_value"), _close(form, "tool_call")
    type_tag, end = _open(form, "arg_type"), _close(form, "arg_value")
    last = [before + close + after for before in ("", "\n") for after in ("", "\n")]
    yield from source.skip_space()
    if as_json and (yield from source.peek()) == "{":
        yield from json_calls(source, writer, close=close)
        return
    name = yield from tool_name(source, writer)
    writer.begin(name)
    yield from source.skip_space()
    if separator:
        yield from source.literal(separator)
    while (yield from source.one_of((key_tag, close), spaced=True)) == key_tag:
        key = (yield from source.text_until(_close(form, "arg_key"))).strip()
        yield from source.skip_space()
        types = values.parameter_types(writer, name, key)
        if (yield from source.one_of((value_tag, type_tag))) == type_tag:
            stated = (yield from source.text_until(_close(form, "arg_type"))).strip().lower()
            types = types or values.value_types({"type": stated}, {})
            yield from source.expect(value_tag, spaced=True)
        yield from values.raw_argument(source, writer, key, types, (end,), last)
    writer.end()


def keyed(name: str, form: str, separator: str, detect: tuple[str, ...] = (), variant_of: str = "") -> ToolFormat:
    scan = partial(keyed_call, form=form, separator=separator, as_json=True)
    start, call, stop = _open(form, "tool_calls"), _open(form, "tool_call"), _close(form, "tool_calls")
    key = f"{_open(form, 'arg_key')}{{key}}{_close(form, 'arg_key')}"
    names = ("tool_calls", "tool_call", "arg_key", "arg_value")
    markers = [mark for name in names for mark in (_open(form, name), _close(form, name))]
    return ToolFormat(
        name,
        sections(start, call, scan, stop, part=True),
        Written(start, f"{call}{{name}}{separator}", _close(form, "tool_call"), "\n", stop),
        arguments=Tags((key, _open(form, "arg_value")), _close(form, "arg_value")),
        detect=(detect,) if detect else (),
        markers=tuple(filter(None, (separator, *markers))),
        variant_of=variant_of,
    )


def function_tag(
    source: Source, writer: CallWriter, *, wrapper: str = "", wrapped: bool = False, verbatim: bool = False
) -> Scan[None]:
    """After <function=: name>, then {…} or <parameter=key>raw value</parameter> …, then </function>, and </`wrapper`>.

    It is after <`wrapper`> if `wrapped`. A value that is not `verbatim` may have newlines around it that are no part of
    it.
    """
    if wrapped:
        yield from source.expect("<function=", spaced=True)
    name = yield from tool_name(source, writer)
    yield from source.expect(">")
    yield from source.skip_space()
    ends = ("</function>", *([f"</{wrapper}>"] if wrapper else []))
    if (yield from source.peek()) == "{":
        yield from named_arguments(source, writer, name)
    else:
        writer.begin(name)
        yield from _parameters(source, writer, name, ends, verbatim)
    yield from closing(source, writer, *ends)


def _parameters(source: Source, writer: CallWriter, name: str, ends: Sequence[str], verbatim: bool) -> Scan[None]:
    """Up to and with one of `ends`. A value on lines of its own ends at a newline and a tag, another at a tag."""
    while (yield from source.one_of(("<parameter=", *ends), spaced=True)) not in ends:
        key = yield from source.text_until(">")
        line = not verbatim and (yield from source.peek()) == "\n" and (yield from source.literal("\n"))
        stops = ["</parameter>", "</function>", "<parameter="]
        if line:
            stops = ["\n" + stop for stop in stops]
        types = values.parameter_types(writer, name, key) or ({"string"} if verbatim else set())
        yield from values.raw_argument(source, writer, key, types, stops)
    writer.end()


def function_tags(name: str, wrapper: str, *detect: str, lines: bool = True, verbatim: bool = False) -> ToolFormat:
    """Calls as <function=…> tags within <`wrapper`>; values are written on `lines` of their own, or beside tags."""
    open, close = f"<{wrapper}>", f"</{wrapper}>"
    line = "\n" if lines else ""
    ends = rf"{line and chr(92) + 'n'}<(\/function>|parameter=)"
    tag = partial(function_tag, wrapper=wrapper, verbatim=verbatim)
    return ToolFormat(
        name,
        (*marked(partial(tag, wrapped=True), open), CallSyntax(tag, "<function=")),
        Written("", f"{open}\n<function={{name}}>\n", f"</function>\n{close}", "\n"),
        arguments=Tags((f"<parameter={{key}}>{line}",), f"{line}</parameter>", also_ends=ends, exact=True),
        detect=(detect,),
        markers=(open, close),
    )


def gemma_call(source: Source, writer: CallWriter, *, quote: str, close: str) -> Scan[None]:
    """call:name{key:value,…}: keys without quotes, strings between two `quote`s, the rest as in JSON."""
    yield from source.expect("call:")
    name = yield from tool_name(source, writer)
    if (yield from source.peek()) != "{":
        raise MalformedError
    writer.begin(name)
    yield from _gemma_object(source, writer, quote, writer.schemas[name])
    yield from closing(source, writer, close)


def _gemma_object(source: Source, writer: CallWriter, quote: str, root: Any) -> Scan[None]:
    """An object read as by json_value, with a stack of closers and what is expected next, and a stack of schemas."""
    write = writer.write
    closers: list[str] = []
    schemas: list[Any] = [root]
    expected = "value"
    while True:
        char = yield from source.peek(spaced=True)
        if closers and char == closers[-1] and expected in ("first key", "first value", "comma"):
            source.take(1)
            write(closers.pop())
            schemas.pop()
            expected = "comma"
        elif expected in ("value", "first value") and char in "{[":
            if len(closers) == MAX_DEPTH:
                raise MalformedError
            write(source.take(1))
            closers.append("}" if char == "{" else "]")
            schemas.append(values.followed(schemas[-1], root).get("items") if char == "[" else None)
            expected = "first key" if char == "{" else "first value"
        elif expected in ("value", "first value"):
            if (yield from _opens(source, quote)):
                write('"')
                yield from source.copy_until((quote,), lambda text: write(quoted_text(text)))
                yield from source.expect(quote)
                write('"')
            else:
                write(values.json_from_raw((yield from _bare(source)), values.value_types(schemas[-1], root)))
            expected = "comma"
        elif expected in ("key", "first key"):
            quoted = yield from _opens(source, quote)
            key = yield from (source.text_until(quote) if quoted else _bare(source))
            write(f'"{quoted_text(key)}":')
            yield from source.expect(":", spaced=True)
            schemas[-1] = values.properties_of(schemas[-2], root).get(key)
            expected = "value"
        elif char == ",":
            write(source.take(1))
            expected = "key" if closers[-1] == "}" else "value"
        else:
            raise MalformedError
        if not closers:
            return


def _opens(source: Source, quote: str) -> Scan[bool]:
    return (yield from source.peek()) == quote[0] and (yield from source.literal(quote))


def _bare(source: Source) -> Scan[str]:
    text = (yield from source.run(_BARE)).strip()
    if not text:
        raise MalformedError
    return text


def gemma(name: str, open: str, close: str, quote: str) -> ToolFormat:
    syntaxes = marked(partial(gemma_call, quote=quote, close=close), open)
    markers = (open, close, quote)
    return ToolFormat(
        name, syntaxes, Written("", f"{open}call:{{name}}", close), arguments="gemma", quote=quote, markers=markers
    )


XTML_SEP = "<|sep|>"
XTML_CALL = '<|open|>call tool="'
XTML_ARGUMENT = '<|open|>argument key="'
XTML_ARGUMENT_END = f"<|close|>argument{XTML_SEP}"
XTML_CALL_END = f"<|close|>call{XTML_SEP}"
XTML_TOOLS = f"<|open|>tools{XTML_SEP}"
XTML_TOOLS_END = f"<|close|>tools{XTML_SEP}"
_JSON, _JSON_END = '<|open|>json type="object"<|sep|>', f"<|close|>json{XTML_SEP}"
_AFTER_XTML_ARGUMENTS = (XTML_ARGUMENT, XTML_CALL_END, XTML_TOOLS_END)


def xtml_call(source: Source, writer: CallWriter) -> Scan[None]:
    """Kimi K3's call after XTML_CALL. A value ends at its closing tag and another tag, so the first may be in it."""
    name = yield from tool_name(source, writer)
    yield from source.expect('"')
    yield from source.text_until(XTML_SEP)
    writer.begin(name)
    stops = [XTML_ARGUMENT_END + after for after in _AFTER_XTML_ARGUMENTS]
    while (tag := (yield from source.one_of((*_AFTER_XTML_ARGUMENTS, _JSON)))) == XTML_ARGUMENT:
        key = yield from source.text_until('"')
        yield from source.expect(' type="')
        kind = yield from source.text_until('"')
        yield from source.expect(XTML_SEP)
        writer.key(key.replace("&quot;", '"').replace("&amp;", "&"))
        yield from values.raw_value(source, {"string"} if kind == "string" else set(), stops, writer.write)
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
_ID_CHARACTERS = re.compile(r"[\w-]+")
_ID = re.compile(r"[a-z0-9]{10}")


def identified_call(source: Source, writer: CallWriter) -> Scan[None]:
    """Solar Open's call after SOLAR_CALL: its id, replaced if the family would not write it, the name, and {…}."""
    call_id = yield from source.run(_ID_CHARACTERS)
    yield from source.expect(SOLAR_NAME)
    name = yield from tool_name(source, writer)
    yield from source.expect(SOLAR_ARGUMENTS, spaced=True)
    yield from named_arguments(source, writer, name, call_id if _ID.fullmatch(call_id) else None, (SOLAR_CALL_END,))
    yield from closing(source, writer, SOLAR_CALL_END)


def tagged_call(source: Source, writer: CallWriter) -> Scan[None]:
    """After Solar Open 2's SOLAR_CALL_2: the name, keys and raw values, whose SOLAR_ARGUMENT_END may be missing."""
    yield from source.skip_space()
    name = yield from tool_name(source, writer)
    writer.begin(name)
    while (yield from source.one_of((SOLAR_ARGUMENT, SOLAR_CALL_2_END), spaced=True)) == SOLAR_ARGUMENT:
        key = yield from source.text_until(SOLAR_VALUE)
        stops = (SOLAR_ARGUMENT_END, SOLAR_ARGUMENT, SOLAR_CALL_2_END)
        yield from values.raw_argument(source, writer, key, values.parameter_types(writer, name, key), stops)
    writer.end()


SOLAR_OPEN = ToolFormat(
    "solar_open",
    sections(SOLAR_SECTION, SOLAR_CALL, identified_call, SOLAR_SECTION_END),
    Written(SOLAR_SECTION, f"{SOLAR_CALL}{{id}}{SOLAR_NAME}{{name}}{SOLAR_ARGUMENTS}", SOLAR_CALL_END),
    thought=("<|think|>", "<|end|><|begin|>assistant"),
    detect=((SOLAR_CALL,),),
    markers=(SOLAR_SECTION, SOLAR_SECTION_END, SOLAR_CALL, SOLAR_NAME, SOLAR_ARGUMENTS, SOLAR_CALL_END),
    new_id=partial(random_id, string.ascii_lowercase + string.digits, 10),
)
SOLAR_OPEN2 = ToolFormat(
    "solar_open2",
    marked(tagged_call, SOLAR_CALL_2),
    Written("", f"{SOLAR_CALL_2}{{name}}\n", SOLAR_CALL_2_END, "\n"),
    arguments=Tags((f"{SOLAR_ARGUMENT}{{key}}{SOLAR_VALUE}",), SOLAR_ARGUMENT_END),
    markers=(SOLAR_CALL_2, SOLAR_CALL_2_END, SOLAR_ARGUMENT, SOLAR_VALUE, SOLAR_ARGUMENT_END),
)
KIMI_K3 = ToolFormat(
    "kimi_k3",
    sections(XTML_TOOLS, XTML_CALL, xtml_call, XTML_TOOLS_END),
    Written(XTML_TOOLS, f'{XTML_CALL}{{name}}" index="{{index}}"{XTML_SEP}', XTML_CALL_END, "", XTML_TOOLS_END),
    arguments=Tags((f'{XTML_ARGUMENT}{{key}}" type="{{type}}"{XTML_SEP}',), XTML_ARGUMENT_END, exact=True, between=""),
    detect=(("'<|open|>'", "'tools'"), (XTML_TOOLS,)),
    markers=("<|open|>", "<|close|>", XTML_SEP),
)
