"""Messages, tools and how they become a prompt, whichever API they came through.

The APIs translate their requests into these, and name their own fields in the errors: see `naming`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxllm.chat.custom import PARAMETERS, TextInput
from jaxllm.chat.events import ToolFormat
from jaxllm.chat.pictures import Part, Picture, content_of, given_picture
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.sampling import INT32_MAX, SamplingParams
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.text.reasoning import ReasoningFormat
from jaxllm.wording import shown

MAX_PIECES = 8192
"""Messages, parts of their contents, and tool calls, together."""
MAX_TOOLS = 1024
TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"

ROLES = ("system", "user", "assistant", "tool")
"""Those that every template is given; others belong to some."""

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""The names by which templates know the switch: Qwen, GLM and SmolLM the first, DeepSeek and Granite the second."""

RESERVED_VARIABLES = {
    "add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "self", "template",
    "tokenize", "tools",
}  # fmt: skip
"""Set by the server or by other fields, so chat_template_kwargs may not."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    """Its arguments follow the schema to the letter whenever the model calls it."""
    parameters_field: Field = field(default=Field("tools"), compare=False)
    """Where the request has the schema, or the grammar."""
    text_input: TextInput | None = None
    """Of a custom tool: see `custom_tool`."""
    in_prompt: bool = True
    """False where the messages describe it, and the template is not to."""

    def for_template(self) -> dict[str, Any]:
        """As templates expect it, which write the function's parameters into the prompt."""
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        function = {"description": self.description or "", "parameters": parameters, "name": self.name}
        return {"type": "function", "function": function}


def custom_tool(name: str, description: str | None, text_input: TextInput, place: Field) -> Tool:
    """A tool that takes a text; a grammar of it, which the request has at `place`, holds as a strict schema does."""
    told = "\n\n".join(filter(None, (description, text_input.told))) or None
    return Tool(name, told, PARAMETERS, text_input.syntax != "any", place, text_input)


@dataclass(frozen=True)
class NamedTool:
    """The choice to call this tool."""

    name: str


ToolChoice = Literal["auto", "required"] | NamedTool


