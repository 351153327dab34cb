"""Every kind of item that a client may send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.responses.items import (
    MAX_ID,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    one_of,
)
from jaxllm.serving.responses.mcp_items import (
    McpApprovalRequestItem,
    McpApprovalResponseItem,
    McpCallItem,
    McpListToolsItem,
)


class ItemReference(RequestModel):
    """An item of a stored response or conversation, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str = Field(min_length=1, max_length=MAX_ID)
    """Of the item."""


def _with_type(value: Any) -> Any:
    """OpenAI lets messages and references leave their type out."""
    if isinstance(value, dict) and value.get("type") is None:
        kind = "message" if "role" in value else "item_reference" if value.keys() <= {"id", "type"} else None
        return value | {"type": kind}
    return value


NEW_KINDS = (
    "message", "function_call", "function_call_output", "reasoning", "mcp_list_tools", "mcp_call",
    "mcp_approval_request", "mcp_approval_response",
)  # fmt: skip

_New = (
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | McpListToolsItem | McpCallItem
    | McpApprovalRequestItem | McpApprovalResponseItem
)  # fmt: skip

NewItem = Annotated[_New, Field(discriminator="type"), one_of(*NEW_KINDS), BeforeValidator(_with_type)]
"""An item with its content, as a conversation takes it."""

AnyItem = Annotated[
    _New | ItemReference,
    Field(discriminator="type"),
    one_of(*NEW_KINDS, "item_reference"),
    BeforeValidator(_with_type),
]
"""An item, or a reference to a stored one, as a response's input takes it."""
