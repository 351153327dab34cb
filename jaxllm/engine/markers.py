"""Texts that a request's tokens are watched for."""

from __future__ import annotations

import copy

from tokenizers import Tokenizer

from jaxllm.requests.thinking_markers import ThinkingMarkers

MARKER_TOKENS = 16
"""How many of the last tokens are searched."""


class MarkerSearch:
    """Whether a text has come among the tokens of one request; it may end inside a token."""

    def __init__(self, tokenizer: Tokenizer, text: str):
        self._tokenizer = tokenizer
        self._text = text
        self._tail: list[int] = []
        self.behind = ""
        """What the token that completed the text has behind it."""

    def copy(self) -> MarkerSearch:
        """Another search that goes on from here."""
        return copy.copy(self)

    def add(self, token: int) -> bool:
        """Whether this token completes the text."""
        self._tail = [*self._tail[1 - MARKER_TOKENS :], token]
        text = self._tokenizer.decode(self._tail, skip_special_tokens=False)
        _, found, self.behind = text.partition(self._text) if self._text else ("", "", "")
        return bool(found)


def closing_tokens(markers: ThinkingMarkers, tokenizer: Tokenizer) -> list[int]:
    """What ends a reasoning block, and sets the answer apart from it."""
    return tokenizer.encode(markers.close + markers.behind, add_special_tokens=False).ids
