"""Chat messages and tools, and the fields that say how they become a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from jaxllm.chat import conversation
from jaxllm.chat.conversation import (
    MAX_TOOLS,
    TOOL_NAME,
    Call,
    NamedTool,
    Rendering,
    Tool,
    custom_tool,
    history_arguments,
)
from jaxllm.chat.custom import INPUT, TextInput
from jaxllm.chat.pictures import Detail, Picture, Sent
from jaxllm.errors import Field as Place
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import INT32_MAX
from jaxllm.serving.http.request_model import Cacheable, RequestModel, refuse, refusing
from jaxllm.serving.openai.structured import GrammarDefinition, TextFormat
from jaxllm.wording import shown


class FunctionDefinition(RequestModel):
    name: str = Field(pattern=TOOL_NAME)
    """The model's name for the function."""
    description: str | None = None
    """Tells the model what the function is for."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; by default a function without any."""
    strict: bool | None = None
    """Make the arguments follow the schema to the letter whenever the model calls this function."""

    def tool(self, *place: str | int) -> Tool:
        """`place` is where the request has the function."""
        field = Place(*place, "parameters")
        return Tool(self.name, self.description, self.parameters, bool(self.strict), field)


class ChatTool(Cacheable):
    type: Literal["function"]
    function: FunctionDefinition
    """The function."""

    @property
    def name(self) -> str:
        return self.function.name

    def tool(self, *place: str | int) -> Tool:
        return self.function.tool(*place, "function")


class GrammarFormat(RequestModel):
    """Texts that a grammar allows."""

    type: Literal["grammar"]
    grammar: GrammarDefinition
    """The grammar."""


class CustomDefinition(RequestModel):
    name: str = Field(pattern=TOOL_NAME)
    """The model's name for the tool."""
    description: str | None = None
    """Tells the model what the tool is for."""
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None
    """Any text, the default, or those that a grammar allows."""


class ChatCustomTool(Cacheable):
    """A tool that takes a text instead of arguments."""

    type: Literal["custom"]
    custom: CustomDefinition
    """The tool."""

    @property
    def name(self) -> str:
        return self.custom.name

    def tool(self, *place: str | int) -> Tool:
        asked = self.custom.format
        text_input = asked.grammar.text_input() if isinstance(asked, GrammarFormat) else TextInput()
        field = Place(*place, "custom", "format", "grammar", "definition")
        return custom_tool(self.custom.name, self.custom.description, text_input, field)


class ToolName(RequestModel):
    name: str
    """Of one in tools."""


class NamedToolChoice(RequestModel):
    """Call this function."""

    type: Literal["function"]
    function: ToolName
    """The function to call."""

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomChoice(RequestModel):
    """Call this custom tool."""

    type: Literal["custom"]
    custom: ToolName
    """The tool to call."""

    @property
    def name(self) -> str:
        return self.custom.name


_Named = Annotated[NamedToolChoice | NamedCustomChoice, Field(discriminator="type")]


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    """auto lets the model decide, required makes it call one."""
    tools: list[_Named] = Field(min_length=1)
    """Some of tools, by name."""


