"""/v1/messages and /v1/messages/count_tokens: requests, and the tools and settings that they send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from jaxllm.chat.conversation import MAX_TOOLS, TOOL_NAME, Tool
from jaxllm.errors import Field as Place
from jaxllm.requests.sampling import MAX_STOP_STRINGS
from jaxllm.serving.anthropic import blocks
from jaxllm.serving.anthropic.context import ContextManagement
from jaxllm.serving.http.request_model import Cacheable, KeepAliveFields, ModelFields, RequestModel, refuse
from jaxllm.wording import shown


class ToolParam(Cacheable):
    type: Literal["custom"] | None = None
    """Tools of Anthropic's servers, such as web_search_20250305, are left out where there are others."""
    name: str = Field(pattern=TOOL_NAME)
    """The model's name for the tool."""
    description: str | None = None
    """Tells the model what the tool is for."""
    input_schema: dict[str, Any]
    """JSON schema of the input, an object."""
    input_examples: list[dict[str, Any]] | None = None
    """Inputs that the model reads after the description."""
    strict: bool | None = None
    """Make the input follow the schema to the letter whenever the model calls this tool."""
    defer_loading: bool = False
    """The model knows the tool only once a tool_reference names it, and reads its definition there."""
    allowed_callers: list[str] | None = None
    """direct must be among them: there are no other callers."""
    eager_input_streaming: bool | None = None
    """Inputs are streamed as they are generated, whatever it says."""

    @field_validator("input_schema")
    @classmethod
    def _object(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type") != "object":
            raise refuse(f"input_schema has the type {shown(value.get('type'))}; it must be 'object'")
        return value

    @field_validator("allowed_callers")
    @classmethod
    def _direct(cls, value: list[str] | None) -> list[str] | None:
        if value and "direct" not in value:
            raise refuse(f"allowed_callers is {shown(value)}; 'direct' must be among them")
        return value

    def tool(self, at: int, *, in_prompt: bool = True) -> Tool:
        """`at` is its position in tools."""
        said = self.description
        if self.input_examples:
            examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in self.input_examples)
            said = "\n\n".join(filter(None, (said, f"Examples of its input:\n{examples}")))
        place = Place("tools", at, "input_schema")
        return Tool(self.name, said, self.input_schema, bool(self.strict), place, in_prompt=in_prompt)


class ServerTool(BaseModel):
    """A tool that Anthropic's servers run, whose other fields nobody reads here."""

    type: str


SEARCHES = "tool_search_tool_"
OF_SERVERS = ("advisor_", "code_execution_", "mcp_toolset", SEARCHES, "web_fetch_", "web_search_")
"""How the types of tools begin that Anthropic's servers run; clients do not expect calls of them."""


def _runs_at(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "server" if isinstance(kind, str) and kind.startswith(OF_SERVERS) else "client"


def _is_custom(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is not None and kind != "custom":
        raise refuse(f"tools of type {shown(kind)} are not supported by this server; 'custom' ones are", "type")
    return value


SentTool = Annotated[
    Annotated[ToolParam, BeforeValidator(_is_custom), Tag("client")] | Annotated[ServerTool, Tag("server")],
    Discriminator(_runs_at),
]


class ToolChoiceAuto(RequestModel):
    type: Literal["auto", "any"]
    """auto lets the model decide; any makes it call some tool."""
    disable_parallel_tool_use: bool = False
    """One call an answer at most."""


class ToolChoiceTool(RequestModel):
    """Call this tool."""

    type: Literal["tool"]
    name: str
    """Of a tool in tools."""
    disable_parallel_tool_use: bool = False
    """One call an answer at most."""


class ToolChoiceNone(RequestModel):
    type: Literal["none"]


ToolChoiceParam = Annotated[ToolChoiceAuto | ToolChoiceTool | ToolChoiceNone, Field(discriminator="type")]


class ThinkingEnabled(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"block_binding"})

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1)
    """Tokens of thinking after which it is ended; told to templates that know thinking_budget as well."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    """omitted leaves the text of thinking blocks empty; otherwise it is shown as generated."""


class ThinkingAdaptive(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"block_binding"})

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted", "updates"] | None = None
    """omitted leaves the text of thinking blocks empty; otherwise it is shown as generated."""


class ThinkingDisabled(RequestModel):
    type: Literal["disabled"]


ThinkingParam = Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")]


class JSONOutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema that the text matches."""


