"""Log-probabilities in OpenAI's three shapes: chat, text completions, and vLLM's for prompts."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec

from jaxllm.chat.parser import Step
from jaxllm.requests.outputs import PromptScores
from jaxllm.text.spellings import escaped

TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes]

_encode = msgspec.json.Encoder().encode

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
    steps: Sequence[Step],
    count: int,
    token_bytes: TokenBytes,
    asked: Sequence[int] = (),
    *,
    by_number: bool = False,
) -> ChatLogprobs:
    """`count` is the request's top_logprobs: 0 gives the chosen tokens only, -1 all. `asked` are listed as well.

    With `by_number` tokens are named by their ids. A part of a character is named by its bytes, as OpenAI does.
    """

    def entry(token: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = token_bytes(token)
        name = token_number(token) if by_number else escaped(raw) or raw.decode()
        return name, _finite(logprob), list(raw)

    content = []
    for step in steps:
        ranked = sorted(dict(step).items(), key=lambda entry: -entry[1].logprob)
        best = [entry for place, entry in enumerate(ranked) if count < 0 or place < count or entry[0] in asked]
        top = [TopLogprob(*entry(token, value.logprob)) for token, value in best]
        chosen, value = step[0]
        content.append(ChatTokenLogprob(*entry(chosen, value.logprob), top))
    return ChatLogprobs(content)


class CompletionLogprobsBuilder:
    """Builds one choice's logprobs piece by piece, counting the text offset through them.

    Attributes:
        count: how many of the likeliest tokens are listed besides the chosen one; -1 for all.
        token_bytes: the bytes of a token; they count as text where they complete a character.
        by_number: name tokens by their ids.
        special: ids of the special tokens.
        hidden: those that are left out of generated text, and take up none of it.
        prompt_ids: of the prompt, where the steps begin with its tokens; else empty.
        echoed: its text, which may have some special tokens and lack those that the tokenizer added.
    """

    def __init__(
        self,
        count: int,
        token_bytes: TokenBytes,
        *,
        by_number: bool = False,
        special: Container[int] = (),
        hidden: Container[int] = (),
        prompt_ids: Sequence[int] = (),
        echoed: str = "",
    ):
        self._count = count
        self._token_bytes = token_bytes
        self._by_number = by_number
        self._special = special
        self._hidden = hidden
        self._prompt_ids = prompt_ids
        self._echoed = echoed
        self._position = 0
        self._offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def build(self, steps: Sequence[Step | None]) -> CompletionLogprobs:
        """A None step is a prompt's first token, which nothing predicts."""
        out = CompletionLogprobs([], [], [], [])
        for step in steps:
            token = self._prompt_ids[self._position] if step is None else step[0][0]
            raw = self._token_bytes(token)
            out.tokens.append(self._name(token, raw))
            out.token_logprobs.append(None if step is None else _finite(step[0][1].logprob))
            out.top_logprobs.append(None if step is None else self._top(step))
            out.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(raw)) if self._is_shown(token, raw) else 0
            self._position += 1
        return out

    def _is_shown(self, token: int, raw: bytes) -> bool:
        if self._position < len(self._prompt_ids):
            return token not in self._special or self._echoed.startswith(raw.decode(errors="replace"), self._offset)
        return token not in self._hidden

    def _name(self, token: int, raw: bytes) -> str:
        if self._by_number:
            return token_number(token)
        part = escaped(raw)
        return raw.decode() if part is None else f"bytes:{part}"

    def _top(self, step: Step) -> dict[str, float]:
        top: dict[str, float] = {}
        listed = step if self._count < 0 else step[: self._count + 1]
        for token, value in listed:  # two tokens may have the same text: the more likely one stays
            name = self._name(token, self._token_bytes(token))
            top[name] = max(top.get(name, _LOWEST), _finite(value.logprob))
        return top


def prompt_logprobs(scores: PromptScores, token_text: TokenText) -> PromptLogprobs:
    """Each position as JSON already: never is more than one in objects. Whole vocabularies take seconds."""
    found: list[Any] = []
    for step in scores.steps():
        entries = step and {
            token: PromptLogprob(_finite(value.logprob), value.rank, token_text(token)) for token, value in step
        }
        found.append(msgspec.Raw(_encode(entries)))
    return found


def token_number(token: int) -> str:
    """How return_tokens_as_token_ids names a token."""
    return f"token_id:{token}"


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
