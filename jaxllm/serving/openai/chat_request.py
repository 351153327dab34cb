"""/v1/chat/completions: the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from jaxllm.errors import Field as Place
from jaxllm.requests.sampling import MAX_LOGPROBS
from jaxllm.serving.conversation import Conversation, renaming
from jaxllm.serving.generation_settings import GenerationSettings
from jaxllm.serving.http.request_model import refuse
from jaxllm.serving.openai.messages import FIELD_NAMES, Messages, TemplateFields
from jaxllm.serving.openai.sampling import UNSUPPORTED_SAMPLING, GenerationRequest
from jaxllm.serving.openai.tools import ToolFields

MAX_METADATA = 16
"""OpenAI's limit."""


class ChatRequest(GenerationRequest, TemplateFields, ToolFields):
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_SAMPLING | {
        "audio", "function_call", "functions", "mm_processor_kwargs", "prediction", "suffix", "verbosity",
        "web_search_options",
    }  # fmt: skip

    messages: Messages
    """The conversation so far."""
    logprobs: bool = False
    """Return log-probabilities of the generated tokens."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of this many likeliest tokens at each position; needs logprobs."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The older name of max_completion_tokens."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Upper bound on generated tokens; by default what is left of the context."""
    add_special_tokens: bool = False
    """Add the tokenizer's own special tokens to the rendered prompt, whose template usually has them already."""
    echo: bool = False
    """Begin each answer with the text of the last message, if that has the role of the answer."""
    include_reasoning: bool = True
    """Return the model's reasoning; false leaves it out of the answer."""
    modalities: list[Literal["text"]] | None = None
    """Only text."""
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    """Accepted, without effect: nothing is stored."""
    store: bool | None = None
    """Accepted, without effect: nothing is stored."""
    service_tier: str | None = None
    """Accepted, without effect, as OpenAI documents it for a single tier."""
    safety_identifier: str | None = None
    """Accepted, without effect: it names a user to OpenAI's abuse detection."""
    prompt_cache_key: str | None = None
    """Accepted, without effect: every prompt is looked up in the prefix cache."""
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    """Prefixes are kept in memory only."""

    @model_validator(mode="after")
    def _chat_fields(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise refuse("logprob_token_ids needs logprobs to be true", "logprob_token_ids")
        if self.logprob_token_ids is not None and self.top_logprobs:
            raise refuse("logprob_token_ids and top_logprobs are one setting, give one of them", "logprob_token_ids")
        budgets = {self.max_thinking_tokens, super().thinking_budget} - {None}
        if len(budgets) > 1:
            raise refuse(
                f"max_thinking_tokens is {self.max_thinking_tokens} and thinking.budget_tokens is "
                f"{super().thinking_budget}: they are one setting, give one of them",
                "max_thinking_tokens",
            )
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise refuse(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}: "
                "they are one setting, give one of them",
                "max_tokens",
            )
        return self

    @property
    def thinking_budget(self) -> int | None:
        return super().thinking_budget if self.max_thinking_tokens is None else self.max_thinking_tokens

    @property
    def logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> Conversation:
        """Raises InvalidRequestError: see `own_names`."""
        return Conversation(
            messages=[message.message() for message in self.messages],
            tools=self.callable_tools(),
            tool_choice=self.choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            rendering=self.rendering(special_tokens=self.add_special_tokens),
            structured_outputs=self.constraint(),
        )

    def generation_settings(self) -> GenerationSettings:
        return self.settings(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=self.logprobs_count,
            prompt_logprobs=self.prompt_logprobs,
        )

    def own_names(self) -> Callable[[Place], Place]:
        """What the fields of its Conversation and GenerationSettings are called here."""
        names = {"structured_outputs": self.constraint_field or "structured_outputs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return renaming(FIELD_NAMES | names)

    @property
    def echoed(self) -> str:
        """What each answer begins with."""
        last, rendering = self.messages[-1], self.rendering()
        if not self.echo or (last.role != "assistant" and rendering.opens_answer):
            return ""
        return last.message().text
