"""Tool servers as a request's tools name them."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from jaxllm.mcp.settings import LABEL, ServerSettings
from jaxllm.mcp.tools import ServerTool
from jaxllm.serving.http.request_model import RequestModel, refuse
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
        for name in ("authorization", "headers"):
            if getattr(self, name) is not None and self.server_url is None:
                raise refuse(f"{name} belongs to server_url; configured servers have their own", name)
        return self

    def allows(self, tool: ServerTool) -> bool:
        match self.allowed_tools:
            case None:
                return True
            case ToolFilter() as some:
                return some.fits(tool)
            case names:
                return tool.name in names

    def asks_approval(self, tool: ServerTool) -> bool:
        match self.require_approval:
            case ApprovalFilters() as filters:
                return filters.asks(tool)
            case word:
                return word == "always"

    def settings(self) -> ServerSettings:
        """How server_url is reached."""
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
