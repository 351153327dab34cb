"""What llama-server's own routes are asked: completions in its form and infilling, and their prompts.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field, field_validator, model_validator

from jaxllm.chat.infill import FimPrompt, fim_prompt
from jaxllm.chat.prompt import Prompt, fitted, sampling_params, with_completion_markers
from jaxllm.engine.doors.streams import Gain
from jaxllm.engine.messages import TokenDelta
from jaxllm.errors import Field as Place
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import INT32_MAX, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N
from jaxllm.serving.generation import Generation, GenerationSettings
from jaxllm.serving.http.answers import ignored_fields
from jaxllm.serving.http.request_model import RequestModel, are_integers, refuse
from jaxllm.serving.openai import sampling
from jaxllm.serving.openai.completions import MAX_CHOICES
from jaxllm.serving.openai.structured import StructuredFields
from jaxllm.serving.served_model import ServedModel
from jaxllm.wording import shown

Pieces = list[str | int]
"""One prompt: texts and token ids, one after the other."""
MAX_TEXTS = 1024
"""Of one prompt."""
RANDOM_SEEDS = (-1, 2**32 - 1)
FULL_BIAS = 100.0
"""A bias of more than this is as good as this."""

RENAMED = {"max_tokens": "n_predict", "max_completion_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,), "dynatemp_range": (0,), "adaptive_target": (-1,), "min_keep": (0,), "grammar_lazy": (False,),
    "post_sampling_probs": (False,), "backend_sampling": (False,), "return_progress": (False,), "verbose": (False,),
    "grammar": ("",), "stop": ([], ""), "preserved_tokens": ([],), "grammar_triggers": ([],), "logit_bias": ([], {}),
    "seed": RANDOM_SEEDS,
}  # fmt: skip
"""Values with which a field asks for nothing. Other values of what is no field here are refused."""
WITHOUT_EFFECT = frozenset({
    "id_slot", "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms", "sse_ping_interval", "stream_options",
    "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "adaptive_decay",
})  # fmt: skip
"""Fields that are accepted whatever they say: of a sampler that is off, of slots and of shifted contexts."""
SAMPLERS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0}, "top_p": {"top_p": 1.0}, "min_p": {"min_p": 0.0}, "temperature": {"temperature": 1.0},
    "dry": {"dry_multiplier": 0.0}, "top_n_sigma": {"top_n_sigma": 0.0}, "typ_p": {"typical_p": 1.0},
    "xtc": {"xtc_probability": 0.0},
}  # fmt: skip
"""A sampler's name -> the values with which it does nothing."""
OTHER_SAMPLERS = frozenset({"typical_p", "adaptive_p", "infill"})


