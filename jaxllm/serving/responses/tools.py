"""The tools of a response's request, and the choice among them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from jaxllm.chat.conversation import MAX_TOOLS, TOOL_NAME, Tool, custom_tool
from jaxllm.chat.custom import TextInput
from jaxllm.errors import Field as Place
from jaxllm.mcp.settings import LABEL, ServerSettings
from jaxllm.mcp.tools import ServerTool
from jaxllm.serving.http.request_model import RequestModel, Rule, Unread, check_rules, refuse
from jaxllm.serving.openai.messages import FunctionDefinition
from jaxllm.serving.openai.structured import GrammarDefinition, TextFormat
from jaxllm.serving.responses.items import one_of
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


class ClientToolFields(RequestModel):
    """What a tool that the client runs has, of whatever type."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"async"})

    allowed_callers: list[Literal["direct"]] | None = Field(default=None, exclude=True)
    """Only direct: models here run no programs."""
    defer_loading: bool | None = Field(default=None, exclude=True)
    """Accepted, without effect: the model is told of all tools from the start."""


class FunctionTool(FunctionDefinition, ClientToolFields):
    """A function that the client runs."""

    unsupported: ClassVar[frozenset[str]] = ClientToolFields.unsupported

    type: Literal["function"]
    output_schema: dict[str, Any] | None = Field(default=None, exclude=True)
    """Accepted, without effect: the model does not see it."""


class InputGrammar(GrammarDefinition):
    """Texts that a grammar allows."""

    type: Literal["grammar"]


class CustomTool(ClientToolFields):
    """A tool that the client runs, and that takes a text instead of arguments."""

    type: Literal["custom"]
    name: str = Field(pattern=TOOL_NAME)
    """The model's name for the tool."""
    description: str | None = None
    """Tells the model what the tool is for."""
    format: Annotated[TextFormat | InputGrammar, Field(discriminator="type")] | None = None
    """Any text, the default, or those that a grammar allows."""

    def tool(self, *place: str | int) -> Tool:
        text_input = self.format.text_input() if isinstance(self.format, InputGrammar) else TextInput()
        return custom_tool(self.name, self.description, text_input, Place(*place, "format", "definition"))


class NamespaceTool(RequestModel):
    """Tools of one subject. The model knows each as NAMESPACE__NAME; calls of them have the two names apart."""

    type: Literal["namespace"]
    name: str = Field(pattern=TOOL_NAME)
    """The namespace's name."""
    description: str = ""
    """Told to the model with the first of its tools."""
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]] = Field(max_length=MAX_TOOLS)
    """Its functions and custom tools."""


HOSTED_TOOLS = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "tool_search",
    "apply_patch", "local_shell", "shell", "file_search", "code_interpreter", "image_generation", "computer",
    "computer_use_preview", "programmatic_tool_calling",
)  # fmt: skip


class HostedTool(Unread):
    """A tool that OpenAI runs, or has trained its models for. The model is not told of it; there must be others."""

    type: Literal[*HOSTED_TOOLS]  # type: ignore[valid-type]
    """An answer's header X-Warnings says which were left out."""


_OF_KNOWN_KIND = one_of("function", "custom", "namespace", "mcp", unread=HOSTED_TOOLS)

AnyTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | McpTool | HostedTool,
    Field(discriminator="type"),
    _OF_KNOWN_KIND,
]


def told_name(namespace: str | None, name: str) -> str:
    """The name that the model knows a tool by."""
    return f"{namespace}__{name}" if namespace else name


@dataclass(frozen=True)
class ClientTool:
    """A tool that the client runs, as one of a namespace or not, and its place in the request."""

    tool: FunctionTool | CustomTool
    place: Place
    namespace: str | None = None
    introduction: str = ""
    """Of the namespace, to be told with this tool."""

    @property
    def told_name(self) -> str:
        return told_name(self.namespace, self.tool.name)

    def told(self) -> Tool:
        """As the model is told of it."""
        tool = self.tool.tool(*self.place.path)
        description = "\n".join(filter(None, (self.introduction, tool.description))) or None
        return replace(tool, name=self.told_name, description=description)


class ChosenFunction(RequestModel):
    """Call this function, or custom tool."""

    type: Literal["function", "custom"]
    """As it is in tools."""
    name: str
    """Of a function, or custom tool, in tools; one of a namespace is NAMESPACE__NAME."""


Chosen = Annotated[ChosenFunction | ChosenServer | HostedTool, Field(discriminator="type"), _OF_KNOWN_KIND]


class AllowedFunctions(RequestModel):
    """Choose among a part of the tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """auto lets the model decide, required makes it call one."""
    tools: list[Chosen] = Field(min_length=1)
    """Functions, custom tools and servers of tools, by name and label."""


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"]
    | Annotated[ChosenFunction | ChosenServer | AllowedFunctions, Field(discriminator="type")],
    one_of("function", "custom", "mcp", "allowed_tools"),
]