@dataclass(frozen=True)
class Call:
    """A call that the assistant made."""

    id: str
    name: str
    arguments: dict[str, Any]
    is_cut: bool = False
    """The answer ended in the middle of the arguments, so that nothing may have run it."""

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def parse_arguments(text: str, place: Field) -> dict[str, Any]:
    """The arguments of a call that came as JSON text; an empty one has none. Raises InvalidRequestError of `place`."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequestError([place, f" is {shown(text)}; it must be the JSON text of an object"])
    return parsed


def history_arguments(text: str, place: Field) -> tuple[dict[str, Any], bool]:
    """As `parse_arguments`, of an earlier call; with text that breaks off: what is there of it, and True."""
    try:
        return parse_arguments(text, place), False
    except InvalidRequestError:
        from pydantic_core import from_json

        try:
            begun = from_json(text, allow_partial="trailing-strings")
        except ValueError:
            begun = None
        if not isinstance(begun, dict):
            raise
        return begun, True


def known_arguments(text: str) -> dict[str, Any]:
    """As `parse_arguments`; malformed text has none."""
    try:
        return parse_arguments(text, Field("arguments"))
    except InvalidRequestError:
        return {}


@dataclass
class Message:
    """What one speaker says. A tool's message has the `call_id` of the call that it answers."""

    role: str
    """One of ROLES, or another that the template names."""
    text: str = ""
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None
    """Of the speaker, for templates that show it; a tool's message has the tool's."""
    given: Mapping[str, Any] | None = None
    """A notebook's message, which the template gets as it is: it may have what only that template knows."""
    parts: Sequence[Part] = ()
    """Texts and images in order, where there are images."""

    @classmethod
    def of(cls, role: str, parts: Iterable[Part], **others: Any) -> Message:
        parts = list(parts)
        texts = [part for part in parts if isinstance(part, str)]
        return cls(role, "\n".join(texts), parts=parts if len(texts) < len(parts) else (), **others)

    def for_template(self) -> dict[str, Any]:
        content = content_of(self.parts) if self.parts else self.text
        if self.given is not None:
            return dict(self.given) | ({"content": content} if self.parts else {})
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        optional = {"name": self.name, "tool_call_id": self.call_id, "reasoning_content": self.reasoning}
        return message | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Settings of turning messages into the text of a prompt.

    Attributes:
        chat_template: Jinja source, or the name of one of the checkpoint's templates, instead of the model's.
        variables: of the template, beside its messages and tools; see `thinking_variables`.
        documents: for templates that know retrieval.
        opens_answer: the prompt ends with the start of an assistant's turn.
        continues_last: the last message is left open, so that the model goes on with it.
        special_tokens: the tokenizer adds its own to the rendered text, whose template usually has them already.

    Raises InvalidRequestError: a variable has a name that is not the caller's to set.
    """

    chat_template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    opens_answer: bool = True
    continues_last: bool = False
    special_tokens: bool = False

    def __post_init__(self) -> None:
        reserved = sorted(RESERVED_VARIABLES & self.variables.keys())
        if reserved:
            names = ", ".join(sorted(RESERVED_VARIABLES))
            raise InvalidRequestError([Field("chat_template_kwargs"), f" has {reserved[0]!r}; it may not set {names}"])

    @property
    def thinks(self) -> bool | None:
        """Whether the template was told to let the model think; None where nothing was said."""
        told = next((self.variables[name] for name in THINKING_VARIABLES if name in self.variables), None)
        return None if told is None else bool(told)

    def with_defaults(self, variables: Mapping[str, Any]) -> Rendering:
        """The same with other variables where it has none; who says to think or not says it by any of its names."""
        said = set(self.variables)
        if said & set(THINKING_VARIABLES):
            said |= set(THINKING_VARIABLES)
        return replace(self, variables={n: v for n, v in variables.items() if n not in said} | dict(self.variables))

    def template_arguments(self, server_template: str | None) -> dict[str, Any]:
        documents = {"documents": self.documents} if self.documents is not None else {}
        template = self.chat_template or server_template
        fixed = {"add_generation_prompt": self.opens_answer, "continue_final_message": self.continues_last}
        return {**fixed, "chat_template": template, **self.variables, **documents}


def thinking_variables(thinks: bool | None, effort: str | None = None, budget: int | None = None) -> dict[str, Any]:
    """Variables that tell templates to think or not, how hard, how long. An effort alone turns it on, "none" off."""
    if thinks is None and effort is not None:
        thinks = effort != "none"
    told = {} if thinks is None else dict.fromkeys(THINKING_VARIABLES, thinks)
    asked = {"reasoning_effort": effort, "thinking_budget": budget}
    return told | {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, oldest first, and what their next one may be.

    Attributes:
        tools: those that the answer may call; none where it may call none.
        structured_outputs: what the answer's text must match, wherever it begins.
        separate_reasoning: whether reasoning is told apart from the answer's text, or stays in it.
        reasoning_control: reasoning without a budget can be ended while it is written, too.
        image_sizes: see `row_limits`.

    Raises InvalidRequestError: there are too many messages, or calls and their results do not belong together.
    """

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    rendering: Rendering = Rendering()
    structured_outputs: StructuredOutputs | None = None
    separate_reasoning: bool = True
    reasoning_control: bool = False
    image_sizes: Mapping[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if all(message.given is None for message in self.messages):
            check_pieces(len(self.messages) + sum(len(message.calls) for message in self.messages))
            _match_calls(self.messages)
        for at, message in enumerate(self.messages):
            for number, part in enumerate(message.parts):
                if isinstance(part, Picture):
                    part.place = part.place or Field("messages", at, "content", number)

    def refuse_images(self) -> None:
        if self.pictures:
            raise self.pictures[0].refused(" is an image, which is not available here: only text is")

    @property
    def pictures(self) -> list[Picture]:
        return [part for message in self.messages for part in message.parts if isinstance(part, Picture)]


def given_messages(messages: Sequence[Any]) -> list[Message]:
    """Messages of a notebook, arguments of calls as objects. Raises InvalidRequestError: they have other media."""
    from jaxllm.text.chat_template import check_text  # it loads jinja2

    messages = [_with_pictures(message) for message in messages]
    check_text(messages, Picture)
    found = []
    for message in messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else content
        said = [part if isinstance(part, Part) else part["text"] for part in parts]
        given = dict(message)
        if isinstance(calls := message.get("tool_calls"), list):
            given["tool_calls"] = [_with_object(call) for call in calls]
        found.append(Message.of(str(message.get("role")), said, given=given))
    return found


def _with_pictures(message: Any) -> Any:
    match message:
        case {"content": list(parts)}:
            return {**message, "content": [given_picture(part) or part for part in parts]}
    return message


def _with_object(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(text)} as function}:
            with suppress(InvalidRequestError):
                return {**call, "function": {**function, "arguments": parse_arguments(text, Field("arguments"))}}
    return call


