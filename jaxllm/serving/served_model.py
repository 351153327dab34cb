"""One model of the server: its engine, its words, and what runs on it now."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

from jaxllm.config import ModelConfig
from jaxllm.engine.core.detokenizer import special_token_ids
from jaxllm.errors import ConfigError, ContextLengthError, EngineDeadError, Field, InvalidRequestError, reason
from jaxllm.serving.conversation import Rendering, naming
from jaxllm.serving.fingerprint import system_fingerprint
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.parsing.formats import detect_formats
from jaxllm.serving.parsing.grammar import special_tokens
from jaxllm.serving.parsing.output_format import OutputFormats
from jaxllm.serving.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import (
        AsyncLLM,  # imports JAX, which a command line that is wrong need not wait for
    )
    from jaxllm.text.tokenizer import Tokenizer

MAX_TEXT_TOKENS = 2**18
"""Of a text that need not fit the context: one that is cut or only tokenized. The context's length if that is more."""
MAX_KEPT_TEMPLATE = 64 * 1024
"""Characters of a template whose formats are remembered: a stranger's may have megabytes."""


class Running(Protocol):
    """A request under way."""

    def abort(self, error: APIError) -> None:
        """End it now; its client gets the error."""


def stopped() -> APIError:
    """What clients are told whose answers are not complete when the server ends."""
    return unavailable("the server stopped before the answer was complete", code="shutting_down")


class ServedModel:
    """An engine with its tokenizer, its chat template and the formats of its answers.

    `running` are the requests under way; none begins once `draining` is true.

    Raises ConfigError when config.chat_template cannot be read, or a parser's name is unknown, and InvalidRequestError
    when config.default_chat_template_kwargs has a name that the server sets.
    """

    def __init__(self, config: ModelConfig, engine: AsyncLLM, metrics: RequestMetrics | None = None):
        """`metrics` are those to go on with, of the same model."""
        self.config = config
        self.names = config.names
        """What requests may call it. The first is the one that metrics and notices use."""
        self.engine = engine
        with naming(lambda _: Field("default_chat_template_kwargs")):
            Rendering(variables=config.default_chat_template_kwargs or {})  # refuses names that the server sets
        self.chat_template = read_chat_template(config)
        """Instead of the checkpoint's."""
        self.system_fingerprint = system_fingerprint(config, engine.info.max_model_len, self.chat_template)
        detect_formats(None, config.tool_call_parser, config.reasoning_parser)  # refuses unknown names at the start
        self.metrics = metrics or RequestMetrics(self.names[0], engine.info.max_model_len)
        self.running: set[Running] = set()
        self.draining = False

    def check_accepting(self, *, goes_on: bool = False) -> None:
        """Raises 503 when no request can start here. One that only `goes_on` may while the server is stopping."""
        if self.engine.is_dead:
            raise EngineDeadError(f"the engine has stopped; no request to {self.names[0]} can be answered")
        if self.draining and not goes_on:
            raise unavailable("the server is shutting down", code="shutting_down")

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError when the server was started without one."""
        if self.engine.tokenizer is None:
            raise InvalidRequestError(
                "this server runs without a tokenizer (skip_tokenizer_init): send token ids to /v1/completions"
            )
        return self.engine.tokenizer

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
            reason = "the most this server encodes" if may_be_cut else "and the context holds no more"
            raise ContextLengthError([source, f" has more than {most} tokens, {reason}"])

    @property
    def has_chat_template(self) -> bool:
        """Whether it answers chats; a base model only continues text."""
        tokenizer = self.engine.tokenizer
        return self.chat_template is not None or (tokenizer is not None and tokenizer.chat_template is not None)

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
        return detect(chat_template, self.config.tool_call_parser, self.config.reasoning_parser)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The tokenizer's special tokens, by text, as grammars need them."""
        return special_tokens(self.tokenizer.backend)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """What skip_special_tokens leaves out of a text; nothing where there is no tokenizer."""
        tokenizer = self.engine.tokenizer
        return frozenset() if tokenizer is None else special_token_ids(tokenizer.backend)

    def marker_ids(self, formats: OutputFormats, *, with_tools: bool) -> list[int]:
        """Special tokens that a parser must see in the text."""
        if not with_tools:
            formats = replace(formats, tools=None)
        ids = map(self.tokenizer.backend.token_to_id, formats.markers)
        return [token for token in ids if token in self.special_token_ids]


@lru_cache(maxsize=32)
def _detect(chat_template: str, tool_call_parser: str, reasoning_parser: str) -> OutputFormats:
    return detect_formats(chat_template, tool_call_parser, reasoning_parser)


def read_chat_template(config: ModelConfig) -> str | None:
    """The text of config.chat_template, if one is set. Raises ConfigError when it cannot be read."""
    if config.chat_template is None:
        return None
    try:
        return config.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template is {str(config.chat_template)!r}, which cannot be read: {reason(error)}"
        ) from None
