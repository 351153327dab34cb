"""Scanners of calls that are elements, with their arguments in elements or attributes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any
from xml.sax.saxutils import unescape

from jaxllm.chat import values
from jaxllm.chat.calls import closing, either, marked, sections, tool_name
from jaxllm.chat.events import CallSyntax, CallWriter, Tags, ToolFormat, Written
from jaxllm.chat.source import Emit, MalformedError, Scan, Source, quoted_text

MAX_NESTING = 64
"""Of elements, each level of which takes some of Python's stack."""
MARK = "]<]minimax[>["
CALLS, CALLS_END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END = f'{MARK}<invoke name="', f"{MARK}</invoke>"
_TEXT = "$text"
"""The key of text that stands beside elements."""

_Element = str | list[tuple[str, Any]]
"""An element's text, or the names and values of those in it."""


def element_call(source: Source, writer: CallWriter) -> Scan[None]:
    """MiniMax M3's call after INVOKE, given when it is complete: an element that comes again makes an array of them."""
    name = yield from tool_name(source, writer)
    yield from source.expect('">')
    found: list[tuple[str, Any]] = []
    while (yield from source.one_of((INVOKE_END, f"{MARK}<"), spaced=True)) != INVOKE_END:
        found.append((yield from _element(source, 1)))
    writer.begin(name)
    root = writer.schemas[name]
    writer.write(json.dumps(_object(found, root, root), ensure_ascii=False))


def _element(source: Source, depth: int) -> Scan[tuple[str, _Element]]:
    name = yield from source.text_until(">")
    if depth > MAX_NESTING or not name.strip() or name.startswith("/"):
        raise MalformedError
    text: list[str] = []
    inner: list[tuple[str, Any]] = []
    close = f"{MARK}</{name}>"
    while True:
        yield from source.copy_until((MARK,), text.append)
        if (yield from source.one_of((close, f"{MARK}<"))) == close:
            break
        inner.append((yield from _element(source, depth + 1)))
    whole = "".join(text)
    if not inner:
        return name, whole
    if whole.strip():
        inner.append((_TEXT, whole))
    return name, inner


def _value(element: _Element, schema: Any, root: Any) -> Any:
    types = values.value_types(schema, root)
    if not isinstance(element, str):
        if "array" in types:
            items = _of_kind(schema, root, "array").get("items")
            return [_value(inner, items, root) for _, inner in element]
        return _object(element, _of_kind(schema, root, "object"), root)
    if types and "string" not in types and not element.strip():
        return [] if "array" in types else {} if "object" in types else element
    return json.loads(values.json_from_raw(element, types))


def _object(elements: list[tuple[str, Any]], schema: Any, root: Any) -> dict[str, Any]:
    properties = values.properties_of(schema, root)
    found: dict[str, list[Any]] = {}
    for name, element in elements:
        found.setdefault(name, []).append(_value(element, properties.get(name), root))
    return {name: same[0] if len(same) == 1 else same for name, same in found.items()}


def _of_kind(schema: Any, root: Any, kind: str) -> dict[str, Any]:
    """The schema itself, or the first of those that it joins, that describes values of this kind."""
    whole = values.followed(schema, root)
    options = [option for union in ("anyOf", "oneOf") for option in whole.get(union) or ()]
    return next(
        (values.followed(option, root) for option in options if kind in values.value_types(option, root)), whole
    )


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

    `prefix` begins the tags' names. `inside` is after the first <invoke name=". A closing tag may be missing where
    another tag, one of `after`, or the end of the text follows. `doubled` is tool_name's.
    """
    opening = f'<{prefix}invoke name="'
    if not inside:
        yield from source.expect(opening, spaced=True)
    while True:
        tag = yield from _invocation(source, writer, prefix, end, after, doubled)
        yield from source.skip_space()
        if tag != opening and not ((yield from source.any_left()) and (yield from source.literal(opening))):
            break
    yield from closing(source, writer, end)


def step_calls(source: Source, writer: CallWriter, *, inside: bool = False) -> Scan[None]:
    """Step's calls, each in a STEP_CALL, and the end of the section. `inside` is after the first STEP_CALL."""
    more = (STEP_SEPARATOR, STEP_CALL)
    after = (*more, STEP_CALLS_END)
    if not inside:
        yield from source.expect(STEP_CALL, spaced=True)
    while True:
        if (yield from source.peek(spaced=True)) == "f":
            yield from source.expect(f"function{STEP_SEPARATOR}")
        yield from source.expect('<steptml:invoke name="', spaced=True)
        if (yield from _invocation(source, writer, "steptml:", STEP_CALL_END, after)) != STEP_CALL_END:
            yield from closing(source, writer, STEP_CALL_END)
        yield from source.skip_space()
        if not ((yield from source.any_left()) and (tag := (yield from source.next_of(more)))):
            break
        source.take(len(tag))
        if tag == STEP_SEPARATOR:
            yield from source.expect(STEP_CALL, spaced=True)
    yield from closing(source, writer, STEP_CALLS_END)


