"""/tokenize and /detokenize: vLLM's fields, and llama.cpp's `content`."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from pydantic import model_validator

from jaxllm.chat.conversation import Conversation
from jaxllm.serving.http.request_model import RequestModel, refuse
from jaxllm.serving.openai.messages import Messages, TemplateFields
from jaxllm.serving.openai.tools import ToolFields

_SOURCES = ("prompt", "messages", "content")


class TokenizeRequest(TemplateFields, ToolFields):
    unsupported: ClassVar[frozenset[str]] = frozenset({"mm_processor_kwargs", "parse_special", "with_pieces"})

    model: str | None = None
    """A name that /v1/models lists; by default the first."""
    prompt: str | None = None
    """Text; special tokens are added unless add_special_tokens is false."""
    content: str | None = None
    """Text; llama.cpp's name, where special tokens are added only if add_special is true."""
    messages: Messages | None = None
    """A chat, rendered as /v1/chat/completions does."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens; true for prompt, false otherwise."""
    add_special: bool | None = None
    """llama.cpp's name of add_special_tokens."""
    return_token_strs: bool = False
    """Also return each token's text."""

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise refuse(f"give one of prompt, messages and content, not {' and '.join(given) or 'none'}", "prompt")
        if self.add_special is not None and self.content is None:
            raise refuse("add_special goes with content; use add_special_tokens", "add_special")
        return self

    def conversation(self) -> Conversation:
        """The chat that is to be tokenized. Raises InvalidRequestError: see FIELD_NAMES."""
        return Conversation(
            messages=[message.message() for message in self.messages or ()],
            tools=self.callable_tools(),
            rendering=self.rendering(special_tokens=self.special_tokens),
        )

    @property
    def special_tokens(self) -> bool:
        for asked in (self.add_special_tokens, self.add_special):
            if asked is not None:
                return asked
        return self.prompt is not None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    """A name that /v1/models lists; by default the first."""
    tokens: list[int]
    """Token ids."""


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What a client needs to render and count as this server does."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None