class AllowedToolsChoice(RequestModel):
    """Choose among a part of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """Which tools, and whether one must be called."""


ChatToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedToolChoice | NamedCustomChoice | AllowedToolsChoice, Field(discriminator="type")]
)


class ToolFields(RequestModel):
    """The fields of a request that let the model call functions."""

    tools: list[Annotated[ChatTool | ChatCustomTool, Field(discriminator="type")]] | None = Field(
        default=None, max_length=MAX_TOOLS
    )
    """Functions and custom tools that the model may call."""
    tool_choice: ChatToolChoice | None = None
    """none, auto (the default with tools), required, a tool by name, or allowed_tools."""
    parallel_tool_calls: bool = True
    """false: one call an answer at most."""

    @model_validator(mode="after")
    def _choice_among_tools(self) -> ToolFields:
        names = [tool.name for tool in self.tools or ()]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise refuse(f"tools has two functions named {shown(repeated)}", "tools")
        if self.tools is not None:
            with refusing("tool_choice"):
                self._check_choice(names)
        return self

    def callable_tools(self, injected: Sequence[Tool] = ()) -> list[Tool]:
        """The tools that this answer may call: all, those that allowed_tools names, or none.

        `injected` are for requests that bring none. Raises InvalidRequestError where tool_choice is not among them.
        """
        if self.tool_choice == "none":
            return []
        tools = list(injected)
        if self.tools is not None:
            tools = [tool.tool("tools", at) for at, tool in enumerate(self.tools)]
        self._check_choice([tool.name for tool in tools])
        chosen = self._chosen_names() if isinstance(self.tool_choice, AllowedToolsChoice) else None
        return tools if chosen is None else [tool for tool in tools if tool.name in chosen]

    def _check_choice(self, names: Sequence[str]) -> None:
        if self.tool_choice in (None, "none"):
            return
        place = Place("tool_choice")
        if not names:
            problem = "tools is empty" if self.tools is not None else "there are no tools"
            raise InvalidRequestError([place, f" is set, but {problem}"])
        unknown = next((name for name in self._chosen_names() if name not in names), None)
        if unknown is not None:
            known = f"tools has {', '.join(names)}" if self.tools is not None else f"the tools are {', '.join(names)}"
            raise InvalidRequestError([place, f" names {shown(unknown)}; {known}"])

    def choice(self) -> conversation.ToolChoice:
        """The choice; it matters only where there are tools to call."""
        match self.tool_choice:
            case NamedToolChoice(name=name) | NamedCustomChoice(name=name):
                return NamedTool(name)
            case AllowedToolsChoice(allowed_tools=allowed):
                return allowed.mode
            case "required":
                return "required"
            case _:
                return "auto"

    def _chosen_names(self) -> list[str]:
        match self.tool_choice:
            case NamedToolChoice(name=name) | NamedCustomChoice(name=name):
                return [name]
            case AllowedToolsChoice(allowed_tools=allowed):
                return [choice.name for choice in allowed.tools]
            case _:
                return []


class FunctionCall(RequestModel):
    name: str
    """Of the function."""
    arguments: str
    """JSON text of an object, or its beginning, where an answer ended before its end."""
    parsed_arguments: Any = None
    """Accepted, without effect: what the openai package has read the arguments as."""

    @field_validator("arguments")
    @classmethod
    def _json_object(cls, value: str) -> str:
        with refusing():
            history_arguments(value, Place("arguments"))
        return value or "{}"


class CustomCall(RequestModel):
    name: str
    """Of the custom tool."""
    input: str
    """The text that it was given."""


class HistoryToolCall(RequestModel):
    """A call that the assistant made earlier. One that an answer's end has cut needs no tool message."""

    id: str = Field(min_length=1)
    """The name that a tool message has for it."""
    type: Literal["function", "custom"] = "function"
    """Which of the two was called."""
    function: FunctionCall | None = None
    """The function that was called."""
    custom: CustomCall | None = None
    """The custom tool that was called."""
    index: int | None = None
    """Accepted, without effect: stream chunks number their calls with it."""

    @model_validator(mode="after")
    def _as_its_type(self) -> HistoryToolCall:
        for name in ("function", "custom"):
            if (name == self.type) != (getattr(self, name) is not None):
                problem = "is required" if name == self.type else f"does not belong to a call of type {self.type!r}"
                raise refuse(f"{name} {problem}", name)
        return self

    def call(self) -> Call:
        if self.custom is not None:
            return Call(self.id, self.custom.name, {INPUT: self.custom.input})
        assert self.function is not None
        arguments, is_cut = history_arguments(self.function.arguments, Place("arguments"))
        return Call(self.id, self.function.name, arguments, is_cut)


class TextPart(Cacheable):
    type: Literal["text"]
    text: str
    """Parts of one message are joined by newlines."""


class RefusalPart(Cacheable):
    type: Literal["refusal"]
    refusal: str
    """Shown to the model as text."""


class ImageURL(RequestModel):
    url: str = Field(min_length=1)
    """data:image/…;base64,… (or base64 alone), or a URL that the server may fetch: see docs/serving.md#images."""
    detail: Detail | None = None
    """low: at most 256 tokens, where the model's images have several sizes; the others change nothing."""


class ImagePart(Cacheable):
    type: Literal["image_url"]
    image_url: ImageURL | str
    """The image, or its URL alone."""
    uuid: str | None = None
    """Accepted, without effect: an image is known by its contents."""

    @property
    def picture(self) -> Picture:
        image = ImageURL(url=self.image_url) if isinstance(self.image_url, str) else self.image_url
        return Picture(Sent(image.url), image.detail)


