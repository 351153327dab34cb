"""The text that an answer must match, and grammars that make a model call tools.

The grammars are in llguidance's Lark dialect (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), in
which a marker that is a special token of the model's is written as that token's id.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jaxllm.chat.conversation import Conversation, NamedTool, Tool, ToolChoice
from jaxllm.chat.custom import INPUT, PARAMETERS, TextInput
from jaxllm.chat.events import OutputFormats, Tags, ToolFormat
from jaxllm.chat.values import followed, text_limits, value_types
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.closed_schema import closed
from jaxllm.requests.schema import UnenforceableError, plain
from jaxllm.requests.structured_outputs import JSON_OPTIONS, StructuredOutputs, ascii_classes, compile_grammar
from jaxllm.text.reasoning import ReasoningFormat

CONSTRAINT = Field("structured_outputs")
"""The field of what the request itself asks of the text."""
BLAME_SECONDS = 10.0
"""For how long the tool that cannot be enforced is looked for."""


def answer_constraint(
    conversation: Conversation,
    formats: OutputFormats,
    prompt_text: str,
    *,
    in_reasoning: bool,
    special_tokens: Mapping[str, int],
) -> StructuredOutputs | None:
    """The constraint on a conversation's answers after their reasoning; None where anything may come.

    Tools and a constraint on the text allow either. Raises InvalidRequestError naming the field.
    """
    tools, choice, asked = conversation.tools, conversation.tool_choice, conversation.structured_outputs
    for tool in tools:
        if tool.text_input is not None and tool.strict:
            compiled(tool.text_input.outputs(), tool.parameters_field)
    if asked is not None and asked.after is not None and not tools:
        return compiled(asked)  # it says itself what comes before it
    after = _reasoning_end(formats.reasoning, prompt_text, in_reasoning, conversation.rendering.thinks)
    answer = asked and replace(asked, after=after)
    calls = partial(
        tool_constraint,
        formats,
        tools,
        parallel=conversation.parallel_tool_calls,
        after=after,
        special_tokens=special_tokens,
        in_reasoning=in_reasoning,
    )
    if not tools:
        constraint = compiled(answer)
    elif choice != "auto" or answer is None:
        constraint = _compiled_calls(lambda: calls(choice), tools)
    elif formats.channels or (formats.tools and formats.tools.thought):
        raise _needs_choice(answer)
    else:
        compiled(answer)
        constraint = _compiled_calls(lambda: _either(calls("required"), answer), tools)
    if constraint is None or constraint.after is None or in_reasoning or formats.reasoning is None:
        return constraint
    return replace(constraint, openings=formats.reasoning.openings)


def _reasoning_end(
    reasoning: ReasoningFormat | None, prompt_text: str, in_reasoning: bool, thinks: bool | None
) -> str | None:
    """The text that ends the reasoning which the answer to a prompt may begin with; None where it has none."""
    if reasoning is None:
        return None
    if reasoning.answer:
        return reasoning.answer
    none_left = prompt_text.rstrip().endswith(reasoning.close) or thinks is False
    return reasoning.close if in_reasoning or not none_left else None


def compiled(constraint: StructuredOutputs | None, field: Field = CONSTRAINT) -> StructuredOutputs | None:
    """The same constraint, known to be enforceable. Raises InvalidRequestError of `field`."""
    if constraint is not None:
        try:
            compile_grammar(constraint)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), field) from None
    return constraint


def _compiled_calls(calls: Callable[[], StructuredOutputs | None], tools: Sequence[Tool]) -> StructuredOutputs | None:
    """The constraint that `calls` makes, known to be enforceable. Raises InvalidRequestError of the tool to blame."""
    deadline = time.monotonic() + BLAME_SECONDS
    try:
        return compiled(calls())
    except (InvalidRequestError, UnenforceableError) as error:
        for tool in tools:
            if time.monotonic() < deadline:
                _check_parameters(tool)
        raise InvalidRequestError(["the ", Field("tools"), f" cannot be called as asked: {error}"]) from None


def _object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments, which are an object. Raises InvalidRequestError: it does not allow one."""
    schema = tool.parameters or _EMPTY_OBJECT
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        problem = f" (of {tool.name!r}) is a schema of type {types!r}; arguments are an object"
        raise InvalidRequestError([tool.parameters_field, problem])
    return {**schema, "type": "object"}


