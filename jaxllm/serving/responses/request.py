"""The bodies of POST /v1/responses and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from jaxllm.chat.conversation import MAX_TOOLS
from jaxllm.errors import Field as Place
from jaxllm.requests.sampling import MAX_LOGPROBS
from jaxllm.serving.http.request_model import CacheFields, ModelFields, RequestModel, Rule, check_rules, refuse
from jaxllm.serving.openai.messages import Verbosity
from jaxllm.serving.openai.sampling import SamplingFields, TokenLimit
from jaxllm.serving.openai.structured import JSONObjectFormat, TextFormat
from jaxllm.serving.responses.items import MAX_ITEMS, AnyItem, NewItem
from jaxllm.serving.responses.tools import (
    AnyTool,
    ClientTool,
    CustomTool,
    FunctionTool,
    HostedTool,
    McpTool,
    NamespaceTool,
    ResponseToolChoice,
)
from jaxllm.wording import shown

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > MAX_METADATA:
        raise refuse(f"metadata has {len(value)} keys; it may have {MAX_METADATA}")
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY:
            raise refuse(f"metadata has a key of {len(key)} characters; {MAX_METADATA_KEY} are the most")
        if len(text) > MAX_METADATA_VALUE:
            raise refuse(f"metadata[{key!r}] has {len(text)} characters; it may have {MAX_METADATA_VALUE}")
    return value


ObjectMetadata = Annotated[dict[str, str], AfterValidator(_check_metadata)]


class MetadataFields(RequestModel):
    """Words that the caller attaches to an object."""

    metadata: ObjectMetadata | None = None
    """Up to 16 strings by name, kept with the object."""


class TextSchemaFormat(RequestModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: str
    """Accepted, without effect: the model does not see it."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema that the text matches."""
    description: str | None = None
    """Accepted, without effect: the model does not see it."""
    strict: bool | None = None
    """Accepted, without effect: the answer matches the schema in any case."""


class TextConfig(RequestModel):
    format: Annotated[TextFormat | JSONObjectFormat | TextSchemaFormat, Field(discriminator="type")] | None = None
    """text, the default, json_object or json_schema."""
    verbosity: Verbosity | None = None
    """Given to templates that know a verbosity; others have no such setting."""