def given_tools(tools: Sequence[Any], choice: Any = "auto") -> tuple[list[Tool], ToolChoice]:
    """The tools of a notebook that may be called, and how. Raises InvalidRequestError where they are something else."""
    offered = [_given_tool(tool, at) for at, tool in enumerate(tools)]
    names = [tool.name for tool in offered]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidRequestError([Field("tools"), f" has two functions named {shown(repeated)}"])
    match choice:
        case "none":
            return [], "auto"
        case "auto":
            return offered, "auto"
        case "required" if offered:
            return offered, "required"
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return offered, NamedTool(name)
    accepted = 'it must be "none" or "auto", or with tools "required" or {"type": "function", "function": {"name": …}}'
    known = f", where the tools are {', '.join(names)}" if names else ""
    raise InvalidRequestError([Field("tool_choice"), f" is {shown(choice)}; {accepted}{known}"])


def _given_tool(given: Any, at: int) -> Tool:
    match given:
        case {"type": "function", "function": {"name": str(name), **rest}} if re.fullmatch(TOOL_NAME, name):
            known = {"description": (str, type(None)), "parameters": (dict, type(None)), "strict": (bool, type(None))}
            if all(isinstance(value, known.get(str(key), ())) for key, value in rest.items()):
                fields: Any = {"strict": False} | rest
                return Tool(name, **fields, parameters_field=Field("tools", at, "function", "parameters"))
    accepted = (
        'it must be {"type": "function", "function": {"name": …, "description": text, "parameters": JSON schema, '
        f'"strict": true or false}}}}, with a name that matches {TOOL_NAME}'
    )
    raise InvalidRequestError([Field("tools", at), f" is {shown(given)}; {accepted}"])


def check_pieces(count: int) -> None:
    if count > MAX_PIECES:
        message = f" has {count} messages, parts and calls; it may have {MAX_PIECES}"
        raise InvalidRequestError([Field("messages"), message])


def _match_calls(messages: Sequence[Message]) -> None:
    """Give each tool's message the name of its tool, and leave out calls that are cut and have no result.

    Raises InvalidRequestError where another call has none, or a result answers no open call.
    """
    waiting: dict[str, Call] = {}
    asked = Message("assistant")
    for at, message in enumerate(messages):
        if message.role == "tool":
            call_id = message.call_id or ""
            if call_id not in waiting:
                known = f"open calls are {', '.join(waiting)}" if waiting else "no call is open there"
                raise InvalidRequestError([Field("messages", at, "call_id"), f" is {shown(call_id)}; {known}"])
            call = waiting.pop(call_id)
            message.name = message.name or call.name
            continue
        asked.calls = [call for call in asked.calls if not (call.is_cut and call.id in waiting)]
        waiting = {name: call for name, call in waiting.items() if not call.is_cut}
        if message.role not in ROLES:
            waiting.clear()  # a role of the template's own, such as observation, may bring the results
        elif waiting:
            problem = f" has role {message.role!r}, but the calls {', '.join(waiting)} await their results"
            raise InvalidRequestError([Field("messages", at), problem])
        if message.calls:
            asked = message
            waiting |= {call.id: call for call in message.calls}
    asked.calls = [call for call in asked.calls if not (call.is_cut and call.id in waiting)]


@contextmanager
def naming(name: Callable[[Field], Field]) -> Iterator[None]:
    """Errors from within with a caller's own names of the fields."""
    try:
        yield
    except InvalidRequestError as error:
        raise error.named(name) from None


def renaming(names: Mapping[str, str]) -> Callable[[Field], Field]:
    """For `naming`: the same places under other names. A name with dots is several parts of a path."""
    return lambda place: Field(*(names.get(part, part) if isinstance(part, str) else part for part in place.path))


