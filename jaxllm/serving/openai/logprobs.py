"""Log-probabilities in OpenAI's three shapes: chat, text completions, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec

from jaxllm.requests.outputs import Logprob
from jaxllm.requests.prompt_scores import PromptScores
from jaxllm.serving.generation import Step

TokenText = Callable[[int], str]

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


def chat_logprobs(steps: Sequence[Step], count: int, token_text: TokenText, asked: Sequence[int] = ()) -> ChatLogprobs:
    """`count` is the request's top_logprobs: 0 gives the chosen tokens only, -1 all. `asked` are listed as well."""
    content = []
    for step in steps:
        ranked = sorted(dict(step).items(), key=lambda entry: -entry[1].logprob)
        best = [entry for place, entry in enumerate(ranked) if count < 0 or place < count or entry[0] in asked]
        top = [TopLogprob(*_token(token, value, token_text)) for token, value in best]
        content.append(ChatTokenLogprob(*_token(*step[0], token_text), top))
    return ChatLogprobs(content)


class CompletionLogprobsBuilder:
    """Builds one choice's logprobs piece by piece, counting the text offset through them.

    Attributes:
        count: how many of the likeliest tokens are listed besides the chosen one; -1 for all.
        token_text: the text of a token.
        by_number: name tokens by their ids.
        special: ids of the special tokens.
        hidden: those that are left out of generated text, and take up none of it.
        prompt_ids: of the prompt, where the steps begin with its tokens; else empty.
        echoed: its text, which may have some special tokens and lack those that the tokenizer added.
    """

    def __init__(
        self,
        count: int,
        token_text: TokenText,
        *,
        by_number: bool = False,
        special: Container[int] = (),
        hidden: Container[int] = (),
        prompt_ids: Sequence[int] = (),
        echoed: str = "",
    ):
        self._count = count
        self._token_text = token_text
        self._by_number = by_number
        self._special = special
        self._hidden = hidden
        self._prompt_ids = prompt_ids
        self._echoed = echoed
        self._position = 0
        self._offset = 0

    def build(self, steps: Sequence[Step | None]) -> CompletionLogprobs:
        """A None step is a prompt's first token, which nothing predicts."""
        out = CompletionLogprobs([], [], [], [])
        for step in steps:
            token = self._prompt_ids[self._position] if step is None else step[0][0]
            text = self._token_text(token) if step is None else _text(*step[0], self._token_text)
            out.tokens.append(self._name(token, text))
            out.token_logprobs.append(None if step is None else _finite(step[0][1].logprob))
            out.top_logprobs.append(None if step is None else self._top(step))
            out.text_offset.append(self._offset)
            self._offset += len(text) if self._is_shown(token, text) else 0
            self._position += 1
        return out

    def _is_shown(self, token: int, text: str) -> bool:
        if self._position < len(self._prompt_ids):
            return token not in self._special or self._echoed.startswith(text, self._offset)
        return token not in self._hidden

    def _name(self, token: int, text: str) -> str:
        return token_number(token) if self._by_number else text

    def _top(self, step: Step) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value in (
            step if self._count < 0 else step[: self._count + 1]
        ):  # two tokens may have the same text: the more likely one stays
            name = self._name(token, _text(token, value, self._token_text))
            top[name] = max(top.get(name, _LOWEST), _finite(value.logprob))
        return top


def prompt_logprobs(scores: PromptScores, token_text: TokenText) -> PromptLogprobs:
    """Each position as JSON already: never is more than one in objects. Whole vocabularies take seconds."""
    found: list[Any] = []
    for step in scores.steps():
        entries = step and {
            token: PromptLogprob(_finite(value.logprob), value.rank, _text(token, value, token_text))
            for token, value in step
        }
        found.append(msgspec.Raw(_encode(entries)))
    return found


def token_number(token: int) -> str:
    """How return_tokens_as_token_ids names a token."""
    return f"token_id:{token}"


def numbered(steps: Sequence[Step]) -> list[Step]:
    """The same steps with tokens named by their ids."""
    return [[(token, value._replace(decoded_token=token_number(token))) for token, value in step] for step in steps]


def _token(token: int, value: Logprob, token_text: TokenText) -> tuple[str, float, list[int]]:
    text = _text(token, value, token_text)
    return text, _finite(value.logprob), list(text.encode())


def _text(token: int, value: Logprob, token_text: TokenText) -> str:
    return value.decoded_token if value.decoded_token is not None else token_text(token)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
