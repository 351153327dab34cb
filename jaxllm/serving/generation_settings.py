"""How an answer is generated, whichever API asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.engine.doors.beams import BeamSearchParams
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.sampling import SamplingDefaults, SamplingParams
from jaxllm.serving.hand_over import HandOver


@dataclass(frozen=True)
class BeamSearch:
    """A search for the most likely texts instead of sampling."""

    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What a request asks of generating.

    Attributes:
        sampling: fields of SamplingParams that the caller set, by name; the others are the model's.
        max_tokens: upper bound on generated tokens; None is `default_max_tokens`, or what is left of the context.
        cut_to_context: a max_tokens that the context has no room for is cut to it, not refused.
        n: choices to return for each prompt, the best of `num_generated`.
        truncate_prompt_tokens: keep only this many prompt tokens; -1 keeps what leaves room for max_tokens.
        truncation_side: the end of the prompt that is cut off.
        priority: lower runs earlier.
        request_id: the caller's own, part of the answer's id.
        cache_salt: only requests with the same salt share cached prefixes.
        prediction: what the answer may well be, or have in it.
        lora: how strongly adapters are used, by their numbers; None where the caller says nothing of them.
        hand_over: the prompt is computed for another server, or was computed by one.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    cut_to_context: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    num_generated: int = 1
    beam_search: BeamSearch | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    prediction: str = ""
    lora: Mapping[int, float] | None = None
    hand_over: HandOver | None = None

    def beam_search_params(self, max_tokens: int) -> BeamSearchParams | None:
        """The search that is asked for; None to sample."""
        if self.beam_search is None:
            return None
        return BeamSearchParams(
            beam_width=self.num_generated,
            max_tokens=max_tokens,
            length_penalty=self.beam_search.length_penalty,
            ignore_eos=bool(self.sampling.get("ignore_eos")),
            early_stopping=self.beam_search.early_stopping,
        )

    def sampling_params(self, defaults: SamplingDefaults, **derived: Any) -> SamplingParams:
        """The request's values, else the model's `defaults`, else OpenAI's; `derived` are the server's own.

        Raises InvalidRequestError when a value is out of range.
        """
        fields = {**defaults.fields(), **self.sampling}
        fields |= {"max_tokens": self.max_tokens, "logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        if self.beam_search is not None and self.logprobs == -1:
            raise InvalidRequestError(
                [Field("logprobs"), " is -1, the whole vocabulary, which beam search cannot give"]
            )
        if self.beam_search is not None:  # the search ranks its own beams and returns n
            return SamplingParams(**fields | {"n": self.n} | derived)
        if self.num_generated > self.n and self.logprobs is None:
            fields["logprobs"] = 0  # what the choices are ranked by
        return SamplingParams(**fields | {"n": self.num_generated} | derived)
