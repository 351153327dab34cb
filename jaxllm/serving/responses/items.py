"""Items as clients send them, and the plain form in which they are kept, listed and shown to the model."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxllm.serving.http.request_model import RequestModel, refuse
from jaxllm.serving.openai.tools import FunctionCall
from jaxllm.wording import shown

Item = dict[str, Any]
"""An item in OpenAI's form, with id and, where its kind has one, status."""

ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "mcp_list_tools": "mcpl", "mcp_call": "mcp", "mcp_approval_request": "mcpr", "mcp_approval_response": "mcpa",
}  # fmt: skip

MAX_ID = 128
MAX_ITEMS = 10_000

ItemStatus = Literal["in_progress", "completed", "incomplete"]
CallStatus = Literal["in_progress", "calling", "completed", "incomplete", "failed"]
"""Of a call that the server makes."""


def new_id(prefix: str) -> str:
    """'msg' -> 'msg_3f2a…'"""
    return f"{prefix}_{uuid.uuid4().hex}"


class InputText(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["input_text"]
    text: str
    """What the user says, or a function returned."""


class OutputTextPart(RequestModel):
    """Text of an earlier answer, as a response had it."""

    type: Literal["output_text"]
    text: str
    """What the model said."""
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


def one_of(*known: str) -> BeforeValidator:
    """Say which types exist, before pydantic reports that none of a union's branches fits."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in known:
            raise refuse(f"type is {shown(value.get('type'))}; this server has {', '.join(known)}", "type")
        return value

    return BeforeValidator(check)


ContentPart = Annotated[
    InputText | OutputTextPart | RefusalContent,
    Field(discriminator="type"),
    one_of("input_text", "output_text", "refusal"),
]
OutputPart = Annotated[InputText, one_of("input_text")]


class InputItem(RequestModel):
    id: str | None = Field(default=None, min_length=1, max_length=MAX_ID)
    """By default the server makes one."""

    def item(self) -> Item:
        """The item in the form in which responses list it."""
        raise NotImplementedError

    def _identified(self, kind: str, **fields: Any) -> Item:
        return {"id": self.id or new_id(ID_PREFIXES[kind]), "type": kind, **fields}


class MessageItem(InputItem):
    unsupported: ClassVar[frozenset[str]] = frozenset({"phase"})

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    """developer is the same as system."""
    content: str | list[ContentPart]
    """Text, or a list of parts."""
    status: ItemStatus | None = None
    """Sent back as it came."""

    @model_validator(mode="after")
    def _parts_of_role(self) -> MessageItem:
        for at, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if self.role != "assistant" and part.type != "input_text":
                name = f"content[{at}].type"
                raise refuse(f"{name} is {part.type!r}; messages of role {self.role!r} have 'input_text' only", name)
        return self

    def item(self) -> Item:
        """An answer's text is output_text, everybody else's input_text."""
        assistant = self.role == "assistant"
        parts = [InputText(type="input_text", text=self.content)] if isinstance(self.content, str) else self.content
        content: list[dict[str, Any]] = []
        for part in parts:
            if assistant and not isinstance(part, RefusalContent):
                annotations, logprobs = getattr(part, "annotations", None), getattr(part, "logprobs", None)
                shown_part = {"type": "output_text", "text": part.text, "annotations": annotations or []}
                content.append(shown_part | ({} if logprobs is None else {"logprobs": logprobs}))
            else:
                content.append(part.model_dump())
        return self._identified("message", role=self.role, status=self.status or "completed", content=content)


class FunctionCallItem(FunctionCall, InputItem):
    """A call that the model made earlier."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"async", "async_", "caller", "namespace"})

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    """What its output names it by."""
    status: ItemStatus | None = None
    """Sent back as it came."""

    def item(self) -> Item:
        fields = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return self._identified("function_call", **fields, status=self.status or "completed")


class FunctionCallOutputItem(InputItem):
    """What a function returned."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"caller", "name", "namespace"})

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    """Of the call that it answers."""
    output: str | list[OutputPart]
    """Text, or a list of parts."""
    status: ItemStatus | None = None
    """Sent back as it came."""

    def item(self) -> Item:
        output = self.output if isinstance(self.output, str) else [part.model_dump() for part in self.output]
        fields = {"call_id": self.call_id, "output": output, "status": self.status or "completed"}
        return self._identified("function_call_output", **fields)


class ReasoningItem(InputItem):
    """Reasoning of an earlier answer; templates decide whether the model sees it again."""

    type: Literal["reasoning"]
    summary: list[SummaryTextPart] = Field(default_factory=list)
    """Its text, if it was returned as a summary."""
    content: list[ReasoningTextPart] | None = None
    """Its text otherwise."""
    encrypted_content: str | None = None
    """Refused unless the text is there too: this server encrypts nothing and cannot read what others encrypted."""
    status: ItemStatus | None = None
    """Sent back as it came."""

    @model_validator(mode="after")
    def _readable(self) -> ReasoningItem:
        if self.encrypted_content is not None and not (self.content or self.summary):
            raise refuse("encrypted_content cannot be read by this server; send content", "encrypted_content")
        return self

    def item(self) -> Item:
        fields: dict[str, Any] = {"summary": [part.model_dump() for part in self.summary]}
        if self.content is not None:
            fields["content"] = [part.model_dump() for part in self.content]
        return self._identified("reasoning", **fields, status=self.status or "completed")
