"""The fields of requests that generate: sampling, stops, log-probabilities, scheduling; and the tokens they used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from jaxllm.config.server import ServerConfig
from jaxllm.config.values import LogprobsMode
from jaxllm.engine.doors.beams import MAX_BEAM_WIDTH, BeamSearchParams
from jaxllm.requests import sampling as limits
from jaxllm.serving.generation import GenerationSettings, Usage
from jaxllm.serving.http import request_model
from jaxllm.serving.http.request_model import RequestModel, Rule, ScheduledFields, check_equal, check_rules, refuse
from jaxllm.serving.openai.kv_transfer import KVTransferParams
from jaxllm.serving.openai.structured import StructuredFields
from jaxllm.wording import shown

UNSUPPORTED_SAMPLING = frozenset({
    "guided_decoding_backend", "guided_whitespace_pattern", "logits_processors", "prompt_embeds", "vllm_xargs",
})  # fmt: skip
"""Fields of vLLM's server that this one refuses by name."""

LABELS = {"conversation_id": "X-Conversation-Id", "resource_id": "X-Resource-Id"}

_OTHERWISE = {
    "n", "max_tokens", "logprobs", "prompt_logprobs", "structured_outputs", "repetition_detection",
    "thinking_token_budget",
}  # fmt: skip
"""Fields of SamplingParams that requests have in a shape of their own."""
_SAMPLING_FIELDS = {field.name for field in fields(limits.SamplingParams)} - _OTHERWISE

NO_LIMIT = -1

MAX_ADAPTERS = 256
"""Of one request, or one setting of scales."""
MAX_SCALE = 1e6
"""Of an adapter: no more than what shows that a number was not meant."""


def _at_most(limit: int) -> BeforeValidator:
    """Long lists are refused before anything looks at their entries."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise refuse(f"{info.field_name} has {len(value)} entries; it may have {limit}")
        return value

    return BeforeValidator(check)


def _bounded(value: Any) -> Any:
    return None if type(value) is int and value == NO_LIMIT else value


TokenLimit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_bounded)]
"""Of the tokens to generate; llama.cpp's -1 sets none."""