def _check_parameters(tool: Tool) -> None:
    if tool.text_input is not None:
        return  # its grammar is known to be enforceable by itself
    schema = {**_object_schema(tool), "x-guidance": {"lenient": not tool.strict}}
    try:
        compile_grammar(StructuredOutputs(json=json.dumps(schema)))
    except InvalidRequestError as error:
        _, problem = error.pieces
        raise InvalidRequestError([tool.parameters_field, f" (of {tool.name!r}){problem}"]) from None


def _either(calls: StructuredOutputs | None, answer: StructuredOutputs) -> StructuredOutputs:
    assert calls is not None
    match answer.kind:
        case "json" | "json_object":
            schema = json.loads(answer.json) if answer.json is not None else {"type": "object"}
            text = "%json " + json.dumps({**closed(plain(schema)), "x-guidance": JSON_OPTIONS})
        case "choice":
            text = " | ".join(map(json.dumps, answer.choice or ()))
        case "regex":
            escaped = ascii_classes(answer.regex or "").replace("/", r"\/")
            text = f"/{escaped}/"
        case _:
            raise _needs_choice(answer)
    header, rules = (calls.grammar or "").split("\nstart: ", 1)
    grammar = f"{header}\nstart: calls_alone | answer_text\nanswer_text: {text}\ncalls_alone: {rules}"
    return StructuredOutputs(grammar=grammar, after=calls.after)


def _needs_choice(answer: StructuredOutputs) -> InvalidRequestError:
    problem = f" ({answer.kind}) with tools needs a tool_choice: none to answer, required to call"
    return InvalidRequestError([CONSTRAINT, problem])


_Value = Callable[[str, Any, dict[str, Any], bool], str]
_MARKER = r"<\|[a-z]+\|>"
"""What may end a message, or begin another, in a thought that comes before calls."""
_NUMBERS = {"{index}": ("INDEX", "/[0-9]{1,3}/"), "{id}": ("CALL_ID", "/[a-z0-9]{10}/")}
"""How calls are numbered and named where the model does it: the rule, and what it allows."""
_PLACE = re.compile(f"({'|'.join(map(re.escape, _NUMBERS))})")
_GRAMMAR = "x-grammar"
"""In a schema: the TextInput that says which texts its string may be."""
_EMPTY_OBJECT = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_constraint(
    formats: OutputFormats,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
    after: str | None,
    special_tokens: Mapping[str, int],
    in_reasoning: bool = False,
) -> StructuredOutputs | None:
    """The grammar that makes the model call as asked, in the format of `formats`; None where nothing can be enforced.

    With `parallel` there may be several calls, but one of a NamedTool. Keywords that llguidance does not enforce are
    ignored for tools that aren't strict. A `choice` of "auto" is constrained only after the mark of a call, if some
    tool is strict and there is a mark. `after` is the text at which the constraint begins, such as "</think>";
    `in_reasoning` tells that the prompt has opened the thought, where the format has one.
    """
    if formats.tools is None:
        return None
    after = None if formats.tools.thought else after
    writer = _Grammar(formats.tools, special_tokens)
    if choice == "auto":
        if not formats.tools.mark or not any(tool.strict for tool in tools):
            return None
        return StructuredOutputs(grammar=writer.auto(tools, formats.reasoning, parallel), after=after)
    if isinstance(choice, NamedTool):
        tools, parallel = [tool for tool in tools if tool.name == choice.name], False
    grammar = writer.required(tools, parallel, leading_space=after is not None, in_reasoning=in_reasoning)
    return StructuredOutputs(grammar=grammar, after=after)