class ReasoningConfig(RequestModel):
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """Accepted, without effect: the template decides which reasoning the model sees again."""
    mode: Literal["standard"] | None = None
    """Only standard."""
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Given to templates that know an effort; for others it is a budget (docs/tools.md), and "none" is off."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Send the reasoning as a summary, its whole text, instead of as reasoning_text."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of summary."""

    @model_validator(mode="after")
    def _one_summary(self) -> ReasoningConfig:
        if self.summary is not None and self.generate_summary not in (None, self.summary):
            raise refuse("summary and generate_summary are one setting, give one of them", "generate_summary")
        return self


class ConversationParam(RequestModel):
    id: str
    """Of a conversation."""


class PromptFields(ModelFields):
    """The fields that make the prompt, which creating a response and counting its input tokens share."""

    input: str | Annotated[list[AnyItem], Field(max_length=MAX_ITEMS)] | None = None
    """A user's message, or items; may be left out when the response continues something."""
    instructions: str | None = None
    """A system message in front, for this response only."""
    previous_response_id: str | None = None
    """Continue a stored response: its input and output come before this input."""
    conversation: str | ConversationParam | None = None
    """Continue a conversation, which gains this input and the output."""
    tools: list[AnyTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    """Functions and custom tools that the client runs, and servers whose tools this server runs. A request without it
    is offered the configured servers' tools as functions where the server has `mcp_inject`."""
    tool_choice: ResponseToolChoice = "auto"
    """none, auto, required, a function, a custom tool, a server, or allowed_tools."""
    parallel_tool_calls: bool = True
    """Allow several calls in one response."""
    text: TextConfig | None = None
    """The form of the text: free, or JSON."""
    reasoning: ReasoningConfig | None = None
    """The amount of thinking, and the form in which reasoning is returned."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """auto drops the oldest turns of a prompt that is longer than the context; disabled refuses it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as enable_thinking."""

    @model_validator(mode="after")
    def _prompt_fields(self) -> PromptFields:
        if self.previous_response_id is not None and self.conversation is not None:
            raise refuse("previous_response_id and conversation cannot both be set", "previous_response_id")
        continues = self.previous_response_id is not None or self.conversation is not None
        if not self.input and not isinstance(self.input, str) and not continues:
            raise refuse("input is required unless previous_response_id or conversation is given", "input")
        for kind, names in (("name", self.function_names), ("server_label", self.server_labels)):
            first = {name: at for at, name in reversed(names.items())}
            for at, name in names.items():
                if first[name] != at:
                    field = f"{at}.{kind}"
                    raise refuse(f"{field} is {shown(name)}, which tools has twice", field)
        if self.left_out and len(self.left_out) == len(self.tools):
            problem = f"tools[0].type is {shown(self.left_out[0])}, which this server does not run"
            raise refuse(f"{problem}; send function, custom, namespace or mcp tools", "tools[0].type")
        return self

    @property
    def left_out(self) -> list[str]:
        """The types of the tools that this server does not run."""
        return [tool.type for tool in self.tools if isinstance(tool, HostedTool)]

    @property
    def client_tools(self) -> list[ClientTool]:
        """The tools that the client runs, those of namespaces among them."""
        found = []
        for at, tool in enumerate(self.tools):
            if isinstance(tool, FunctionTool | CustomTool):
                found.append(ClientTool(tool, Place("tools", at)))
            elif isinstance(tool, NamespaceTool):
                for inner, one in enumerate(tool.tools):
                    place, introduction = Place("tools", at, "tools", inner), "" if inner else tool.description
                    found.append(ClientTool(one, place, tool.name, introduction))
        return found

    @property
    def function_names(self) -> dict[str, str]:
        """The names that the model knows the client's tools by, by their places."""
        return {str(one.place): one.told_name for one in self.client_tools}

    @property
    def server_labels(self) -> dict[str, str]:
        """By the place in tools."""
        return {f"tools[{at}]": tool.server_label for at, tool in enumerate(self.tools) if isinstance(tool, McpTool)}

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation

    @property
    def summarizes(self) -> bool:
        config = self.reasoning
        return config is not None and (config.summary or config.generate_summary) is not None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool = False
    """Pad deltas with random characters, so that the length of what is sent tells less of the text."""


class BackgroundOptions(RequestModel):
    completion_window: Literal["soonest", "2h", "8h"] | None = None
    """Accepted, without effect: a response runs as soon as there is room for it."""
    continuation_id: str | None = None
    """Accepted, without effect: responses run in the order in which they came."""


class ImageOptions(RequestModel):
    context_compression: Literal["auto", "enabled", "disabled"] | None = None
    """Accepted, without effect: there are no images."""


class UnheededFields(CacheFields):
    """Settings of OpenAI's own service, which change nothing here."""

    image: ImageOptions | None = None
    """Accepted, without effect: there are no images."""
    service_tier: Literal["auto", "default", "flex", "priority", "fast", "scale", "ultrafast"] | None = None
    """Accepted, without effect: there is one tier, which responses call "default"."""


_RULES = (
    Rule(lambda body: not body.stream, {"stream_options": ()}, "needs stream to be true"),
    Rule(
        lambda body: not body.store,
        {"background": (False,)},
        "needs store to be true: the response is fetched by its id",
    ),
    Rule(lambda body: LOGPROBS not in body.include, {"top_logprobs": (0,)}, f"needs include to have {LOGPROBS!r}"),
)


class ResponseRequest(PromptFields, MetadataFields, SamplingFields, UnheededFields):
    unsupported: ClassVar[frozenset[str]] = frozenset({
        "access_programs", "context_management", "mm_processor_kwargs", "moderation", "prompt",
    })  # fmt: skip
    path: ClassVar[str] = "/v1/responses"
    called_here: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "messages": "input",
        "system": "instructions", "reasoning_effort": "reasoning.effort", "thinking": "reasoning",
        "response_format": "text.format", "conversation_id": "conversation", "stop_sequences": "stop",
        "logprobs": "top_logprobs",
    }  # fmt: skip

    background: bool = False
    """Answer at once and go on by itself; the response is polled, or its stream followed, by its id."""
    background_options: BackgroundOptions | None = None
    """Accepted, without effect: a response runs as soon as there is room for it."""
    include: list[Includable] = Field(default_factory=list)
    """message.output_text.logprobs adds log-probabilities; reasoning.encrypted_content gives reasoning items their text
    in that field as well, in the clear, for clients that send back nothing else. The others are of items that never
    come."""
    max_output_tokens: TokenLimit = None
    """Upper bound on generated tokens, reasoning included; by default, and with -1, what is left of the context."""
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Most calls that this server makes of servers' tools, all together; mcp_max_calls is the default and the most."""
    store: bool = True
    """Keep the response, so that it can be retrieved and continued."""
    stream: bool = False
    """Send events while the response is made."""
    stream_options: ResponseStreamOptions | None = None
    """Needs stream."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    """Alternatives of each token, with message.output_text.logprobs."""

    client_metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    """Accepted, without effect: a client's words about itself."""
    safety_identifier: str | None = None
    """Accepted, without effect, as OpenAI documents it."""

    @model_validator(mode="after")
    def _response_fields(self) -> ResponseRequest:
        check_rules(self, _RULES)
        return self

    @property
    def logprobs_count(self) -> int | None:
        return self.top_logprobs if LOGPROBS in self.include else None


class InputTokensRequest(PromptFields):
    unsupported: ClassVar[frozenset[str]] = frozenset({"personality"})


class CompactRequest(PromptFields, UnheededFields):
    path: ClassVar[str] = "/v1/responses/compact"


class ConversationRequest(MetadataFields):
    items: list[NewItem] = Field(default_factory=list, max_length=MAX_ITEMS)
    """The items with which the conversation begins."""


class ConversationUpdate(RequestModel):
    metadata: ObjectMetadata
    """Replaces what is there."""


class ConversationItemsRequest(RequestModel):
    items: list[NewItem] = Field(min_length=1, max_length=MAX_ITEMS)
    """Put at the conversation's end."""
