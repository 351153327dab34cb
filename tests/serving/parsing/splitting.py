"""What the parsing tests share: tools, and answers fed in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from jaxllm.chat.conversation import Tool
from jaxllm.chat.events import ParsedOutput, Tags, ToolFormat, join_events
from jaxllm.chat.formats import detect_formats
from jaxllm.chat.parser import OutputParser
from jaxllm.text.reasoning import CHANNELS

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer"},
    },
    "required": ["city"],
}


def tool(name: str, parameters: dict | None = None, strict: bool = False) -> Tool:
    return Tool(name, parameters=parameters, strict=strict)


PARIS = '{"city": "Paris"}'
JSON_CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
PARIS_CALL = ("get_weather", PARIS)
TOOLS = [tool("get_weather", WEATHER), tool("get_time")]


def parser(tools: str, reasoning: str = "", *, in_reasoning: bool = False, parse_tools: bool = True) -> OutputParser:
    reasoning = reasoning or ("auto" if tools in CHANNELS else "think")
    formats = detect_formats(None, tools, reasoning)
    return OutputParser(formats, tools=TOOLS if parse_tools else [], in_reasoning=in_reasoning)


def parse_pieces(fresh: OutputParser, pieces: Iterable[str]) -> ParsedOutput:
    events = [event for piece in pieces for event in fresh.feed(piece)]
    return join_events(events + fresh.finish())


def seen(output: ParsedOutput) -> tuple:
    """An output without the calls' random ids."""
    return output.content, output.reasoning, [(call.name, call.arguments) for call in output.tool_calls]


def parse_whole(parser: OutputParser, text: str) -> ParsedOutput:
    """What a fresh `parser` finds in a whole answer."""
    return join_events([*parser.feed(text), *parser.finish()])


def parse_every_way(fresh: Callable[[], OutputParser], text: str) -> tuple:
    """What is seen of a text, which is the same fed whole and in pieces of 1, 3 and 7 characters."""
    whole = seen(parse_whole(fresh(), text))
    for size in (1, 3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert seen(parse_pieces(fresh(), pieces)) == whole, size
    return whole


def written(known: ToolFormat, *calls: tuple[str, dict]) -> str:
    """Calls as the format has them."""
    texts = []
    for name, arguments in calls:
        if known.arguments == "json":
            body = json.dumps(arguments)
        elif known.arguments == "gemma":
            values = {
                key: f"{known.quote}{value}{known.quote}" if isinstance(value, str) else json.dumps(value)
                for key, value in arguments.items()
            }
            body = "{" + ",".join(f"{key}:{value}" for key, value in values.items()) + "}"
        elif known.arguments == "pythonic":
            body = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        else:
            tags = known.arguments
            assert isinstance(tags, Tags)
            before, behind = tags.literal or ("", "")
            body = "".join(
                "".join(tags.open)
                .replace("{key}", key)
                .replace("{string}", str(isinstance(value, str)).lower())
                .replace("{type}", {str: "string", int: "number", list: "array"}[type(value)])
                + (f"{before}{value}{behind}" if any(char in str(value) for char in tags.markup) else str(value))
                + tags.close.replace("{key}", key)
                + tags.between * tags.exact
                for key, value in arguments.items()
            )
        texts.append(known.head(name, len(texts)) + body + known.written.end)
    return known.written.start + known.written.between.join(texts) + known.written.stop