class _Grammar:
    def __init__(self, tool_format: ToolFormat, special_tokens: Mapping[str, int]):
        self._format = tool_format
        self._written = tool_format.written
        self._special = {text: f"<[{token_id}]>" for text, token_id in special_tokens.items()}
        texts = sorted(filter(None, self._special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        self._rules: dict[str, str] = {}

    def required(self, tools: Sequence[Tool], parallel: bool, *, leading_space: bool, in_reasoning: bool) -> str:
        calls = self._calls(tools, lenient=True)
        repeated = f" ({self._text(self._written.between)} call)*" if parallel else ""
        before = ""
        if leading_space:
            self._rules["SPACE"] = r"/[ \n]{1,8}/"
            before = "SPACE? "
        self._rules["call"] = calls
        if self._format.thought is not None:
            open, close = self._format.thought
            thinking = self._raw_text("thinking", close, also_ends=_MARKER)
            self._rules["thought"] = thinking if in_reasoning else f"{self._text(open)} {thinking}"
            before = "thought " if in_reasoning else "thought? "
        return self._lark(f"{before}{self._text(self._written.start)} call{repeated} {self._text(self._written.stop)}")

    def auto(self, tools: Sequence[Tool], reasoning: ReasoningFormat | None, parallel: bool) -> str:
        """Free text; after the mark a call, and then free text again."""
        start, mark = self._written.start, self._format.mark
        parts = [f"({self._trigger(mark, reasoning)})"]
        self._rules["call"] = self._calls(tools, lenient=False, skip=0 if start else len(mark))
        if start:
            repeated = [f"({self._text(self._written.between)} call)*"] if parallel else []
            parts += [self._text(start.removeprefix(mark)), "call", *repeated, self._text(self._written.stop)]
        else:
            parts.append("call")
        self._rules["calls"] = " ".join(parts)
        return self._lark("calls* prose" if parallel else "calls | prose")

    def _trigger(self, mark: str, known: ReasoningFormat | None) -> str:
        """Free text up to and with `mark`; reasoning's marks, with the special tokens in them, may be in it."""
        self._rules["TEXT"] = r"/(.|\n)*/"
        marks = (*known.opens, *known.closes, *known.around) if known and self._split else ()
        special = {self._text(text): None for text in marks if self._split and self._split.search(text)}
        others = f"({' | '.join(special)})"
        self._rules["prose"] = f"TEXT ({others} TEXT)*" if special else "TEXT"
        first = self._split.search(mark) if self._split else None
        if first is None:
            self._rules["trigger[lazy]"] = f"TEXT {_quoted(mark)}"
            return f"prose {others} trigger | trigger" if special else "trigger"
        before, rest = mark[: first.start()], self._text(mark[first.start() :])
        if not before:
            return f"prose {rest}"
        self._rules["BEFORE"] = rf"/(.|\n)*{re.escape(before)}/"
        return f"(TEXT {others})* BEFORE {rest}" if special else f"BEFORE {rest}"

    def _calls(self, tools: Sequence[Tool], lenient: bool, skip: int = 0) -> str:
        alternatives = []
        for at, tool in enumerate(tools):
            parameters = _object_schema(tool)
            if not lenient and not tool.strict:
                parameters = {"type": "object"}
            elif tool.text_input is not None and tool.strict:
                properties = {INPUT: {"type": "string", _GRAMMAR: tool.text_input}}
                parameters = {**PARAMETERS, "properties": properties, _GRAMMAR: tool.text_input}
            head = self._head(tool.name, skip)
            arguments = self._arguments(f"f{at}", parameters, strict=tool.strict)
            alternatives.append(f"{head} {arguments} {self._text(self._written.end)}")
        return " | ".join(alternatives)

    def _head(self, name: str, skip: int) -> str:
        parts = []
        for part in _PLACE.split(self._written.call[skip:].replace("{name}", name)):
            if part in _NUMBERS:
                rule, pattern = _NUMBERS[part]
                self._rules[rule] = pattern
                parts.append(rule)
            else:
                parts.append(self._text(part))
        return " ".join(filter(None, parts))

    def _arguments(self, rule: str, parameters: dict[str, Any], strict: bool) -> str:
        match self._format.arguments:
            case "json" if (asked := _input_grammar(parameters)) is not None:
                value = self._quoted_input(rule, asked)
                self._rules[rule] = rf'/\{{[ \n]?"{INPUT}":[ ]?/ {value} /[ \n]?\}}/'
                return rule
            case "json":
                self._rules[rule] = _json_rule(parameters, strict)
                return rule
            case "gemma":
                return self._members(rule, parameters, strict, ("{", ":", ",", "}"), self._gemma_value)
            case "pythonic":
                return self._members(rule, parameters, strict, ("", "=", ", ", ""), self._pythonic_value)
            case tags:
                return self._tagged_arguments(rule, parameters, strict, tags)

    def _tagged_arguments(self, rule: str, parameters: dict[str, Any], strict: bool, tags: Tags) -> str:
        """Properties in the schema's order, each as key and raw value."""
        newline = _quoted(tags.between) if tags.exact else r'"\n"?'
        parts = [] if tags.exact else [newline]
        for at, (key, schema) in enumerate(parameters.get("properties", {}).items()):
            types = value_types(schema, parameters)
            is_text = "true" if types == {"string"} else "false"
            named = types - {"integer"} if "number" in types else types
            stated = next(iter(named)).replace("integer", "number") if len(named) == 1 else "object"
            opening = (
                part.replace("{string}", is_text).replace("{type}", stated).replace("{key}", key) for part in tags.open
            )
            own = replace(tags, close=tags.close.replace("{key}", key))
            value = self._raw_value(f"{rule}_{at}", schema, parameters, own, strict)
            self._rules[f"{rule}_{at}"] = f"{f' {newline} '.join(map(self._text, opening))} {value} {newline}"
            parts.append(f"{rule}_{at}" + ("" if key in parameters.get("required", ()) else "?"))
        self._rules[rule] = " ".join(parts) or '""'
        return rule

    def _raw_value(self, rule: str, schema: Any, root: dict[str, Any], tags: Tags, strict: bool) -> str:
        if value_types(schema, root) != {"string"}:
            return f"{self._json(rule, schema, root, strict)} {self._text(tags.close)}"
        schema = followed(schema, root)
        if (asked := _input_grammar(schema)) is not None:
            opening, closing = tags.literal or ("", "")
            self._rules[f"{rule}_input"] = asked.lark(in_json=False)
            around = _quoted(opening), f"{rule}_input", self._text(closing + tags.close)
            return " ".join(filter(None, around))
        if tags.literal is not None:
            return self._text_or_literal(rule, schema, tags, tags.literal, strict)
        if choices := _choices(schema):
            return f"({choices}) {self._text(tags.close)}"
        return self._raw_text(f"{rule}_text", tags.close, text_limits(schema, strict), tags.also_ends)

    def _text_or_literal(
        self, rule: str, schema: dict[str, Any], tags: Tags, around: tuple[str, str], strict: bool
    ) -> str:
        """Text without markup, or any text with `around` around it."""
        opening, closing = around
        if values := _allowed_texts(schema):
            marked = {value for value in values if any(char in value for char in tags.markup)}
            texts = (f"{opening}{value}{closing}" if value in marked else value for value in values)
            return f"({' | '.join(map(_json_text, texts))}) {self._text(tags.close)}"
        limits = text_limits(schema, strict)
        plain_text = self._raw_text(f"{rule}_text", tags.close, limits, also_ends=f"[{tags.markup}]")
        literal = f"{_quoted(opening)} {self._raw_text(f'{rule}_literal', closing, limits)} {self._text(tags.close)}"
        self._rules[f"{rule}_either"] = f"{plain_text} | {literal}"
        return f"{rule}_either"

    def _raw_text(self, rule: str, close: str, limits: Sequence[str] = (), also_ends: str = "") -> str:
        """Text that matches all of the regular expressions `limits`, up to the first `close`, and `close`."""
        name = rule.upper()
        special = self._split.search(close) if self._split else None
        ends = [also_ends] if also_ends else []
        if special is None and limits:  # what they allow may go on behind `close`
            ends.append(re.escape(close).replace("/", r"\/").replace("\\\n", r"\n"))
        for at, limit in enumerate(limits or [r"(.|\n)*"]):
            self._rules[f"{name}_L{at}"] = f"/{limit}/"
        parts = [f"{name}_L{at}" for at in range(max(len(limits), 1))]
        parts += [f"~/(?s:.*)({end})(?s:.*)/" for end in ends]
        self._rules[f"{name}_VALUE"] = " & ".join(parts)
        before = close if special is None else close[: special.start()]
        self._rules[name] = f"{name}_VALUE {_quoted(before)}"
        if special is not None:
            return f"{name} {self._text(close[special.start() :])}"
        self._rules[f"{rule}[lazy]"] = name
        return rule

    def _members(
        self, rule: str, parameters: dict[str, Any], strict: bool, marks: tuple[str, str, str, str], value: _Value
    ) -> str:
        """Properties in the schema's order; `marks` open, follow a key, part those that are there, and close."""
        opens, colon, comma, closes = marks
        properties = list(parameters.get("properties", {}).items())
        last = f"{rule}_{len(properties)}"
        self._rules[f"{last}_first"] = self._rules[f"{last}_more"] = _quoted(closes) or '""'
        for at, (key, schema) in reversed(list(enumerate(properties))):
            self._rules[f"{rule}_{at}"] = f"{_quoted(key + colon)} {value(f'{rule}_{at}', schema, parameters, strict)}"
            optional = key not in parameters.get("required", ())
            for position, before in (("first", ""), ("more", f"{_quoted(comma)} ")):
                skipped = f" | {rule}_{at + 1}_{position}" if optional else ""
                self._rules[f"{rule}_{at}_{position}"] = f"{before}{rule}_{at} {rule}_{at + 1}_more{skipped}"
        self._rules[rule] = f"{_quoted(opens)} {rule}_0_first"
        return rule

    def _pythonic_value(self, rule: str, schema: Any, root: dict[str, Any], strict: bool) -> str:
        types = value_types(schema, root)
        if (asked := _input_grammar(schema)) is not None:
            return self._quoted_input(rule, asked)
        if types in ({"boolean"}, {"null"}):
            return '("True" | "False")' if types == {"boolean"} else '"None"'
        return self._json(rule, schema, root, strict)

    def _gemma_value(self, rule: str, schema: Any, root: dict[str, Any], strict: bool) -> str:
        types = value_types(schema, root)
        quote = self._text(self._format.quote)
        if types == {"string"}:
            schema = followed(schema, root)
            if (asked := _input_grammar(schema)) is not None:
                self._rules[f"{rule}_input"] = asked.lark(in_json=False)
                return f"{quote} {rule}_input {quote}"
            if choices := _choices(schema):
                return f"{quote} ({choices}) {quote}"
            limits = text_limits(schema, strict)
            return f"{quote} {self._raw_text(f'{rule}_text', self._format.quote, limits)}"
        if types and not types & {"object", "array", "string"}:
            return self._json(rule, schema, root, strict)
        self._rules["any_value"] = "any_string | any_object | any_array | any_scalar"
        self._rules["any_string"] = f"{quote} {self._raw_text('any_text', self._format.quote)}"
        self._rules["any_object"] = '"{" (any_member ("," any_member)*)? "}"'
        self._rules["any_member"] = '/[A-Za-z0-9_]+/ ":" any_value'
        self._rules["any_array"] = '"[" (any_value ("," any_value)*)? "]"'
        self._rules["any_scalar"] = _json_rule({"type": ["number", "boolean", "null"]}, strict=True)
        kinds = [f"any_{kind}" for kind in ("object", "array") if kind in types]
        return f"({' | '.join(kinds)})" if kinds and types <= {"object", "array"} else "any_value"

    def _quoted_input(self, rule: str, asked: TextInput) -> str:
        self._rules[f"{rule}_input"] = asked.lark(in_json=True)
        return rf'"\"" {rule}_input "\""'

    def _json(self, rule: str, schema: Any, root: dict[str, Any], strict: bool) -> str:
        if isinstance(schema, dict):
            schema = {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}
        self._rules[f"{rule}_json"] = _json_rule(schema, strict)
        return f"{rule}_json"

    def _text(self, text: str) -> str:
        parts = self._split.split(text) if self._split else [text]
        return " ".join(filter(None, (self._special.get(part) or _quoted(part) for part in parts)))

    def _lark(self, start: str) -> str:
        rules = "".join(f"{name}: {body}\n" for name, body in self._rules.items())
        return f"%llguidance {{}}\nstart: {start}\n{rules}"


_json_text = partial(json.dumps, ensure_ascii=False)


def _quoted(text: str) -> str:
    return _json_text(text) if text else ""


def _choices(schema: dict[str, Any]) -> str:
    return " | ".join(map(_json_text, _allowed_texts(schema)))


def _allowed_texts(schema: dict[str, Any]) -> list[str]:
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return [value for value in values if isinstance(value, str)]


def _input_grammar(schema: Any) -> TextInput | None:
    found = schema.get(_GRAMMAR) if isinstance(schema, dict) else None
    return found if isinstance(found, TextInput) else None


def _json_rule(schema: Any, strict: bool) -> str:
    options = {"whitespace_pattern": r"[ \n\t]{1,32}", "lenient": not strict}
    schema = plain(schema) if isinstance(schema, bool) else schema
    return "%json " + json.dumps(closed(plain({**schema, "x-guidance": options})))
