"""Tools, tool choices, and calls in a conversation's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from jaxllm.chat import conversation
from jaxllm.chat.conversation import MAX_TOOLS, TOOL_NAME, Call, NamedTool, Tool, parse_arguments
from jaxllm.errors import Field as Place
from jaxllm.errors import InvalidRequestError
from jaxllm.serving.http.request_model import CacheControl, RequestModel, refuse, refusing
from jaxllm.wording import shown


class FunctionDefinition(RequestModel):
    name: str = Field(pattern=TOOL_NAME)
    """What the model calls the function by."""
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


class ChatTool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition
    """The function."""
    cache_control: CacheControl | None = None
    """Accepted, without effect: prefixes are cached by themselves."""


class FunctionName(RequestModel):
    name: str
    """Of a function in tools."""


class NamedToolChoice(RequestModel):
    """Call this function."""

    type: Literal["function"]
    function: FunctionName
    """The function to call."""


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    """auto lets the model decide, required makes it call one."""
    tools: list[NamedToolChoice] = Field(min_length=1)
    """Functions of tools, by name."""


class AllowedToolsChoice(RequestModel):
    """Choose among a part of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """Which tools, and whether one must be called."""


ChatToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]
)


class ToolFields(RequestModel):
    """The fields of a request that let the model call functions."""

    tools: list[ChatTool] | None = Field(default=None, max_length=MAX_TOOLS)
    """Functions the model may call."""
    tool_choice: ChatToolChoice | None = None
    """none, auto (the default with tools), required, a function by name, or allowed_tools."""
    parallel_tool_calls: bool = True
    """false: one call an answer at most."""

    @model_validator(mode="after")
    def _choice_among_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise refuse(f"tools has two functions named {shown(repeated)}", "tools")
        if self.tools is not None:
            with refusing("tool_choice"):
                self._check_choice(names)
        return self

    def callable_tools(self, injected: Sequence[Tool] = ()) -> list[Tool]:
        """The tools that this answer may call: all, those that allowed_tools names, or none.

        Where the request brings none they are those that the server has `injected`. Raises InvalidRequestError where
        tool_choice is not among them.
        """
        if self.tool_choice == "none":
            return []
        tools = list(injected)
        if self.tools is not None:
            tools = [tool.function.tool("tools", at, "function") for at, tool in enumerate(self.tools)]
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
        """What matters only where there are tools to call."""
        match self.tool_choice:
            case NamedToolChoice(function=function):
                return NamedTool(function.name)
            case AllowedToolsChoice(allowed_tools=allowed):
                return allowed.mode
            case "required":
                return "required"
            case _:
                return "auto"

    def _chosen_names(self) -> list[str]:
        match self.tool_choice:
            case NamedToolChoice(function=function):
                return [function.name]
            case AllowedToolsChoice(allowed_tools=allowed):
                return [choice.function.name for choice in allowed.tools]
            case _:
                return []


class FunctionCall(RequestModel):
    name: str
    """Of the function."""
    arguments: str
    """JSON text of an object."""
    parsed_arguments: Any = None
    """Accepted, without effect: what the openai package has read the arguments as."""

    @field_validator("arguments")
    @classmethod
    def _json_object(cls, value: str) -> str:
        with refusing():
            parse_arguments(value, Place("arguments"))
        return value or "{}"


class HistoryToolCall(RequestModel):
    """A call that the assistant made earlier."""

    id: str = Field(min_length=1)
    """What a tool message names it by."""
    type: Literal["function"] = "function"
    function: FunctionCall
    """What was called."""
    index: int | None = None
    """Accepted, without effect: stream chunks number their calls with it."""

    def call(self) -> Call:
        return Call(self.id, self.function.name, parse_arguments(self.function.arguments, Place("arguments")))