def _token_ids(value: Any) -> Any:
    """JSON keys are strings: {"50256": -100} -> {50256: -100}."""
    if not isinstance(value, dict):
        return value
    wrong = [key for key in value if not (key.isascii() and key.isdecimal() and len(key) < 10)]
    if wrong:
        raise refuse(f"logit_bias has the key {shown(wrong[0])}; keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


class RepetitionDetection(RequestModel):
    """What counts as a repetition, by vLLM's names."""

    max_pattern_size: Annotated[int, Field(ge=0, le=limits.MAX_PATTERN_SIZE)] = 0
    """The most tokens that are looked for again and again; 0 looks for none."""
    min_pattern_size: Annotated[int, Field(ge=0, le=limits.MAX_PATTERN_SIZE)] = 0
    """The fewest; 0 is as 1."""
    min_count: Annotated[int, Field(ge=0, le=limits.INT32_MAX)] = 0
    """How often they must stand at the end, one after another: at least 2."""


class CommonSampling(RequestModel):
    """How tokens are chosen, in the names that most servers have; ranges are those of SamplingParams."""

    frequency_penalty: float | None = None
    """From -2 to 2: taken off a token's logit for each time it was generated before."""
    presence_penalty: float | None = None
    """From -2 to 2: taken off a token's logit once it was generated."""
    repeat_last_n: int | None = None
    """The number of the last tokens that the three penalties look at: -1 all, the default, and 0 none."""
    seed: int | None = None
    """Makes the random choices repeatable."""
    stop: Annotated[str | list[str] | None, _at_most(limits.MAX_STOP_STRINGS)] = None
    """Text that ends generation: a string or a list. Completions take {"Single": …} and {"Multi": […]} too."""
    temperature: float | None = None
    """0 always takes the likeliest token; higher values are more random. By default the model's own, else 1."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability, from 0 to 1; 0 takes the likeliest."""
    top_k: int | None = None
    """Choose among this many likeliest tokens; 0 or -1 among all."""
    min_p: float | None = None
    """Choose among tokens with at least this fraction of the likeliest one's probability, from 0 to 1."""
    typical_p: float | None = None
    """Locally typical sampling: choose among tokens whose information is nearest to what is expected, which together
    have this probability, from 0 to 1."""

    def sampling(self) -> dict[str, Any]:
        asked = {name: getattr(self, name) for name in type(self).model_fields if name in _SAMPLING_FIELDS}
        return {name: value for name, value in asked.items() if value is not None}


class SamplingFields(ScheduledFields, CommonSampling):
    """How tokens are chosen, and until when."""

    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_ids), _at_most(limits.MAX_LOGIT_BIAS)] = None
    """Token id -> value added to its logit."""
    dry_multiplier: float | None = None
    """DRY: dry_multiplier * dry_base ** (n - dry_allowed_length) is taken off the logit of a token that would make a
    repeat of n tokens longer, if n is at least dry_allowed_length. From 0 (off, the default) to 100."""
    dry_base: float | None = None
    """From 1 to 100; 1.75 by default."""
    dry_allowed_length: int | None = None
    """The shortest repeat that is made dearer, 2 by default."""
    dry_penalty_last_n: int | None = None
    """The number of the last tokens that DRY looks at: -1 all, the default, and 0 none."""
    dry_sequence_breakers: Annotated[list[str] | None, _at_most(limits.MAX_BREAKERS)] = None
    """Texts that end a repeat: tokens in which one stands, or the last that spells it. By default a new line, ":",
    "\"" and "*"."""
    top_n_sigma: float | None = None
    """Choose among tokens within this many standard deviations of the greatest logit; 0 or -1 among all."""
    xtc_probability: float | None = None
    """XTC: how often the likeliest tokens are excluded but for the last of them, from 0 (the default) to 1."""
    xtc_threshold: float | None = None
    """The probability from which on XTC excludes a token, from 0 to 1; 0.1 by default, and from 0.5 on none is."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens of prompt and answer less likely, below 1 more; 1 is off."""
    stop_regex: Annotated[str | list[str] | None, _at_most(limits.MAX_STOP_REGEXES)] = None
    """A regular expression that ends generation as stop does, or a list of up to 4: at the first character with which
    it has matched. The syntax is that of regex; a match may have 256 characters."""
    repetition_detection: RepetitionDetection | None = None
    """End an answer whose last tokens are the same ones again and again, with finish_reason "repetition"."""
    stop_token_ids: Annotated[list[int] | None, _at_most(limits.MAX_STOP_TOKEN_IDS)] = None
    """Tokens that end generation; their text is left out."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string that ended generation in the text."""
    ignore_eos: bool | None = None
    """Go on past the model's end-of-sequence token."""
    min_tokens: int | None = None
    """Neither the end of the sequence nor a stop token may come before this many tokens."""
    max_thinking_tokens: int | None = None
    """After this many tokens of reasoning it is ended: the model's closing mark is forced. 0 or more."""
    thinking_token_budget: int | None = Field(default=None, ge=-1, le=limits.INT32_MAX)
    """max_thinking_tokens by vLLM's name; -1 sets no bound."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; true by default."""
    timings_per_token: bool = False
    """Tell in `timings` how long the request waited and its prompt and answer have taken; as llama.cpp. Each chunk of a
    stream has it, of a response's stream the last event."""

    @model_validator(mode="after")
    def _one_thinking_budget(self) -> Self:
        budget = self.thinking_token_budget
        check_equal("thinking_token_budget", budget, "max_thinking_tokens", self.max_thinking_tokens)
        if budget is not None and budget >= 0:
            self.max_thinking_tokens = budget
        return self

    def sampling(self) -> dict[str, Any]:
        detection = self.repetition_detection
        return super().sampling() | ({} if detection is None else {"repetition_detection": detection.model_dump()})


class AdapterScale(RequestModel):
    """An adapter, and how strongly it is used."""

    id: Annotated[int, Field(ge=0, le=limits.INT32_MAX)]
    """Its number in GET /lora-adapters."""
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)] = 0.0
    """What its effect is multiplied by; 1 is as it was trained, 0 leaves it out."""


def adapter_scales(given: Sequence[AdapterScale]) -> dict[int, float]:
    """Scales by number; of one that is there several times the last one, as in llama.cpp."""
    return {one.id: one.scale for one in given}