class OutputConfig(blocks.TurnConfig):
    unsupported: ClassVar[frozenset[str]] = frozenset({"task_budget"})

    format: JSONOutputFormat | None = None
    """The text follows this JSON schema to the letter."""


class Metadata(RequestModel):
    user_id: str | None = None
    """Accepted, without effect: nothing is stored."""


class BillingPolicy(RequestModel):
    type: Literal["billing_policy"]
    bill_to: Literal["self"] | None = None
    """Accepted, without effect: nothing is billed."""


class Diagnostics(RequestModel):
    previous_message_id: str | None = None
    """The answer's diagnostics say that there are none to compare with: no prompts are kept."""


class CountTokensRequest(ModelFields, Cacheable):
    """The fields that make up a prompt."""

    unsupported: ClassVar[frozenset[str]] = frozenset({
        "compaction", "container", "fallback_credit_token", "inference_geo", "mcp_servers", "thread", "user_profile_id",
        "workspace_id",
    })  # fmt: skip

    messages: Annotated[list[blocks.MessageParam], BeforeValidator(blocks.bounded), Field(min_length=1)]
    """Messages in a row of one role are one turn; a last one of role assistant is continued."""
    system: str | list[blocks.TextBlockParam] | None = None
    """Put before the messages."""
    tools: list[SentTool] | None = Field(default=None, max_length=MAX_TOOLS)
    """Tools the model may call."""
    tool_choice: ToolChoiceParam | None = None
    """auto, any, a tool by name, or none."""
    thinking: ThinkingParam | None = None
    """By default the chat template's own default."""
    output_config: OutputConfig | None = None
    """The amount of thinking, and the schema of the text."""
    context_management: ContextManagement | None = None
    """Old thinking and tool results are taken out of the prompt as it says."""
    speed: Literal["standard", "fast"] | None = None
    """Accepted, without effect: there is one speed."""
    betas: list[str] | None = None
    """Accepted, without effect: it names versions of Anthropic's service."""
    billing_policy: BillingPolicy | None = None
    """Accepted, without effect: nothing is billed."""

    @model_validator(mode="after")
    def _conversation(self) -> CountTokensRequest:
        for at, message in enumerate(self.messages):
            blocks.place_images(message.blocks, "messages", at)
        turns = self.turns
        blocks.check_turns(turns)
        thinks = isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive)
        if thinks and self.continues_answer:
            raise refuse("thinking cannot be enabled when the last message is the assistant's", "thinking")
        effort = self.effort
        if effort is not None and isinstance(self.thinking, ThinkingDisabled):
            raise refuse(f"output_config.effort is {effort!r}, but thinking is disabled", "output_config.effort")
        return self

    @model_validator(mode="after")
    def _tools(self) -> CountTokensRequest:
        names: dict[str, None] = {}
        for at, tool in self._own_tools:
            if tool.name in names:
                raise refuse(
                    f"tools[{at}].name is {tool.name!r}, which an earlier tool has; names must differ", "tools"
                )
            names[tool.name] = None
        if self.left_out and not names:
            problem = f"tools of type {shown(self.left_out[0])} run on Anthropic's servers only, and there is no other"
            raise refuse(f"tools: {problem}", "tools")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise refuse(f"tool_choice of type {choice.type!r} needs tools", "tool_choice")
        if isinstance(choice, ToolChoiceTool) and choice.name not in names:
            message = f"tool_choice.name is {shown(choice.name)}; tools has {', '.join(names)}"
            raise refuse(message, "tool_choice.name")
        return self

    @property
    def _own_tools(self) -> list[tuple[int, ToolParam]]:
        return [(at, tool) for at, tool in enumerate(self.tools or ()) if isinstance(tool, ToolParam)]

    @property
    def left_out(self) -> list[str]:
        """The types of the tools that only Anthropic's servers run."""
        return [tool.type for tool in self.tools or () if isinstance(tool, ServerTool)]

    def offered(self, turns: Sequence[blocks.Turn]) -> list[Tool]:
        """The tools that the model may call, given the turns that it reads.

        A tool with defer_loading that the messages have found stands in `turns`, so that the prompt's beginning stays
        as it was. Nothing is deferred where the search was to run on Anthropic's servers.
        """
        found, here = _referenced(self.turns), _referenced(turns)
        if isinstance(self.tool_choice, ToolChoiceTool):
            found.add(self.tool_choice.name)
        finds = not any(kind.startswith(SEARCHES) for kind in self.left_out)
        return [
            tool.tool(at, in_prompt=not (tool.defer_loading and finds and tool.name in here))
            for at, tool in self._own_tools
            if not (tool.defer_loading and finds) or tool.name in found
        ]

    @property
    def turns(self) -> list[blocks.Turn]:
        turns: list[blocks.Turn] = []
        last_user = max((at for at, message in enumerate(self.messages) if message.role == "user"), default=-1)
        for at, message in enumerate(self.messages):
            if message.content is None or (message.clear_at == "next_user_message" and at < last_user):
                continue
            if turns and turns[-1].role == message.role:
                turns[-1].blocks += message.blocks
            else:
                turns.append(blocks.Turn(message.role, message.blocks, at))
        return turns

    @property
    def effort(self) -> str | None:
        """A system message's after the last question, or the request's own."""
        for message in reversed(self.messages):
            if message.effort is not None:
                return message.effort
            if message.role == "user" and any(isinstance(block, blocks.TextBlockParam) for block in message.blocks):
                break
        return None if self.output_config is None else self.output_config.effort

    @property
    def continues_answer(self) -> bool:
        return self.messages[-1].role == "assistant"


