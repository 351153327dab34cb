"""Items of tools that the server runs, as clients send them back."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.responses.items import MAX_ID, CallStatus, InputItem, Item


class ListedToolItem(RequestModel):
    """A tool as its server described it."""

    name: str
    """As the server calls it."""
    input_schema: dict[str, Any]
    """JSON schema of its arguments."""
    description: str | None = None
    """What the server says of it."""
    annotations: dict[str, Any] | None = None
    """What else the server says of it."""


class McpListToolsItem(InputItem):
    """The tools that a server had: with it in the context, the response does not list them again."""

    type: Literal["mcp_list_tools"]
    server_label: str
    """Of the server."""
    tools: list[ListedToolItem]
    """Sent back as they came; the model is told what the server says now."""
    error: str | None = None
    """Why there were none."""

    def item(self) -> Item:
        tools = [tool.model_dump() for tool in self.tools]
        return self._identified("mcp_list_tools", server_label=self.server_label, tools=tools, error=self.error)


class McpCallItem(InputItem):
    """A call that the server made, and what came of it."""

    type: Literal["mcp_call"]
    server_label: str
    """Of the server that ran it."""
    name: str
    """Of the tool, as the server calls it."""
    arguments: str
    """JSON text of an object."""
    output: str | None = None
    """What the tool returned."""
    error: dict[str, Any] | None = None
    """What went wrong instead."""
    approval_request_id: str | None = None
    """Of the request that was approved."""
    status: CallStatus | None = None
    """One that is incomplete is not shown to the model."""

    def item(self) -> Item:
        fields = self.model_dump(exclude={"id", "type", "status"})
        return self._identified("mcp_call", **fields, status=self.status or "completed")


class McpApprovalRequestItem(InputItem):
    """A call that waits for approval."""

    type: Literal["mcp_approval_request"]
    id: str = Field(min_length=1, max_length=MAX_ID)
    """What its answer names it by."""
    server_label: str
    """Of the server that would run it."""
    name: str
    """Of the tool, as the server calls it."""
    arguments: str
    """JSON text of an object."""

    def item(self) -> Item:
        return self._identified("mcp_approval_request", **self.model_dump(exclude={"id", "type"}))


class McpApprovalResponseItem(InputItem):
    """The answer to a call that waits for approval."""

    type: Literal["mcp_approval_response"]
    approval_request_id: str
    """Of the item that asked."""
    approve: bool
    """true runs the call before the model goes on, false tells the model that it was refused."""
    reason: str | None = None
    """Told to the model with a refusal."""

    def item(self) -> Item:
        return self._identified("mcp_approval_response", **self.model_dump(exclude={"id", "type"}))