class StreamOptions(RequestModel):
    include_usage: bool = False
    """Send a last chunk with the usage and no choices."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""
    include_obfuscation: bool = False
    """Pad deltas with random characters, so that the length of what is sent tells less of the text."""


_RULES = (
    Rule(
        lambda body: not body.stream,
        {"stream_options": (StreamOptions(),), "stream_interval": (1,)},
        "needs stream to be true",
    ),
    Rule(
        lambda body: body.stream,
        {"prompt_logprobs": (), "prompt_logprob_token_ids": ([],), "use_beam_search": (False,)},
        "is not available in a stream",
    ),
    Rule(
        lambda body: body.num_generated > body.n,
        {"logprobs_mode": ("raw_logprobs",)},
        "is not available with best_of above n, which ranks by raw_logprobs",
    ),
    Rule(
        lambda body: body.stream and body.num_generated > body.n,
        {"best_of": ()},
        "above n is not available in a stream",
    ),
    Rule(
        lambda body: body.use_beam_search,
        {
            "temperature": (0, 1), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "presence_penalty": (0,),
            "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "allowed_token_ids": (),
            "bad_words": ([],), "logprob_token_ids": (), "stop": ([],), "stop_token_ids": ([],), "min_tokens": (0,),
            "include_stop_str_in_output": (False,), "no_stop_trim": (False,), "max_thinking_tokens": (),
            "dry_multiplier": (0,), "top_n_sigma": (-1, 0), "typical_p": (1,), "xtc_probability": (0,),
            "stop_regex": ([],), "repetition_detection": (RepetitionDetection(),),
            "prompt_logprob_token_ids": ([],), "logprobs_mode": ("raw_logprobs",),
            "skip_reading_prefix_cache": (False,),
        },
        "is not available with use_beam_search",
    ),
    Rule(
        lambda body: not body.use_beam_search,
        {"length_penalty": (), "early_stopping": ()},
        "needs use_beam_search to be true",
    ),
)  # fmt: skip


class GenerationRequest(SamplingFields, StructuredFields):
    """The fields that chat and text completions share."""

    model: str | None = None
    """A name that /v1/models lists, of a model or an adapter; by default the first."""
    lora: Annotated[list[AdapterScale] | None, _at_most(MAX_ADAPTERS)] = None
    """Adapters to use, all others not at all, as llama.cpp's clients choose them; where model names none."""
    n: int = Field(default=1, ge=1, le=limits.MAX_N)
    """Choices to return for each prompt."""
    best_of: int | None = Field(default=None, ge=1, le=limits.MAX_N)
    """Generate this many choices and return the n with the highest mean log-probability; with beam search its width."""
    stream: bool = False
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Further things that the stream tells; needs stream."""
    stream_interval: int | None = Field(default=None, ge=1, le=limits.INT32_MAX)
    """Tokens to an event after the first, which comes by itself; by default the server's setting."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens may be generated."""
    bad_words: Annotated[list[str] | None, _at_most(limits.MAX_BAD_WORDS)] = None
    """Texts that may not be generated."""
    use_beam_search: bool = False
    """Search for the n most likely texts instead of sampling."""
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    """Beams are ranked by log-probability / length ** length_penalty; 1 by default."""
    early_stopping: bool | None = None
    """End the search when enough beams have ended, even if an open one could still become better."""
    spaces_between_special_tokens: bool | None = None
    """Accepted, without effect: the tokenizers library writes no such spaces."""
    logprob_token_ids: Annotated[list[int] | None, _at_most(limits.MAX_LOGPROBS)] = None
    """With logprobs: tokens whose log-probabilities come at each generated position, beside the likeliest ones'."""
    logprobs_mode: LogprobsMode | None = None
    """What logprobs are of: the model's distribution, the one that is sampled from, or the logits of either; by default
    the server's setting."""
    prompt_logprobs: int | None = None
    """Log-probabilities of this many most likely tokens at each prompt position; -1 is the whole vocabulary."""
    prompt_logprob_token_ids: Annotated[list[int] | None, _at_most(limits.MAX_LOGPROBS)] = None
    """Tokens whose log-probabilities come at each prompt position, beside the likeliest ones'."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt, also what the prefix cache has of it."""
    return_token_ids: bool = False
    """Return the token ids of prompt and completion."""
    return_weight_versions: bool = False
    """Say of each choice which version of the weights made which of its tokens; nothing with a beam search."""
    return_tokens_as_token_ids: bool = False
    """Name the tokens of log-probabilities "token_id:5" instead of by their text."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=limits.INT32_MAX)
    """Keep only this many prompt tokens; -1 keeps what leaves room in the context for max_tokens."""
    truncation_side: Literal["left", "right"] = "left"
    """Which end of the prompt truncate_prompt_tokens cuts off."""
    no_stop_trim: bool = False
    """SGLang's name of include_stop_str_in_output; true is refused where tokens that are no stop strings would stay."""
    return_hidden_states: Literal[False] = False
    """Only false: a generated answer comes without them. /pooling gives those of a text."""
    kv_transfer_params: KVTransferParams | None = None
    """Compute the prompt for another server, or go on with one that another server has computed: see
    docs/scale.md."""
    request_id: str | None = request_model.Label
    """Becomes part of the response's id."""
    conversation_id: str | None = request_model.Label
    """The caller's own label, returned in the response and as its X-Conversation-Id header; that header may send it."""
    resource_id: str | None = request_model.Label
    """The same with X-Resource-Id."""

    @field_validator("stop", mode="before")
    @classmethod
    def _tagged_stop(cls, value: Any) -> Any:
        """{"Single": "\\n"} -> "\\n"; {"Multi": ["a", "b"]} -> ["a", "b"]."""
        if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"Single", "Multi"}:
            return next(iter(value.values()))
        return value

    @model_validator(mode="after")
    def _one_stop_trim(self) -> Self:
        if not self.no_stop_trim:
            return self
        if self.include_stop_str_in_output is False:
            raise refuse(
                "no_stop_trim is true and include_stop_str_in_output is false: they are one setting, give one of them",
                "no_stop_trim",
            )
        if self.stop_token_ids or self.skip_special_tokens is False:
            name = "stop_token_ids" if self.stop_token_ids else "skip_special_tokens: false"
            raise refuse(
                f"no_stop_trim is true, which is not available with {name}: tokens that end an answer are left out; "
                "only strings of stop can stay",
                "no_stop_trim",
            )
        return self

    @model_validator(mode="after")
    def _fields_together(self) -> Self:
        check_rules(self, _RULES)
        if self.prompt_logprob_token_ids and self.prompt_logprobs is None:
            self.prompt_logprobs = 0
        if self.truncate_prompt_tokens == 0:
            raise refuse("truncate_prompt_tokens is 0; it must be -1, or 1 or more", "truncate_prompt_tokens")
        count, name = self.num_generated, "n" if self.best_of is None else "best_of"
        if self.use_beam_search and count > MAX_BEAM_WIDTH:
            raise refuse(f"{name} is {count}; with beam search it may be {MAX_BEAM_WIDTH}", name)
        if self.use_beam_search and self.constraint_field is not None:
            raise refuse(f"{self.constraint_field} is not available with use_beam_search", self.constraint_field)
        if count < self.n:
            raise refuse(f"best_of is {self.best_of} and n is {self.n}; best_of must be at least n", "best_of")
        asked = None if self.kv_transfer_params is None else self.kv_transfer_params.hand_over()
        if asked is not None and self.use_beam_search:
            raise refuse("kv_transfer_params is not available with use_beam_search", "kv_transfer_params")
        if asked is not None and asked.hands_on and self.stream:
            raise refuse("stream is true; with kv_transfer_params.do_remote_decode it must be false", "stream")
        if asked is not None and asked.hands_on and count > 1:
            raise refuse(f"{name} is {count}; with kv_transfer_params.do_remote_decode it must be 1", name)
        return self

    def sampling(self) -> dict[str, Any]:
        kept = {"include_stop_str_in_output": True} if self.no_stop_trim else {}
        return super().sampling() | kept

    def take_labels(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Read the labels that came as headers; returns the response's headers. The body wins over the headers."""
        for name, header in LABELS.items():
            sent = headers.get(header)
            if sent and getattr(self, name) is None:
                setattr(self, name, sent[: request_model.MAX_LABEL_LENGTH])
        return {header: value for name, header in LABELS.items() if (value := getattr(self, name)) is not None}

    @property
    def num_generated(self) -> int:
        """Choices to generate of each prompt, of which n are returned."""
        return self.n if self.best_of is None else self.best_of

    def settings(self, **own: Any) -> GenerationSettings:
        """The settings of a generation; `own` are the fields in which chat and text completions differ."""
        beams, sampling = None, self.sampling()
        if self.use_beam_search:
            beams = BeamSearchParams(
                beam_width=self.num_generated,
                length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
                ignore_eos=bool(sampling.get("ignore_eos")),
                early_stopping=bool(self.early_stopping),
            )
        return GenerationSettings(
            sampling=sampling,
            n=self.n,
            num_generated=self.num_generated,
            beam_search=beams,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            stream_interval=self.stream_interval,
            priority=self.priority,
            request_id=self.request_id,
            cache_salt=self.cache_salt,
            lora=None if self.lora is None else adapter_scales(self.lora),
            hand_over=None if self.kv_transfer_params is None else self.kv_transfer_params.hand_over(),
            **own,
        )


def stream_options(asked: StreamOptions | None, config: ServerConfig) -> StreamOptions:
    """The options that were asked for, or all of them where the server always sends the usage."""
    options = asked or StreamOptions()
    if config.enable_force_include_usage:
        return options.model_copy(update={"include_usage": True, "continuous_usage_stats": True})
    return options


def chunk_usage(options: StreamOptions, usage: Callable[[], Usage]) -> CompletionUsage | msgspec.UnsetType | None:
    """The usage in every chunk but the last: the usage so far, null where it comes later, or unset."""
    if options.continuous_usage_stats:
        return usage_object(usage())
    return None if options.include_usage else msgspec.UNSET


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Tokens tried ahead that were what the model chose: of a prediction, or from wherever else the engine drafts."""
    rejected_prediction_tokens: int = 0
    """Tokens tried ahead that were not. They are no part of completion_tokens."""


class CompletionUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_object(usage: Usage) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            usage.reasoning_tokens, usage.taken_tokens, usage.drafted_tokens - usage.taken_tokens
        ),
    )
