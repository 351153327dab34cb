"""Parts that answers of several routes share: log-probabilities, timings, versions of the weights, and padding."""

from __future__ import annotations

import string
from codecs import getincrementaldecoder
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxllm.chat.events import random_id
from jaxllm.chat.parser import Step
from jaxllm.requests.outputs import PromptScores, WeightVersionSpan
from jaxllm.serving.generation import Usage
from jaxllm.serving.request_metrics import Phases
from jaxllm.text.spellings import escaped

TokenBytes = Callable[[int], bytes]

_LOWEST = -9999.0  # JSON has no -inf


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token; `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


def chat_logprobs(
    steps: Sequence[Step], count: int, token_bytes: TokenBytes, asked: Sequence[int] = (), *, by_number: bool = False
) -> ChatLogprobs:
    """`count` is the request's top_logprobs: 0 gives the chosen tokens only, -1 all. `asked` are listed as well.

    With `by_number` tokens are named by their ids. A part of a character is named by its bytes, as OpenAI does.
    """

    def entry(token: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = token_bytes(token)
        name = token_number(token) if by_number else escaped(raw) or raw.decode()
        return name, finite(logprob), list(raw)

    content = []
    for step in steps:
        ranked = sorted(dict(step).items(), key=lambda entry: -entry[1].logprob)
        best = [entry for place, entry in enumerate(ranked) if count < 0 or place < count or entry[0] in asked]
        top = [TopLogprob(*entry(token, value.logprob)) for token, value in best]
        chosen, value = step[0]
        content.append(ChatTokenLogprob(*entry(chosen, value.logprob), top))
    return ChatLogprobs(content)


@dataclass(kw_only=True)
class CompletionLogprobsBuilder:
    """Builds one choice's logprobs piece by piece, counting the text offset through them."""

    count: int
    """The number of the likeliest tokens that are listed besides the chosen one; -1 for all."""
    token_bytes: TokenBytes
    """The bytes of a token; they count as text where they complete a character."""
    by_number: bool
    """Name tokens by their ids."""
    special: Container[int]
    """The special tokens."""
    hidden: Container[int]
    """Those that are left out of generated text, and take up none of it."""
    prompt_ids: Sequence[int]
    """The prompt's tokens, where the steps begin with them; else empty."""
    echoed: str
    """The prompt's text, which may have some special tokens and lack those that the tokenizer added."""

    def __post_init__(self) -> None:
        self._position = 0
        self._offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def build(self, steps: Sequence[Step | None]) -> CompletionLogprobs:
        """A None step is a prompt's first token, which nothing predicts."""
        out = CompletionLogprobs([], [], [], [])
        for step in steps:
            token = self.prompt_ids[self._position] if step is None else step[0][0]
            raw = self.token_bytes(token)
            out.tokens.append(self._name(token, raw))
            out.token_logprobs.append(None if step is None else finite(step[0][1].logprob))
            out.top_logprobs.append(None if step is None else self._top(step))
            out.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(raw)) if self._is_shown(token, raw) else 0
            self._position += 1
        return out

    def _is_shown(self, token: int, raw: bytes) -> bool:
        if self._position < len(self.prompt_ids):
            return token not in self.special or self.echoed.startswith(raw.decode(errors="replace"), self._offset)
        return token not in self.hidden

    def _name(self, token: int, raw: bytes) -> str:
        if self.by_number:
            return token_number(token)
        part = escaped(raw)
        return raw.decode() if part is None else f"bytes:{part}"

    def _top(self, step: Step) -> dict[str, float]:
        top: dict[str, float] = {}
        listed = step if self.count < 0 else step[: self.count + 1]
        for token, value in listed:  # two tokens may have the same text: the more likely one stays
            name = self._name(token, self.token_bytes(token))
            top[name] = max(top.get(name, _LOWEST), finite(value.logprob))
        return top


def prompt_logprobs(scores: PromptScores, token_text: Callable[[int], str]) -> PromptLogprobs:
    """Each position as JSON already: never is more than one in objects. Whole vocabularies take seconds."""
    found: list[Any] = []
    for step in scores.steps():
        entries = step and {
            token: PromptLogprob(finite(value.logprob), value.rank, token_text(token)) for token, value in step
        }
        found.append(msgspec.Raw(msgspec.json.encode(entries)))
    return found


def token_number(token: int) -> str:
    """A token's name under return_tokens_as_token_ids."""
    return f"token_id:{token}"


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


class Timings(msgspec.Struct, kw_only=True):
    """`prompt` is about the prompt's tokens that no cache held, `predicted` about the answer's after its first.

    Times are in milliseconds, and null while nothing has been measured. `queue_ms` and `padding_n` are ours: how long
    the request waited for its first step, and its share of the padding rows that its steps ran, known at its end, as
    is how many tokens were tried ahead.
    """

    queue_ms: float | None
    cache_n: int
    prompt_n: int
    prompt_ms: float | None
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float | None
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    padding_n: float | None
    draft_n: int
    draft_n_accepted: int


def timings(usage: Usage, phases: Phases) -> Timings:
    prompt, predicted = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    prompt_ms, predicted_ms = _ms(phases.prefill), _ms(phases.decode)
    timed = predicted - phases.num_answers
    return Timings(
        queue_ms=_ms(phases.queue),
        cache_n=usage.cached_tokens,
        prompt_n=prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt),
        prompt_per_second=_ratio(1000 * prompt, prompt_ms),
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, timed),
        predicted_per_second=_ratio(1000 * timed, predicted_ms),
        padding_n=None if phases.padding is None else round(phases.padding, 2),
        draft_n=usage.drafted_tokens,
        draft_n_accepted=usage.taken_tokens,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _ratio(amount: float | None, per: float | None) -> float | None:
    return amount / per if amount is not None and per is not None and per > 0 else None


class WeightSpan(msgspec.Struct):
    """Tokens from `start` up to `end` of a choice, counted from 0, were made by weights of this version."""

    version: str
    start: int
    end: int


def weight_spans(spans: Iterable[WeightVersionSpan]) -> list[WeightSpan]:
    return [WeightSpan(*span) for span in spans]


PADDED_TO = 32
"""Bytes: with its padding, what a chunk of a stream says is a multiple of this long."""


def obfuscation(said: Any) -> str:
    """Padding for a chunk, so that its length does not tell which tokens are in it."""
    return random_id(string.ascii_letters + string.digits, PADDED_TO - len(msgspec.json.encode(said)) % PADDED_TO)
