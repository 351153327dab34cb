"""A model as conversations need it: its tokenizer, its chat template, the formats of its answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from jaxllm.chat.conversation import Conversation, Rendering, naming
from jaxllm.chat.events import OutputFormats
from jaxllm.chat.formats import detect_formats
from jaxllm.chat.grammar import special_tokens
from jaxllm.engine.core.detokenizer import special_token_ids
from jaxllm.engine.messages import EngineInfo
from jaxllm.errors import ContextLengthError, Field, InvalidRequestError

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

MAX_TEXT_TOKENS = 2**18
"""Of a text that need not fit the context: one that is cut or only tokenized. The context's length if that is more."""
MAX_KEPT_TEMPLATE = 64 * 1024
"""Characters of a template whose formats are remembered: a stranger's may have megabytes."""


class Engine(Protocol):
    """An LLM or an AsyncLLM."""

    tokenizer: Tokenizer | None

    @property
    def info(self) -> EngineInfo: ...


class ChatModel:
    """An engine that conversations are held with.

    Args:
        chat_template: instead of the checkpoint's.
        tool_call_parser, reasoning_parser: names of formats, "none", or "auto" for those that the template speaks.
        content_format: how the template is given contents: see `in_format`.
        variables: of the template, where a conversation says nothing of them.

    Raises ConfigError when a parser's name is unknown, and InvalidRequestError when `variables` has a reserved name.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        chat_template: str | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        content_format: Literal["auto", "string", "openai"] = "auto",
        variables: Mapping[str, Any] | None = None,
    ):
        self.engine: Any = engine
        self.chat_template = chat_template
        self.content_format: Literal["auto", "string", "openai"] = content_format
        self.parsers = tool_call_parser, reasoning_parser
        self.variables = variables or {}
        with naming(lambda _: Field("default_chat_template_kwargs")):
            Rendering(variables=self.variables)  # refuses names that are not the caller's
        detect_formats(None, *self.parsers)  # refuses unknown names at the start

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError when the engine was started without one."""
        tokenizer: Tokenizer | None = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "the engine runs without a tokenizer (skip_tokenizer_init): only completions of token ids are possible"
            )
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether it answers chats; a base model only continues text."""
        tokenizer = self.engine.tokenizer
        return self.chat_template is not None or (tokenizer is not None and tokenizer.chat_template is not None)

    def with_defaults(self, conversation: Conversation) -> Conversation:
        """The conversation with the model's own variables of the template, where it has none."""
        rendering = conversation.rendering.with_defaults(self.variables)
        return dataclasses.replace(conversation, rendering=rendering)

    def encode(
        self, text: str, source: Field, *, add_special_tokens: bool = True, may_be_cut: bool = False
    ) -> list[int]:
        """Token ids of a text. Raises ContextLengthError of `source`, see `check_length`."""
        self.check_length(text, source, may_be_cut=may_be_cut)
        return self.tokenizer.encode(text, add_special_tokens)

    def check_length(self, text: str, source: Field, *, may_be_cut: bool) -> None:
        """Refuse a text that surely does not fit the context, or with `may_be_cut` one beyond MAX_TEXT_TOKENS.

        Raises ContextLengthError of `source`, without encoding all of the text.
        """
        context = self.engine.info.max_model_len
        most = max(context, MAX_TEXT_TOKENS) if may_be_cut else context
        if self.tokenizer.exceeds(text, most):
            reason = "the most that is encoded" if may_be_cut else "and the context holds no more"
            raise ContextLengthError([source, f" has more than {most} tokens, {reason}"])

    def render(self, values: dict[str, Any]) -> str:
        """What a template makes of `Tokenizer.chat_template_values`.

        The model's own is rendered here, a caller's in a process that can be stopped. Raises InvalidRequestError.
        """
        return self.tokenizer.render(values, own=self.chat_template)

    def token_text(self, token_id: int) -> str:
        """One token's text; its number when there is no tokenizer."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes for log-probabilities; its number's when there is no tokenizer."""
        tokenizer = self.engine.tokenizer
        return f"token_id:{token_id}".encode() if tokenizer is None else tokenizer.token_bytes(token_id)

    def formats(self, chat_template: str) -> OutputFormats:
        """How tool calls and reasoning look in answers to prompts of this template."""
        detect = _detect if len(chat_template) <= MAX_KEPT_TEMPLATE else detect_formats
        return detect(chat_template, *self.parsers)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The tokenizer's special tokens, by text, as grammars need them; none where there is no tokenizer."""
        return {} if self.engine.tokenizer is None else special_tokens(self.tokenizer.backend)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """What skip_special_tokens leaves out of a text; nothing where there is no tokenizer."""
        tokenizer = self.engine.tokenizer
        return frozenset() if tokenizer is None else special_token_ids(tokenizer.backend)

    def marker_ids(self, formats: OutputFormats, *, with_tools: bool) -> list[int]:
        """Special tokens that a parser must see in the text."""
        if not with_tools:
            formats = dataclasses.replace(formats, tools=None)
        ids = map(self.tokenizer.backend.token_to_id, formats.markers)
        return [token for token in ids if token in self.special_token_ids]


@lru_cache(maxsize=32)
def _detect(chat_template: str, tool_call_parser: str, reasoning_parser: str) -> OutputFormats:
    return detect_formats(chat_template, tool_call_parser, reasoning_parser)
