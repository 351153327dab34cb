"""Items as clients send them, and the one plain form in which they are kept, listed and shown to the model."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxllm.chat.pictures import Detail
from jaxllm.serving.http.request_model import CacheBreakpoint, RequestModel, Unread, refuse
from jaxllm.serving.openai.messages import FunctionCall
from jaxllm.wording import shown

Item = dict[str, Any]
"""An item in OpenAI's form, with id and, where its kind has one, status."""

ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "compaction": "cmp", "compaction_summary": "cmp",
    "mcp_list_tools": "mcpl", "mcp_call": "mcp", "mcp_approval_request": "mcpr", "mcp_approval_response": "mcpa",
    "local_shell_call": "lsh", "shell_call": "sh", "apply_patch_call": "apc", "tool_search_call": "tsc",
    "local_shell_call_output": "lsho", "shell_call_output": "sho", "apply_patch_call_output": "apco",
    "tool_search_output": "tso", "web_search_call": "ws", "file_search_call": "fs", "code_interpreter_call": "ci",
    "image_generation_call": "ig",
}  # fmt: skip
HOSTED_CALLS = {
    "local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation",
    "tool_search_call": "arguments",
}  # fmt: skip
"""Calls of others' tools that a client has run, and what they say of the call; their outputs are items of their own."""
HOSTED_OUTPUTS = {
    "local_shell_call_output": "output", "shell_call_output": "output", "apply_patch_call_output": "output",
    "tool_search_output": "tools",
}  # fmt: skip
CALLS = {"function_call", "custom_tool_call", *HOSTED_CALLS}
"""Calls with a call_id, which an output answers."""
OUTPUTS = {"function_call_output", "custom_tool_call_output", *HOSTED_OUTPUTS}
UNSHOWN = {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"}
"""What others' servers did by themselves, which the model is not shown."""

CLEAR = "jaxllm:"
"""What content begins with that stands where OpenAI has encrypted one."""
MAX_ID = 128
MAX_ITEMS = 10_000

ItemStatus = Literal["in_progress", "completed", "incomplete"]
CallStatus = Literal["in_progress", "calling", "completed", "incomplete", "failed"]
"""Of a call that the server makes."""


def new_id(prefix: str) -> str:
    """'msg' -> 'msg_3f2a…'"""
    return f"{prefix}_{uuid.uuid4().hex}"


class InputText(RequestModel):
    type: Literal["input_text"]
    text: str
    """The words of the user, or the result of a function."""
    prompt_cache_breakpoint: CacheBreakpoint | None = Field(default=None, exclude=True)
    """Accepted, without effect: prefixes are cached by themselves."""


class InputImage(RequestModel):
    type: Literal["input_image"]
    image_url: str | None = Field(default=None, min_length=1)
    """As the url of a chat's image."""
    file_id: str | None = Field(default=None, min_length=1, max_length=MAX_ID)
    """Of an uploaded file, instead of image_url."""
    detail: Detail | None = None
    """As in a chat."""
    prompt_cache_breakpoint: CacheBreakpoint | None = Field(default=None, exclude=True)
    """Accepted, without effect: prefixes are cached by themselves."""

    @model_validator(mode="after")
    def _one_source(self) -> InputImage:
        if (self.image_url is None) == (self.file_id is None):
            raise refuse("image_url or file_id is required, and not both", "image_url")
        return self


class OutputTextPart(RequestModel):
    """Text of an earlier answer, as a response had it."""

    type: Literal["output_text"]
    text: str
    """The words of the model."""
    annotations: list[dict[str, Any]] | None = None
    """Sent back as they came; the model does not see them."""
    logprobs: list[dict[str, Any]] | None = None
    """Sent back as they came; the model does not see them."""


class RefusalContent(RequestModel):
    type: Literal["refusal"]
    refusal: str
    """Shown to the model as text."""


class SummaryTextPart(RequestModel):
    type: Literal["summary_text"]
    text: str
    """Used where content is missing."""


class ReasoningTextPart(RequestModel):
    type: Literal["reasoning_text"]
    text: str
    """The reasoning."""


def one_of(*known: str, unread: Sequence[str] = ()) -> BeforeValidator:
    """Say which types exist, before pydantic reports that none of a union's branches fits. Those of `unread` pass."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in (*known, *unread):
            raise refuse(f"type is {shown(value.get('type'))}; this server has {', '.join(known)}", "type")
        return value

    return BeforeValidator(check)


ContentPart = Annotated[
    InputText | InputImage | OutputTextPart | RefusalContent,
    Field(discriminator="type"),
    one_of("input_text", "input_image", "output_text", "refusal"),
]
OutputPart = Annotated[InputText | InputImage, Field(discriminator="type"), one_of("input_text", "input_image")]


class InputItem(RequestModel):
    not_kept: ClassVar[frozenset[str]] = frozenset()
    """Fields that say nothing of the item."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Fields that are left out where they are null."""

    id: str | None = Field(default=None, min_length=1, max_length=MAX_ID)
    """By default the server makes one."""

    def item(self) -> Item:
        """The item as it is kept."""
        unsaid = {name for name in self.optional if getattr(self, name) is None}
        fields = self.model_dump(exclude=unsaid | self.not_kept)
        if "status" in fields:
            fields["status"] = fields["status"] or "completed"
        return fields | {"id": self.id or new_id(ID_PREFIXES[fields["type"]])}


class MessageItem(InputItem):
    not_kept: ClassVar[frozenset[str]] = frozenset({"phase"})

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    """developer is the same as system."""
    content: str | list[ContentPart]
    """Text, or a list of parts."""
    phase: Literal["commentary", "final_answer"] | None = None
    """Accepted, without effect: models here have no such phases."""
    status: ItemStatus | None = None
    """Sent back as it came."""

    @model_validator(mode="after")
    def _parts_of_role(self) -> MessageItem:
        for at, part in enumerate(self.content if isinstance(self.content, list) else ()):
            accepted = ("input_text", *(("output_text", "refusal") if self.role == "assistant" else ("input_image",)))
            if part.type not in accepted:
                name = f"content[{at}].type"
                raise refuse(f"{name} is {part.type!r}; role {self.role!r} has {', '.join(accepted)}", name)
        return self

    def item(self) -> Item:
        """The text of an answer is output_text, that of all others input_text."""
        kept = super().item()
        if isinstance(self.content, str):
            kept["content"] = [{"type": "input_text", "text": self.content}]
        if self.role == "assistant":
            kept["content"] = [part if part["type"] == "refusal" else _output_text(part) for part in kept["content"]]
        return kept


def _output_text(part: dict[str, Any]) -> dict[str, Any]:
    kept = {"type": "output_text", "text": part["text"], "annotations": part.get("annotations") or []}
    return kept if part.get("logprobs") is None else kept | {"logprobs": part["logprobs"]}


class FunctionCallItem(FunctionCall, InputItem):
    """A call that the model made earlier."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"async", "async_", "caller"})
    not_kept: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})
    optional: ClassVar[frozenset[str]] = frozenset({"namespace"})

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    """The name that its output has for it."""
    namespace: str | None = None
    """Of the function, where it is one of a namespace's."""
    status: ItemStatus | None = None
    """Sent back as it came."""


class CustomToolCallItem(InputItem):
    """A call of a custom tool that the model made earlier."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"async", "async_", "caller", "created_by"})
    optional: ClassVar[frozenset[str]] = frozenset({"namespace"})

    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    """The name that its output has for it."""
    name: str
    """Of the tool."""
    input: str
    """The text that it was given."""
    namespace: str | None = None
    """Of the tool, where it is one of a namespace's."""
    status: ItemStatus | None = None
    """Sent back as it came."""


class HostedItem(InputItem, Unread):
    """What became of a tool that this server does not have. The model is shown calls that a client has run, with their
    outputs; others' searches and images are not shown."""

    optional: ClassVar[frozenset[str]] = frozenset({"call_id"})

    type: Literal[
        "local_shell_call", "shell_call", "apply_patch_call", "tool_search_call", "local_shell_call_output",
        "shell_call_output", "apply_patch_call_output", "tool_search_output", "web_search_call", "file_search_call",
        "code_interpreter_call", "image_generation_call",
    ]  # fmt: skip
    """Beside it a call's action, operation or arguments are read, and an output's output or tools."""
    call_id: str | None = None
    """The name that its output has for it, or of the call that it answers; by default the id."""
    status: str | None = None
    """Sent back as it came."""

    def item(self) -> Item:
        kept = super().item()
        return kept if self.type in UNSHOWN else kept | {"call_id": self.call_id or kept["id"]}


class CompactionItem(InputItem):
    """What /v1/responses/compact made of a conversation. It stands for all before it but users' words."""

    type: Literal["compaction", "compaction_summary"]
    """compaction_summary is the same, as older clients call it."""
    encrypted_content: str
    """The summary, in the clear."""


class FunctionCallOutputItem(InputItem):
    """The result of a function, or of a custom tool."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"caller"})
    not_kept: ClassVar[frozenset[str]] = frozenset({"name", "namespace"})

    type: Literal["function_call_output", "custom_tool_call_output"]
    """Of the call that it answers."""
    call_id: str = Field(min_length=1)
    """Of the call that it answers."""
    output: str | list[OutputPart]
    """Text, or a list of parts."""
    name: str | None = None
    """Accepted, without effect: the call has it."""
    namespace: str | None = None
    """Accepted, without effect: the call has it."""
    status: ItemStatus | None = None
    """Sent back as it came."""


class ReasoningItem(InputItem):
    """Reasoning of an earlier answer; templates decide whether the model sees it again."""

    not_kept: ClassVar[frozenset[str]] = frozenset({"encrypted_content"})
    optional: ClassVar[frozenset[str]] = frozenset({"content"})

    type: Literal["reasoning"]
    summary: list[SummaryTextPart] = Field(default_factory=list)
    """Its text, if it was returned as a summary."""
    content: list[ReasoningTextPart] | None = None
    """Its text otherwise."""
    encrypted_content: str | None = None
    """Its text once more, as a response has it if include asked for it. Another server's is refused unless the text is
    there too: this one cannot read what others encrypted."""
    status: ItemStatus | None = None
    """Sent back as it came."""

    @model_validator(mode="after")
    def _readable(self) -> ReasoningItem:
        sent = self.encrypted_content
        if sent is not None and not (self.content or self.summary or sent.startswith(CLEAR)):
            raise refuse("encrypted_content cannot be read by this server; send content", "encrypted_content")
        return self

    def item(self) -> Item:
        kept = super().item()
        if self.encrypted_content is not None and not (self.content or self.summary):
            text = self.encrypted_content.removeprefix(CLEAR)
            kept["content"] = [{"type": "reasoning_text", "text": text}]
        return kept


class ListedToolItem(RequestModel):
    """A tool as its server described it."""

    name: str
    """As the server calls it."""
    input_schema: dict[str, Any]
    """JSON schema of its arguments."""
    description: str | None = None
    """The server's description of it."""
    annotations: dict[str, Any] | None = None
    """The server's further remarks on it."""


class McpListToolsItem(InputItem):
    """The tools that a server had: with it in the context, the response does not list them again."""

    type: Literal["mcp_list_tools"]
    server_label: str
    """Of the server."""
    tools: list[ListedToolItem]
    """Sent back as they came; the model is told what the server says now."""
    error: str | None = None
    """Why there were none."""


class McpCallItem(InputItem):
    """A call that the server made, and what came of it."""

    optional: ClassVar[frozenset[str]] = frozenset({"images"})

    type: Literal["mcp_call"]
    server_label: str
    """Of the server that ran it."""
    name: str
    """Of the tool, as the server calls it."""
    arguments: str
    """JSON text of an object."""
    output: str | None = None
    """The tool's result."""
    images: list[str] | None = None
    """The images of the result, in base64."""
    error: dict[str, Any] | None = None
    """The error instead of a result."""
    approval_request_id: str | None = None
    """Of the request that was approved."""
    status: CallStatus | None = None
    """One that is incomplete is not shown to the model."""


class McpApprovalRequestItem(InputItem):
    """A call that waits for approval."""

    type: Literal["mcp_approval_request"]
    id: str = Field(min_length=1, max_length=MAX_ID)
    """The name that its answer has for it."""
    server_label: str
    """Of the server that would run it."""
    name: str
    """Of the tool, as the server calls it."""
    arguments: str
    """JSON text of an object."""


class McpApprovalResponseItem(InputItem):
    """The answer to a call that waits for approval."""

    type: Literal["mcp_approval_response"]
    approval_request_id: str
    """Of the item that asked."""
    approve: bool
    """true runs the call before the model goes on, false tells the model that it was refused."""
    reason: str | None = None
    """Told to the model with a refusal."""


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


_New = (
    MessageItem | FunctionCallItem | FunctionCallOutputItem | CustomToolCallItem | ReasoningItem | CompactionItem
    | HostedItem | McpListToolsItem | McpCallItem | McpApprovalRequestItem | McpApprovalResponseItem
)  # fmt: skip

NewItem = Annotated[_New, Field(discriminator="type"), one_of(*ID_PREFIXES), BeforeValidator(_with_type)]
"""An item with its content, as a conversation takes it."""

AnyItem = Annotated[
    _New | ItemReference,
    Field(discriminator="type"),
    one_of(*ID_PREFIXES, "item_reference"),
    BeforeValidator(_with_type),
]
"""An item, or a reference to a stored one, as a response's input takes it."""
