"""The bodies of POST /v1/responses and its relatives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from jaxllm.chat.conversation import MAX_TOOLS
from jaxllm.mcp.settings import LABEL, ServerSettings
from jaxllm.mcp.tools import ServerTool
from jaxllm.requests.sampling import MAX_LOGPROBS
from jaxllm.serving.http.request_model import ModelFields, RequestModel, Rule, check_rules, refuse
from jaxllm.serving.openai.messages import FunctionDefinition
from jaxllm.serving.openai.sampling import SamplingFields, TokenLimit
from jaxllm.serving.openai.structured import JSONObjectFormat, TextFormat
from jaxllm.serving.responses.items import MAX_ITEMS, AnyItem, NewItem
from jaxllm.wording import shown

HEADER_NAME = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}$"
MAX_HEADERS = 64
MAX_TOOL_NAMES = 1024
MAX_URL = 2048


class ToolFilter(RequestModel):
    """Some tools of a server: those that fit all that is given here."""

    tool_names: list[str] | None = Field(default=None, max_length=MAX_TOOL_NAMES)
    """Names, as the server has them."""
    read_only: bool | None = None
    """true: tools that say that they change nothing (readOnlyHint); false: all others."""

    @model_validator(mode="after")
    def _says_something(self) -> ToolFilter:
        if self.tool_names is None and self.read_only is None:
            raise refuse("a filter of tools has tool_names, read_only or both")
        return self

    def fits(self, tool: ServerTool) -> bool:
        named = self.tool_names is None or tool.name in self.tool_names
        return named and self.read_only in (None, tool.read_only)


class ApprovalFilters(RequestModel):
    """Which tools need approval: all but those of never; those of always even if never has them too."""

    always: ToolFilter | None = None
    """Tools that need it."""
    never: ToolFilter | None = None
    """Tools that do not."""

    def asks(self, tool: ServerTool) -> bool:
        if self.always is not None and self.always.fits(tool):
            return True
        return self.never is None or not self.never.fits(tool)


_URL_RULES = (
    Rule(
        lambda body: body.server_url is None,
        {"authorization": (), "headers": ()},
        "belongs to server_url; configured servers have their own",
    ),
)


class McpTool(RequestModel):
    """The tools of a server, which this server calls itself."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "connector_id", "defer_loading", "tunnel_id"})

    type: Literal["mcp"]
    server_label: str = Field(pattern=f"^{LABEL}$")
    """Of a configured server; with server_url any name, which those of its tools begin with."""
    server_url: str | None = Field(default=None, max_length=MAX_URL)
    """Of a server that is not configured: https and a public address, and only where allow_mcp_urls is set."""
    server_description: str | None = None
    """Tells the model what the server is for."""
    authorization: SecretStr | None = None
    """Sent to server_url as a bearer token; neither kept nor returned."""
    headers: dict[str, SecretStr] | None = Field(default=None, max_length=MAX_HEADERS)
    """Sent to server_url; neither kept nor returned."""
    allowed_tools: list[str] | ToolFilter | None = None
    """Names of tools, or a filter; by default all."""
    require_approval: Literal["always", "never"] | ApprovalFilters = "always"
    """Which calls wait for the client's approval."""

    @field_validator("server_url")
    @classmethod
    def _https(cls, value: str) -> str:
        try:
            url = urlsplit(value)
            known = url.scheme == "https" and url.hostname and url.username is None
            url.port  # noqa: B018  raises where it is no number
        except ValueError:
            known = False
        if not known:
            raise refuse("server_url must be an https:// address, without a user's name and password")
        return value

    @field_validator("headers")
    @classmethod
    def _printable(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, text in value.items():
            if not re.match(HEADER_NAME, name) or name.lower() == "host":
                raise refuse(f"headers has {shown(name)}, which may not be sent as a header")
            if not text.get_secret_value().isprintable() or not text.get_secret_value().isascii():
                raise refuse(f"headers[{shown(name)}] must be printable ASCII")
        return value

    @model_validator(mode="after")
    def _belongs_to_url(self) -> McpTool:
        check_rules(self, _URL_RULES)
        return self

    def allows(self, tool: ServerTool) -> bool:
        if isinstance(self.allowed_tools, ToolFilter):
            return self.allowed_tools.fits(tool)
        return self.allowed_tools is None or tool.name in self.allowed_tools

    def asks_approval(self, tool: ServerTool) -> bool:
        if isinstance(self.require_approval, ApprovalFilters):
            return self.require_approval.asks(tool)
        return self.require_approval == "always"

    def settings(self) -> ServerSettings:
        assert self.server_url is not None
        headers = {name: text.get_secret_value() for name, text in (self.headers or {}).items()}
        if self.authorization is not None:
            headers["Authorization"] = f"Bearer {self.authorization.get_secret_value()}"
        is_sse = urlsplit(self.server_url).path.rstrip("/").endswith("/sse")
        return ServerSettings(
            self.server_label,
            "sse" if is_sse else "http",
            url=self.server_url,
            headers=headers,
            description=self.server_description,
            public_only=True,
        )

    def shown(self) -> dict[str, Any]:
        """As a response repeats it: without what may be secret."""
        fields = self.model_dump(exclude={"authorization"}) | {"headers": None}
        if self.server_url is not None:
            fields["server_url"] = f"https://{urlsplit(self.server_url).netloc}/<redacted>"
        return fields


class ChosenServer(RequestModel):
    """Call a tool of this server."""

    type: Literal["mcp"]
    server_label: str
    """Of a server in tools."""
    name: str | None = None
    """Of the tool, as the server has it; by default any."""


MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

LOGPROBS = "message.output_text.logprobs"
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


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
    verbosity: Literal["medium"] | None = None
    """Only the default; models here have no such setting."""


class ReasoningConfig(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"context", "mode"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Given to templates that know an effort; for others it is a budget (docs/tools.md), and "none" is off."""
    summary: Literal["auto", "detailed"] | None = None
    """Send the reasoning as a summary, its whole text, instead of as reasoning_text."""
    generate_summary: Literal["auto", "detailed"] | None = None
    """The older name of summary."""

    @model_validator(mode="after")
    def _one_summary(self) -> ReasoningConfig:
        if self.summary is not None and self.generate_summary not in (None, self.summary):
            raise refuse("summary and generate_summary are one setting, give one of them", "generate_summary")
        return self


class FunctionTool(FunctionDefinition):
    """A function that the client runs."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})

    type: Literal["function"]


def _known_kind(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") not in ("function", "mcp"):
        raise refuse(f"type is {shown(value.get('type'))}; this server has 'function' and 'mcp'", "type")
    return value


AnyTool = Annotated[FunctionTool | McpTool, Field(discriminator="type"), BeforeValidator(_known_kind)]


class ChosenFunction(RequestModel):
    """Call this function."""

    type: Literal["function"]
    name: str
    """Of a function in tools."""


Chosen = Annotated[ChosenFunction | ChosenServer, Field(discriminator="type"), BeforeValidator(_known_kind)]


class AllowedFunctions(RequestModel):
    """Choose among a part of the tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """auto lets the model decide, required makes it call one."""
    tools: list[Chosen] = Field(min_length=1)
    """Functions and servers of tools, by name and label."""


def _known_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") not in ("function", "mcp", "allowed_tools"):
        kind = shown(value.get("type"))
        raise refuse(f"tool_choice.type is {kind}; this server has function, mcp and allowed_tools", "type")
    return value


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"]
    | Annotated[ChosenFunction | ChosenServer | AllowedFunctions, Field(discriminator="type")],
    BeforeValidator(_known_choice),
]


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
    """Functions the client runs, and servers whose tools this server runs. Where the server has `mcp_inject`, its tool
    servers' tools are offered as functions to a request without it; an empty list offers none."""
    tool_choice: ResponseToolChoice = "auto"
    """none, auto, required, a function, a server, or allowed_tools."""
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
                    field = f"tools[{at}].{kind}"
                    raise refuse(f"{field} is {shown(name)}, which tools has twice", field)
        return self

    @property
    def function_names(self) -> dict[int, str]:
        """By the place in tools."""
        return {at: tool.name for at, tool in enumerate(self.tools) if isinstance(tool, FunctionTool)}

    @property
    def server_labels(self) -> dict[int, str]:
        """By the place in tools."""
        return {at: tool.server_label for at, tool in enumerate(self.tools) if isinstance(tool, McpTool)}

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation

    @property
    def summarizes(self) -> bool:
        config = self.reasoning
        return config is not None and (config.summary or config.generate_summary) is not None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: Literal[False] | None = None
    """Only false: this server pads no events."""


_RULES = (
    Rule(lambda body: not body.stream, {"stream_options": ()}, "needs stream to be true"),
    Rule(
        lambda body: not body.store,
        {"background": (False,)},
        "needs store to be true: the response is fetched by its id",
    ),
    Rule(lambda body: LOGPROBS not in body.include, {"top_logprobs": (0,)}, f"needs include to have {LOGPROBS!r}"),
)


class ResponseRequest(PromptFields, MetadataFields, SamplingFields):
    unsupported: ClassVar[frozenset[str]] = frozenset({
        "access_programs", "context_management", "image", "mm_processor_kwargs", "moderation", "prompt",
        "prompt_cache_options",
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
    include: list[Includable] = Field(default_factory=list)
    """message.output_text.logprobs adds log-probabilities. reasoning.encrypted_content adds nothing: a reasoning item
    has its text in the clear, which is what a client has to send back."""
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

    prompt_cache_key: str | None = None
    """Accepted, without effect: prefixes are always shared."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Accepted, without effect: prefixes stay as long as there is room."""
    safety_identifier: str | None = None
    """Accepted, without effect, as OpenAI documents it."""
    service_tier: Literal["auto", "default", "flex", "priority", "fast", "scale"] | None = None
    """Accepted, without effect: there is one tier, and the response says "default"."""

    @model_validator(mode="after")
    def _response_fields(self) -> ResponseRequest:
        check_rules(self, _RULES)
        return self

    @property
    def logprobs_count(self) -> int | None:
        return self.top_logprobs if LOGPROBS in self.include else None


class InputTokensRequest(PromptFields):
    unsupported: ClassVar[frozenset[str]] = frozenset({"personality"})


class ConversationRequest(MetadataFields):
    items: list[NewItem] = Field(default_factory=list, max_length=MAX_ITEMS)
    """The items with which the conversation begins."""


class ConversationUpdate(RequestModel):
    metadata: ObjectMetadata
    """Replaces what is there."""


class ConversationItemsRequest(RequestModel):
    items: list[NewItem] = Field(min_length=1, max_length=MAX_ITEMS)
    """Put at the conversation's end."""
