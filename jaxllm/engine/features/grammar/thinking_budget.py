"""Thinking budgets at work: when a request's reasoning must end, and with which tokens.

Nothing is cut out or put in: the closing marker is sampled like any token, under a mask that leaves no other. So it is
in the device's history, in pages, penalties and log-probabilities as if the model had chosen it."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import Tokenizer

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import SamplingParams, ThinkingMarkers
from jaxllm.text.spellings import REPLACEMENT

MARKER_TOKENS = 16


class MarkerSearch:
    """Whether a text has come among the tokens of one request; it may end inside a token."""

    def __init__(self, tokenizer: Tokenizer, text: str):
        self._tokenizer = tokenizer
        self._text = text
        self._tail: list[int] = []
        self.behind = ""

    def add(self, token: int) -> bool:
        self._tail = [*self._tail[1 - MARKER_TOKENS :], token]
        text = self._tokenizer.decode(self._tail, skip_special_tokens=False)
        _, found, self.behind = text.partition(self._text) if self._text else ("", "", "")
        return bool(found)


def closing_tokens(markers: ThinkingMarkers, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(markers.close + markers.behind, add_special_tokens=False).ids


class Thinking:
    """One request's reasoning as its tokens come."""

    def __init__(self, budget: int, markers: ThinkingMarkers, tokenizer: Tokenizer):
        self.left = budget
        self.over = False
        self._closing = closing_tokens(markers, tokenizer)
        self._tokenizer = tokenizer
        self._open = markers.open.lstrip()
        self._opened = markers.opened
        self._close = MarkerSearch(tokenizer, markers.close)
        self._tokens: list[int] = []
        """Of the answer before its block is open, then of the block."""
        self._written: int | None = None
        self._spend(0)

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Tokenizer) -> Thinking | None:
        """The reasoning of a request that asks for a budget. A grammar says by itself what comes after its marker."""
        markers = params.thinking_markers
        if params.max_thinking_tokens is None or markers is None:
            return None
        outputs = params.structured_outputs
        if outputs is not None and not (outputs.after and markers.behind.endswith(outputs.after)):
            markers = replace(markers, behind="")
        return cls(params.max_thinking_tokens, markers, tokenizer)

    @property
    def forced(self) -> int | None:
        """The token that must come next; None while there is a choice."""
        return None if self._written is None or self.over else self._closing[self._written]

    def accept(self, token: int) -> None:
        """Follow a generated token. Raises InvalidRequestError: it is not the one that was forced."""
        if self._written is not None:
            if token != self.forced:
                hint = "allowed_token_ids or bad_words may forbid it"
                raise InvalidRequestError(f"token {self.forced}, which ends the reasoning, could not be forced: {hint}")
            self._written += 1
            self.over = self._written == len(self._closing)
        elif not self._opened:
            self._look_for_opening(token)
        elif self._close.add(token):
            self.over = True
        else:
            self._tokens = [*self._tokens[1 - MARKER_TOKENS :], token]
            self._spend(1)

    def end_after(self, tokens: int) -> None:
        """The budget is over after that many more tokens, which are being sampled already."""
        self.left = min(self.left, tokens)
        self._spend(0)

    def _look_for_opening(self, token: int) -> None:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=False).lstrip()
        if text.startswith(self._open):
            self._opened, self._tokens = True, []
            self._spend(0)
        else:
            may_open = self._open.startswith(text.rstrip(REPLACEMENT)) and len(self._tokens) < MARKER_TOKENS
            self.over = not may_open

    def _spend(self, tokens: int) -> None:
        """At the budget's end the marker is due: the rest of it where the model has just begun to write it."""
        self.left -= tokens
        if self._opened and self.left <= 0:
            begun = (n for n in range(len(self._closing) - 1, 0, -1) if self._tokens[-n:] == self._closing[:n])
            self._written = next(begun, 0)