class ChatMessageParam(Cacheable):
    unsupported: ClassVar[frozenset[str]] = frozenset({
        "annotations", "audio", "function_call", "images", "phase", "provider_specific_fields", "reasoning_details",
        "thinking_blocks",
    })  # fmt: skip

    role: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    """system, or developer, which renders as it; user, assistant, tool, or another that the template names."""
    content: str | list[Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]] | None = None
    """Text, or a list of parts; an assistant's message may have none."""
    name: str | None = None
    """Of the one who speaks, for templates that show it."""
    tool_calls: list[HistoryToolCall] | None = None
    """Calls that the assistant made; each must be answered by a tool message."""
    tool_call_id: str | None = None
    """Of a tool message: the call it answers."""
    refusal: str | None = None
    """The words of an assistant's message instead of content."""
    reasoning_content: str | None = None
    """The assistant's earlier reasoning, given to templates that show it."""
    reasoning: str | None = None
    """Another name of reasoning_content."""
    mcp_calls: list[dict[str, Any]] | None = None
    """Accepted, without effect: an answer that the server ran tools for has it, and may be sent back as it came."""
    parsed: Any = None
    """Accepted, without effect: what the openai package has read the content as."""

    @model_validator(mode="after")
    def _fields_of_role(self) -> ChatMessageParam:
        assistant = self.role == "assistant"
        for name in ("tool_calls", "refusal", "reasoning_content", "reasoning", "mcp_calls"):
            if getattr(self, name) not in (None, [], "") and not assistant:
                raise refuse(f"{name} belongs to messages of role 'assistant', not {self.role!r}", name)
        if (self.tool_call_id is not None) != (self.role == "tool"):
            problem = "is missing" if self.role == "tool" else f"does not belong to role {self.role!r}"
            raise refuse(f"tool_call_id {problem}; messages of role 'tool' have it, no others", "tool_call_id")
        if self.content is None and not assistant:
            raise refuse("content is required, except in an assistant's message", "content")
        return self

    def message(self) -> conversation.Message:
        """Parts of a content are joined by newlines, as vLLM does for templates that expect a string."""
        content = self.refusal or "" if self.content is None else self.content
        said = [TextPart(type="text", text=content)] if isinstance(content, str) else content
        return conversation.Message.of(
            "system" if self.role == "developer" else self.role,
            [part.picture if isinstance(part, ImagePart) else getattr(part, part.type) for part in said],
            reasoning=self.reasoning_content or self.reasoning,
            calls=[call.call() for call in self.tool_calls or ()],
            call_id=self.tool_call_id,
            name=self.name,
        )


def _bounded(messages: Any) -> Any:
    """Counts messages, parts and calls before anything looks into them: checking them takes time, on the event loop."""
    if not isinstance(messages, list):
        return messages
    count = len(messages)
    for message in messages:
        if isinstance(message, dict):
            count += sum(len(part) for part in map(message.get, ("content", "tool_calls")) if isinstance(part, list))
    with refusing():
        conversation.check_pieces(count)
    return messages


Messages = Annotated[list[ChatMessageParam], BeforeValidator(_bounded), Field(min_length=1)]


Verbosity = Literal["low", "medium", "high"]


class Thinking(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive"]
    """adaptive is the same as enabled."""
    budget_tokens: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """As max_thinking_tokens, but nothing is refused where the model marks no reasoning."""


ImageSize = Literal["min_tokens", "max_tokens", "max_soft_tokens", "min_pixels", "max_pixels"]


class TemplateFields(RequestModel):
    """The fields that choose how `messages` are rendered."""

    add_generation_prompt: bool | None = None
    """End the prompt with the start of an assistant turn; true unless continue_final_message is."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model goes on with it."""
    chat_template: str | None = None
    """A Jinja template instead of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as enable_thinking."""
    documents: list[dict[str, Any]] | None = None
    """Given to the template, for those that know retrieval."""
    mm_processor_kwargs: dict[ImageSize, Annotated[int, Field(ge=1, le=INT32_MAX)]] | None = None
    """Sizes of images, where the model's have several; of two limits, and the server's own, the tighter one holds."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Given to templates that know an effort; for others it is a budget (docs/tools.md). none turns thinking off."""
    thinking: bool | Thinking | None = None
    """Turns thinking on or off: a boolean, or {"type": "enabled", "budget_tokens": 1024} and {"type": "disabled"}."""

    @model_validator(mode="after")
    def _one_ending(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )
        off = self.thinking is False or (isinstance(self.thinking, Thinking) and self.thinking.type == "disabled")
        if off and self.reasoning_effort not in (None, "none"):
            raise refuse(f"reasoning_effort is {self.reasoning_effort!r}, but thinking is off", "reasoning_effort")
        return self

    @property
    def thinking_budget(self) -> int | None:
        """Tokens of reasoning that the template is told of."""
        return self.thinking.budget_tokens if isinstance(self.thinking, Thinking) else None

    def rendering(self, *, special_tokens: bool = False, verbosity: str | None = None) -> Rendering:
        opens = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        thinks = self.thinking.type != "disabled" if isinstance(self.thinking, Thinking) else self.thinking
        return Rendering(
            chat_template=self.chat_template,
            variables=conversation.thinking_variables(thinks, self.reasoning_effort, self.thinking_budget)
            | ({} if verbosity is None else {"verbosity": verbosity})
            | (self.chat_template_kwargs or {}),
            documents=self.documents,
            opens_answer=opens,
            continues_last=self.continue_final_message,
            special_tokens=special_tokens,
        )

    def chat(
        self, messages: Sequence[ChatMessageParam], tools: Sequence[Tool] = (), *, special_tokens: bool = False
    ) -> conversation.Conversation:
        """Messages as a conversation that is rendered and not answered. Raises InvalidRequestError: see FIELD_NAMES."""
        return conversation.Conversation(
            messages=[message.message() for message in messages],
            tools=list(tools),
            rendering=self.rendering(special_tokens=special_tokens),
            image_sizes=self.mm_processor_kwargs or {},
        )


FIELD_NAMES = {"call_id": "tool_call_id"}
"""The names that the fields of a Conversation have here."""