_INSTRUCTIONS = """You can call functions. Each line describes one, with a JSON schema of its arguments:
{functions}
To call a function, answer with nothing but its name and arguments, written exactly like this:
{example}
When no function helps, answer the user in plain text."""
"""For models whose template knows no tools, as in llama.cpp's generic format."""


def with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation with instructions for `tools` in its system message, or else in its first user message.

    Calls become text of the assistant, results text of the user, so that roles alternate as templates want them.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", f"Result of {message.get('name', 'the function')}: {text}"
        elif "tool_calls" in message:
            text = "\n".join(filter(None, (text, _calls_text(message["tool_calls"], tool_format))))
        if plain and plain[-1]["role"] == role == "user":
            plain[-1]["content"] += f"\n{text}"
        else:
            kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
            plain.append({**kept, "role": role, "content": text})
    if not tools:
        return plain
    functions = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
    example = {"function": {"name": "function_name", "arguments": {"argument": "value"}}}
    instructions = _INSTRUCTIONS.format(functions=functions, example=_calls_text([example], tool_format))
    for message in plain:
        if message["role"] == "system":
            message["content"] += f"\n\n{instructions}"
            return plain
    for message in plain:
        if message["role"] == "user":
            message["content"] = f"{instructions}\n\n{message['content']}"
            return plain
    return [{"role": "user", "content": instructions}, *plain]


def alternating(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role as one message, for templates that refuse them: clients send several in a row."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.keys() == message.keys() == {"role", "content"} and last["role"] == message["role"]:
            joined[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _calls_text(calls: Sequence[dict[str, Any]], tool_format: ToolFormat) -> str:
    around = tool_format.written
    calls_text = []
    for at, function in enumerate(call["function"] for call in calls):
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls_text.append(tool_format.head(function["name"], at) + arguments + around.end)
    return around.start + around.between.join(calls_text) + around.stop


EFFORT_BUDGETS: dict[str, int | None] = {
    "none": 0, "minimal": 512, "low": 2048, "medium": 8192, "high": 32768, "xhigh": None, "max": None,
}  # fmt: skip
"""Tokens of reasoning that an effort allows where the chat template knows no efforts; None is any number."""


def thinking_fields(
    conversation: Conversation, reasoning: ReasoningFormat | None, template: str, asked: int | None, in_reasoning: bool
) -> dict[str, Any]:
    """The fields of SamplingParams that bound reasoning. Raises InvalidRequestError of `asked`, max_thinking_tokens."""
    if reasoning is None:
        if asked is not None:
            raise unmarked()
        return {}
    thinks, variables = conversation.rendering.thinks, conversation.rendering.variables
    effort, told = variables.get("reasoning_effort"), variables.get("thinking_budget")
    if asked is None and isinstance(told, int) and not isinstance(told, bool) and told >= 0:
        asked = told
    if thinks is False and in_reasoning:
        asked = 0  # the template does not know how not to think
    elif asked is None and thinks is not False and "reasoning_effort" not in template and isinstance(effort, str):
        asked = EFFORT_BUDGETS.get(effort)
    if asked is None and conversation.reasoning_control:
        asked = INT32_MAX
    if asked is None:
        return {}
    markers = reasoning.markers(opened=in_reasoning, text_follows=not conversation.tools)
    return {"max_thinking_tokens": asked, "thinking_markers": markers}


def room_for_constraint(
    params: SamplingParams, conversation: Conversation, reasoning: ReasoningFormat | None, *, in_reasoning: bool
) -> SamplingParams:
    """The same parameters; unbounded reasoning leaves half of max_tokens to an answer that must match something."""
    outputs, asked = params.structured_outputs, conversation.structured_outputs
    waits = outputs is not None and outputs.after is not None and (asked is None or asked.after is None)
    free = asked is None and conversation.tool_choice == "auto"
    if reasoning is None or not waits or free or params.allowed_token_ids is not None:
        return params
    if params.max_thinking_tokens not in (None, INT32_MAX) or params.max_tokens is None:
        return params
    markers = reasoning.markers(opened=in_reasoning, text_follows=bool(reasoning.answer))
    return replace(params, max_thinking_tokens=params.max_tokens // 2, thinking_markers=markers)


def unmarked() -> InvalidRequestError:
    problem = " needs a model that marks its reasoning; this one's chat template shows no marks"
    return InvalidRequestError([Field("max_thinking_tokens"), problem])