def _invocation(
    source: Source, writer: CallWriter, prefix: str, end: str, after: Sequence[str], doubled: bool = False
) -> Scan[str]:
    """The call whose name comes next; the tag that ended it. `after` are tags that no call is ended by."""
    name = yield from tool_name(source, writer, doubled=doubled)
    writer.begin(name)
    if (yield from source.one_of(('"/>', '">'))) == '"/>':
        writer.end()
        return ""
    opening = f'<{prefix}invoke name="'
    parameter, finished = f'<{prefix}parameter name="', f"</{prefix}invoke>"
    unknown = list(values.properties_of(writer.schemas[name], writer.schemas[name]))
    while (tag := (yield from source.one_of((parameter, finished, end, opening), spaced=True))) == parameter:
        key = yield from source.text_until('"')
        stated = yield from source.one_of((*_STATED, ">"), spaced=True)
        types = _STATED[stated] if stated in _STATED else values.parameter_types(writer, name, key)
        close = f"</{prefix}parameter>"
        unknown = [other for other in unknown if other != key]
        stops = [f'{parameter}{other}"' for other in unknown]
        stops += [f"{finished}{space}{tag}" for space in ("", "\n") for tag in (end, opening, *after)]
        stops += [f"\n{stop}" for stop in stops]
        last = [f"{before}{finished}{behind}" for before in ("", "\n") for behind in ("", "\n")]
        yield from values.raw_argument(source, writer, key, types, (close, *stops), last)
    writer.end()
    return tag


FUNCTION, FUNCTION_END = "<function", "</function>"
PARAM, PARAM_END = "<param", "</param>"
CDATA, CDATA_END = "<![CDATA[", "]]>"
NAMES = (" name=", "name=")
"""What follows the tags' names; models write the second where <function is a token and the space is lost."""
_PARAMS = tuple(PARAM + name for name in NAMES)
_QUOTES = ('"', "'")
_ENTITIES = {"&quot;": '"', "&apos;": "'"}


def function_elements(source: Source, writer: CallWriter) -> Scan[None]:
    """MiniCPM5's call after <function name=: the name in quotes, >, parameters, and </function>."""
    quote = yield from source.one_of(_QUOTES)
    name = yield from tool_name(source, writer)
    yield from source.expect(f"{quote}>")
    writer.begin(name)
    while (yield from source.one_of((*_PARAMS, FUNCTION_END), spaced=True)) != FUNCTION_END:
        quote = yield from source.one_of(_QUOTES)
        key = yield from source.text_until(quote)
        yield from source.expect(">")
        writer.key(key)
        yield from _param_value(source, values.parameter_types(writer, name, key), writer.write)
        writer.claim()
    writer.end()


def _param_value(source: Source, types: set[str], write: Emit) -> Scan[None]:
    """A value and </param>, which may be missing: text as it is in CDATA, or alone, where a string has entities."""
    start = source.position
    yield from source.skip_space()
    if (yield from source.next_of((CDATA,))):
        source.take(len(CDATA))
        stops = [f"{CDATA_END}{space}{PARAM_END}" for space in ("", "\n")]
        stop = yield from values.raw_value(source, types, stops, write)
        yield from source.expect(stop)
        return
    source.put_back(source.position - start)
    pieces: list[str] = []
    stop = yield from source.copy_until((PARAM_END, FUNCTION_END, *_PARAMS), pieces.append)
    text = "".join(pieces)
    write(f'"{quoted_text(unescape(text, _ENTITIES))}"' if types == {"string"} else values.json_from_raw(text, types))
    if stop == PARAM_END:
        yield from source.expect(stop)


STEP3 = ToolFormat(
    "step3",
    either(step_calls, STEP_CALLS, STEP_CALL),
    Written(
        STEP_CALLS,
        f'{STEP_CALL}function{STEP_SEPARATOR}<steptml:invoke name="{{name}}">\n',
        f"</steptml:invoke>{STEP_CALL_END}",
        "\n",
        STEP_CALLS_END,
    ),
    arguments=Tags(('<steptml:parameter name="{key}">',), "</steptml:parameter>"),
    detect=(("<steptml:",), (STEP_CALLS,)),
    markers=(STEP_CALLS, STEP_CALLS_END, STEP_CALL, STEP_CALL_END, STEP_SEPARATOR),
)
MINICPM5 = ToolFormat(
    "minicpm5",
    tuple(CallSyntax(function_elements, FUNCTION + name, ends_reasoning=True) for name in NAMES),
    Written("", f'{FUNCTION} name="{{name}}">', FUNCTION_END, "\n"),
    marked=f'{FUNCTION} name="',
    arguments=Tags(
        (f'{PARAM} name="{{key}}">',), PARAM_END, exact=True, between="", literal=(CDATA, CDATA_END), markup="<&\n"
    ),
    detect=((f"{FUNCTION} name=", f"{PARAM} name="),),
    markers=(FUNCTION, FUNCTION_END, PARAM, PARAM_END),
)
MINIMAX_M3 = ToolFormat(
    "minimax_m3",
    sections(CALLS, INVOKE, element_call, CALLS_END),
    Written(f"{CALLS}\n", f'{INVOKE}{{name}}">', f"{INVOKE_END}\n", "", CALLS_END),
    arguments=Tags((f"{MARK}<{{key}}>",), f"{MARK}</{{key}}>", exact=True, between=""),
    detect=((MARK,),),
    markers=(MARK,),
)


def invoked(name: str, prefix: str, calls: str, *, typed: bool = False, alone: bool = True) -> ToolFormat:
    """Calls as <invoke> tags within <`calls`>, or `alone`. If `typed`, each argument says if it is text or JSON."""
    open, close = f"<{calls}>", f"</{calls}>"
    parameter = f'<{prefix}parameter name="{{key}}"' + (' string="{string}">' if typed else ">")
    scan = partial(invoked_calls, prefix=prefix, end=close)
    parts = ((prefix, calls.removeprefix(prefix)),) if prefix and not prefix.endswith(" ") else ()
    return ToolFormat(
        name,
        either(scan, open, f'<{prefix}invoke name="') if alone else marked(scan, open),
        Written(f"{open}\n", f'<{prefix}invoke name="{{name}}">\n', f"</{prefix}invoke>\n", "", close),
        arguments=Tags((parameter,), f"</{prefix}parameter>"),
        detect=((open,), *parts),
        markers=(prefix.strip(),) if prefix else (open, close),
    )
