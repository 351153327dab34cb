"""/v1/completions: request, response and chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, field_validator, model_validator

from jaxllm.requests.sampling import MAX_LOGPROBS
from jaxllm.serving.generation import GenerationSettings
from jaxllm.serving.http.request_model import are_integers, refuse
from jaxllm.serving.openai.kv_transfer import KVTransferAnswer
from jaxllm.serving.openai.logprobs import CompletionLogprobs, PromptLogprobs
from jaxllm.serving.openai.sampling import NO_LIMIT, UNSUPPORTED_SAMPLING, GenerationRequest
from jaxllm.serving.openai.timings import Timings
from jaxllm.serving.openai.usage import CompletionUsage
from jaxllm.serving.openai.weight_spans import WeightSpan

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024


class CompletionRequest(GenerationRequest):
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_SAMPLING | {"suffix"}
    path: ClassVar[str] = "/v1/completions"
    called_here: ClassVar[Mapping[str, str]] = {
        "max_output_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "input": "prompt",
        "stop_sequences": "stop", "top_logprobs": "logprobs", "text": "response_format",
    }  # fmt: skip

    prompt: str | list[str] | list[int] | list[list[int]]
    """One prompt as text or token ids, or a list of either."""
    echo: bool = False
    """Begin each choice with its prompt."""
    logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS)
    """Log-probabilities of this many most likely tokens besides the chosen one's; with echo, of the prompt's too."""
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=NO_LIMIT)
    """Upper bound on generated tokens; 0 only together with echo, to score a prompt; -1 is what the context leaves."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as the one that begins a sequence, to text prompts."""

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_kind(cls, value: Any, validate: Any) -> Any:
        """Lists of ids are checked here: they may be long, and pydantic would try every branch on every element."""
        if isinstance(value, list):
            if not value:
                raise refuse("prompt is an empty list; it must have at least one entry")
            if are_integers(value) or all(isinstance(entry, list) and entry and are_integers(entry) for entry in value):
                return value
            if not all(isinstance(entry, str) for entry in value):
                raise refuse("prompt must be a string, a list of strings, of token ids, or of lists of token ids")
            return value
        return validate(value)

    @model_validator(mode="after")
    def _completion_fields(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens is 0; it must be 1 or more, or 0 together with echo", "max_tokens")
        if self.logprob_token_ids and self.logprobs is None:
            raise refuse("logprob_token_ids needs logprobs, which may be 0", "logprob_token_ids")
        choices = len(self.prompts) * self.num_generated
        if choices > MAX_CHOICES:
            raise refuse(
                f"prompt has {len(self.prompts)} entries with {self.num_generated} choices each; "
                f"at most {MAX_CHOICES} choices",
                "prompt",
            )
        return self

    def generation_settings(self) -> GenerationSettings:
        unbounded = self.max_tokens == NO_LIMIT
        return self.settings(
            max_tokens=max(self.max_tokens, 1) if "max_tokens" in self.model_fields_set and not unbounded else None,
            default_max_tokens=None if unbounded else DEFAULT_MAX_TOKENS,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs_count,
        )

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def prompt_logprobs_count(self) -> int | None:
        """What the engine must compute: what was asked for, and what an echo with logprobs shows."""
        echoed = self.logprobs if self.echo else None
        if self.prompt_logprobs is None or echoed is None:
            return echoed if self.prompt_logprobs is None else self.prompt_logprobs
        return -1 if -1 in (self.prompt_logprobs, echoed) else max(self.prompt_logprobs, echoed)


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole response, or one chunk of a stream (whose usage may be absent or null)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: KVTransferAnswer | UnsetType = UNSET
    conversation_id: str | UnsetType = UNSET
    resource_id: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