class NativeFields(sampling.SamplingFields, StructuredFields):
    """The fields that llama.cpp's completions share. What is left out is as the model's files recommend.

    Of no effect, whatever they say, are `id_slot` and `n_cache_reuse` (every prompt finds what others have computed),
    `n_keep` and `n_discard` (a context is never shifted), `t_max_prompt_ms` (nor is it honoured by llama.cpp),
    `sse_ping_interval`, `stream_options`, and the fields of a sampler that is off. Samplers that are not here are
    accepted as long as they are off.
    """

    model: str | None = None
    """A name that /v1/models lists, of a model or an adapter; by default the first."""
    lora: list[sampling.AdapterScale] | None = Field(default=None, max_length=sampling.MAX_ADAPTERS)
    """Adapters to use, all others not at all."""
    stream: bool = False
    """Send the answer as server-sent events while it is generated."""
    n_predict: int = Field(default=-1, ge=-1, le=INT32_MAX)
    """Upper bound on generated tokens: -1 is what the context leaves, 0 computes the prompt only. Also max_tokens."""
    n_cmpl: int = Field(default=1, ge=1, le=MAX_N)
    """Answers to each prompt. Also as n."""
    n_probs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of this many likeliest tokens at each position. Also as logprobs."""
    repeat_penalty: float | None = None
    """Another name of repetition_penalty, over the last 64 tokens unless repeat_last_n says otherwise."""
    logit_bias: dict[str, float | Literal[False]] | list[list[Any]] | None = None  # type: ignore[assignment]
    """Values added to logits: pairs of a token id or a text and a value, or an object of them; false bans a token."""
    samplers: list[str] | None = None
    """The samplers to apply; those that are not named do nothing. Their order is always the same, and `infill` has no
    effect."""
    cache_prompt: bool = True
    """Use what earlier requests have computed; false computes the whole prompt."""
    return_tokens: bool = False
    """Return the ids of the generated tokens, which a stream always does."""
    n_indent: int = Field(default=0, ge=0, le=INT32_MAX)
    """End the answer before a line, after its first, that is indented by less than this many blanks."""
    t_max_predict_ms: int = Field(default=0, ge=-1, le=INT32_MAX)
    """End the answer with the first line that ends this many milliseconds after its first token; 0 sets no limit."""
    response_fields: list[str] | None = Field(default=None, max_length=100)
    """Return only these fields of the answer; "timings/prompt_n" is the field of that name inside timings."""

    @model_validator(mode="before")
    @classmethod
    def _in_their_words(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.field_names()
        asked: dict[str, Any] = {}
        for name, value in list(data.items()):
            theirs, neutral = name in {*NEUTRAL, *WITHOUT_EFFECT, *RENAMED}, NEUTRAL.get(name, ())
            if value in neutral or (theirs and value is None):
                continue
            if neutral and name not in known and ignored_fields.get() is None:
                off = shown(neutral[0])
                raise refuse(f"{name} is {shown(value)}; this server has only {off}, which is off", name)
            if name in RENAMED:
                asked.setdefault(RENAMED[name], value)
                data.setdefault(RENAMED[name], value)  # where errors look for a field's place
            elif name in known or name not in WITHOUT_EFFECT:
                asked[name] = value
        if asked.get("json_schema") == {}:
            asked["json_schema"] = {"type": "object"}  # any object
        return asked

    @model_validator(mode="after")
    def _one_penalty(self) -> NativeFields:
        if self.repeat_penalty is not None and self.repetition_penalty is not None:
            raise refuse("repeat_penalty is another name of repetition_penalty; give one of them", "repeat_penalty")
        unknown = [name for name in self.samplers or () if name not in {*SAMPLERS, *OTHER_SAMPLERS}]
        if unknown:
            known = ", ".join([*SAMPLERS, *sorted(OTHER_SAMPLERS)])
            raise refuse(f"samplers has {shown(unknown[0])}; it may have {known}", "samplers")
        return self

    def generation_settings(self, model: ServedModel) -> GenerationSettings:
        """Raises InvalidRequestError naming logit_bias."""
        own = {"logit_bias": biases(model, self.logit_bias), "skip_reading_prefix_cache": not self.cache_prompt}
        chosen = self.sampling() | own
        if self.repeat_penalty is not None:
            last = 64 if self.repeat_last_n is None else self.repeat_last_n
            chosen |= {"repetition_penalty": self.repeat_penalty, "repeat_last_n": last}
        asked = SAMPLERS if self.samplers is None else self.samplers
        named = [{"typical_p": "typ_p"}.get(name, name) for name in asked]
        for name in SAMPLERS.keys() - {*named}:
            chosen |= SAMPLERS[name]
        if chosen.get("temperature", 0) < 0:
            chosen["temperature"] = 0.0
        return GenerationSettings(
            sampling=chosen,
            max_tokens=max(self.n_predict, 1) if self.n_predict >= 0 else None,
            logprobs=self.n_probs or None,
            n=self.n_cmpl,
            num_generated=self.n_cmpl,
            priority=self.priority,
            cache_salt=self.cache_salt,
            lora=None if self.lora is None else sampling.adapter_scales(self.lora),
        )


class NativeCompletionRequest(NativeFields):
    place: ClassVar = Place("prompt")

    prompt: str | list[Any] | dict[str, Any]
    """A text, token ids, or both in one list; several prompts as a list of them. A text may be {"prompt_string": …}."""

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _bounded(cls, value: Any, validate: Any) -> Any:
        value = value if isinstance(value, list) else validate(value)
        prompts = list(_prompts(value))
        if not 0 < len(prompts) <= MAX_CHOICES or not all(prompts):
            raise refuse(f"prompt has {len(prompts)} prompts, or an empty one; it may have 1 to {MAX_CHOICES}")
        return value

    def prompts(self, model: ServedModel) -> Iterator[FimPrompt]:
        for pieces in _prompts(self.prompt):
            ids: Any = pieces if are_integers(pieces) else []
            for at, piece in enumerate(pieces if not ids else ()):
                own = at == 0
                ids += [piece] if isinstance(piece, int) else model.encode(piece, self.place, add_special_tokens=own)
            yield FimPrompt(list(ids), ())


def _prompts(prompt: Any) -> Iterator[Pieces]:
    """The prompts, each as texts and token ids. A list with a number in it is one prompt, as at llama.cpp."""
    several = isinstance(prompt, list) and not are_integers(prompt) and not any(type(part) is int for part in prompt)
    for one in prompt if several else [prompt]:
        if isinstance(one, dict):
            if not isinstance(one.get("prompt_string"), str) or one.keys() - {"prompt_string", "multimodal_data"}:
                raise refuse('prompt has an object that is not {"prompt_string": TEXT}')
            if one.get("multimodal_data"):
                raise refuse("prompt has multimodal_data; models are served for text only")
            one = one["prompt_string"]
        pieces = one if isinstance(one, list) else [one]
        if not are_integers(pieces):
            if not all(isinstance(piece, str) or type(piece) is int for piece in pieces):
                raise refuse("prompt must be texts, token ids, or lists of both")
            if sum(isinstance(piece, str) for piece in pieces) > MAX_TEXTS:
                raise refuse(f"prompt has more than {MAX_TEXTS} texts one after the other")
        yield pieces


class ExtraFile(RequestModel):
    """Another file, or a part of one, that the answer may depend on."""

    text: str
    """Its text."""
    filename: str = "tmp"
    """Its name, which models are shown that have a token for it."""
    time: Any = None
    """Accepted, without effect: editors note when they have seen it."""


class InfillRequest(NativeFields):
    place: ClassVar = Place("input_prefix")

    input_prefix: str
    """The text before the cursor."""
    input_suffix: str
    """The text after it."""
    input_extra: list[ExtraFile] = Field(default=[], max_length=MAX_TEXTS)
    """Other files, which come before the prefix; the first are left out where the context has no room for all."""
    prompt: str = ""
    """More of the text before the cursor: editors send the beginning of its line."""

    def prompts(self, model: ServedModel) -> Iterator[FimPrompt]:
        context, files = model.engine.info.max_model_len, [(file.filename, file.text) for file in self.input_extra]
        room = context - (self.n_predict if self.n_predict > 0 else context // 4)
        fields, prefix = (self.place, Place("input_suffix")), self.input_prefix + self.prompt
        yield fim_prompt(model, prefix, self.input_suffix, files=files, room=room, fields=fields)


def biases(model: ServedModel, given: Any) -> dict[int, float]:
    """{"Hello": -1.5, "7": False} or [["Hello", -1.5], [7, False]] -> values by token id."""
    found: dict[int, float] = {}
    for pair in given.items() if isinstance(given, dict) else given or ():
        token, value = pair if len(pair) == 2 else (None, None)
        if not isinstance(token, str | int) or not isinstance(value, int | float) or value is True:
            accepted = "pairs of a token id or a text and a number or false"
            raise InvalidRequestError(f"logit_bias has {shown(pair)}; it must have {accepted}", "logit_bias")
        bias = -FULL_BIAS if value is False else min(max(float(value), -FULL_BIAS), FULL_BIAS)
        if isinstance(token, int) or (isinstance(given, dict) and token.isascii() and token.isdecimal()):
            ids = [int(token)]
        else:
            ids = model.encode(token, Place("logit_bias"), add_special_tokens=False)
        found |= dict.fromkeys(ids, bias)
        if len(found) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"logit_bias has more than {MAX_LOGIT_BIAS} tokens", "logit_bias")
    return found


def prepared(model: ServedModel, body: Any, settings: GenerationSettings) -> list[Prompt]:
    """Tokenize and check the prompts of a body. Raises InvalidRequestError naming the field."""
    params, found = sampling_params(model, settings, structured_outputs=body.constraint()), []
    for ids, stops in body.prompts(model):
        own = replace(params, stop_token_ids=[*params.stop_token_ids, *stops])
        found.append(fitted(model, ids, with_completion_markers(model, own, ids), settings, body.place))
        if model.engine.tokenizer is not None:
            found[-1].text = model.tokenizer.decode(ids, False)
    return found


class NativeGeneration(Generation):
    """A generation that may end at a line: for its indentation, or for the time that it has taken."""

    def __init__(self, *arguments: Any, indent: int, milliseconds: int, **more: Any):
        super().__init__(*arguments, **more)
        self._indent, self._milliseconds = indent, milliseconds
        self._began: dict[int, float] = {}
        self._blanks: dict[int, int | None] = {}
        """Of each choice: the number of blanks that its present line begins with, as long as it has nothing else."""
        self._ended: set[int] = set()

    def kept(self, gains: list[Gain]) -> list[Gain]:
        found: list[Gain] = []
        for index, delta in gains:
            if index not in self._ended:
                found.append((index, self._limited(index, delta)))
                self._ended |= {index} if found[-1][1].finish_reason is not None else set()
        return found

    def _limited(self, index: int, delta: TokenDelta) -> TokenDelta:
        now, blanks = time.monotonic(), self._blanks.get(index)
        late = 0 < self._milliseconds < 1000 * (now - self._began.setdefault(index, now)) and "\n" in delta.text
        for at, char in enumerate(delta.text if self._indent else ""):
            if blanks is not None and char in " \t":
                blanks += 1
            elif blanks is not None and blanks < self._indent:
                return msgspec.structs.replace(delta, text=delta.text[:at], finish_reason="length")
            else:
                blanks = 0 if char == "\n" else None
        self._blanks[index] = blanks
        return msgspec.structs.replace(delta, finish_reason="length") if late and not delta.finish_reason else delta
