"""What all requests share: strict types, no field ignored, sampling fields; and usage, which all responses share."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from jaxllm.config import did_you_mean
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.errors import shown

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a checkpoint's generation_config may set for requests that don't."""

UNSUPPORTED_SAMPLING = frozenset({
    "allowed_token_ids", "bad_words", "best_of", "early_stopping", "guided_choice", "guided_decoding_backend",
    "guided_grammar", "guided_json", "guided_regex", "include_reasoning", "kv_transfer_params",
    "length_penalty", "logits_processors", "repeat_last_n", "return_token_ids", "return_tokens_as_token_ids",
    "spaces_between_special_tokens", "structural_tag", "structured_outputs", "thinking", "use_beam_search",
    "vllm_xargs",
})  # fmt: skip
"""Fields of vLLM's server that this one refuses by name."""


def refuse(message: str, param: str | None = None) -> PydanticCustomError:
    """An error for a validator to raise, its message shown as it is; a model's validator names the field in `param`."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


class RequestModel(BaseModel):
    """A JSON object of which every field is honoured or refused: unknown names, wrong types and infinities are errors.

    null means absent. `unsupported` lists names that other servers know; they are refused as such.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    unsupported: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if value is not None}
        for name in data:
            if name in cls.model_fields or (name in cls.unsupported and name not in present):
                continue
            if name in cls.unsupported:
                raise refuse(f"{name} is not supported by this server", name)
            raise refuse(f"unknown field {shown(name)}{did_you_mean(name, cls.model_fields)}", name)
        return present


class StreamOptions(RequestModel):
    include_usage: bool = False
    """Send a last chunk with the usage and no choices."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""


class TextFormat(RequestModel):
    type: Literal["text"]


class GenerationRequest(RequestModel):
    """The fields that chat and text completions share; ranges are those of SamplingParams."""

    model: str | None = None
    """A name that /v1/models lists; by default the first."""
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    """Token id -> value added to its logit."""
    n: int = 1
    presence_penalty: float | None = None
    response_format: TextFormat | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    """Text that ends generation: a string, a list, {"Single": …} or {"Multi": […]}."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    """Accepted, without effect, as OpenAI documents it."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    """Log-probabilities of this many most likely tokens at each prompt position; -1 is the whole vocabulary."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    """Keep only the last so many prompt tokens; -1 keeps what leaves room in the context for max_tokens."""
    priority: int = 0
    """Lower runs earlier."""
    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Becomes part of the response's id."""
    cache_salt: str | None = Field(default=None, min_length=1)
    """Only requests with the same salt share cached prefixes."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids_as_strings(cls, value: Any) -> Any:
        """JSON keys are strings: {"50256": -100} -> {50256: -100}."""
        if not isinstance(value, dict):
            return value
        wrong = [key for key in value if not key.isdecimal()]
        if wrong:
            raise refuse(f"logit_bias has the key {shown(wrong[0])}; keys must be token ids")
        return {int(key): bias for key, bias in value.items()}

    @field_validator("stop", mode="before")
    @classmethod
    def _tagged_stop(cls, value: Any) -> Any:
        """{"Single": "\\n"} -> "\\n"; {"Multi": ["a", "b"]} -> ["a", "b"]."""
        if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"Single", "Multi"}:
            return next(iter(value.values()))
        return value

    @model_validator(mode="after")
    def _stream_fields(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options needs stream to be true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise refuse("prompt_logprobs is not available in a stream", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise refuse("truncate_prompt_tokens is 0; it must be -1, or 1 or more", "truncate_prompt_tokens")
        return self

    def sampling_params(self, defaults: dict[str, float], **derived: Any) -> SamplingParams:
        """The request's values, else the model's `defaults`, else OpenAI's; `derived` are the caller's own.

        Raises InvalidRequestError when a value is out of range.
        """
        fields: dict[str, Any] = {name: defaults[name] for name in SAMPLING_DEFAULTS if name in defaults}
        if "top_k" in fields:
            fields["top_k"] = int(fields["top_k"])
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        return SamplingParams(**fields | derived)


_SAMPLING_FIELDS = (
    "n", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens",
)  # fmt: skip


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Error(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    error: Error
