"""Chat messages and how they become a prompt."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from jaxllm.serving.protocol.common import RequestModel, refuse

RESERVED_TEMPLATE_NAMES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "self", "template",
    "tokenize", "tools",
})  # fmt: skip
"""Set by the server or by other fields, so chat_template_kwargs may not."""


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class Message(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({
        "annotations", "audio", "function_call", "reasoning", "reasoning_content", "refusal", "tool_call_id",
        "tool_calls",
    })  # fmt: skip

    role: Literal["system", "developer", "user", "assistant"]
    """developer is OpenAI's newer name for system and renders as it."""
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """What a template sees: text parts joined by newlines, as vLLM does for templates that expect a string."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name is not None else {})


class TemplateFields(RequestModel):
    """The fields that choose how `messages` are rendered."""

    add_generation_prompt: bool | None = None
    """End the prompt with the start of an assistant turn; true unless continue_final_message is."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model goes on with it."""
    chat_template: str | None = None
    """A Jinja template instead of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as enable_thinking."""
    documents: list[dict[str, Any]] | None = None
    """Given to the template, for those that know retrieval."""

    @model_validator(mode="after")
    def _one_ending(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )
        reserved = sorted(RESERVED_TEMPLATE_NAMES & (self.chat_template_kwargs or {}).keys())
        if reserved:
            message = (
                f"chat_template_kwargs has {reserved[0]!r}; it may not set {', '.join(sorted(RESERVED_TEMPLATE_NAMES))}"
            )
            raise refuse(message, "chat_template_kwargs")
        return self

    def template_arguments(self, server_template: str | None) -> dict[str, Any]:
        """Keyword arguments of Tokenizer.apply_chat_template."""
        generation_prompt = self.add_generation_prompt
        if generation_prompt is None:
            generation_prompt = not self.continue_final_message
        documents = {"documents": self.documents} if self.documents is not None else {}
        return {
            "add_generation_prompt": generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template": self.chat_template or server_template,
            **(self.chat_template_kwargs or {}),
            **documents,
        }