class MessagesRequest(CountTokensRequest, KeepAliveFields):
    path: ClassVar[str] = "/v1/messages"
    called_here: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "stop": "stop_sequences",
        "input": "messages", "prompt": "messages", "instructions": "system",
        "reasoning_effort": "output_config.effort", "response_format": "output_config.format",
        "user": "metadata.user_id",
    }  # fmt: skip

    max_tokens: int = Field(ge=1)
    """Upper bound on generated tokens, thinking included; what does not fit the context is cut off there."""
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=MAX_STOP_STRINGS)
    """Texts that end generation."""
    stream: bool = False
    """Send events while the message is generated."""
    temperature: float | None = None
    """As in a chat."""
    top_p: float | None = None
    """As in a chat."""
    top_k: int | None = None
    """As in a chat."""
    metadata: Metadata | None = None
    """Accepted, without effect: nothing is stored."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Accepted, without effect: there is one tier."""
    fallbacks: Literal["default"] | list[dict[str, Any]] | None = None
    """Accepted, without effect: no model here declines a request for its provider's policy."""
    diagnostics: Diagnostics | None = None
    """Asks why a prompt was not in the cache; the answer says that this is not known."""

    @model_validator(mode="after")
    def _budget(self) -> MessagesRequest:
        thinking = self.thinking
        if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= self.max_tokens:
            raise refuse(
                f"thinking.budget_tokens is {thinking.budget_tokens}; it must be less than max_tokens, "
                f"which is {self.max_tokens}",
                "thinking.budget_tokens",
            )
        return self


def _referenced(turns: Sequence[blocks.Turn]) -> set[str]:
    """The tools that results of other tools name."""
    results = [result.content for turn in turns for result in turn.of(blocks.ToolResultBlockParam)]
    parts = [part for content in results if isinstance(content, list) for part in content]
    return {part.tool_name for part in parts if isinstance(part, blocks.ToolReferenceParam)}
