"""From token ids to text as they come, holding back what may still change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from jaxllm.text.spellings import REPLACEMENT

PROMPT_TAIL = 8
"""Prompt tokens that are decoded first, so that the first generated token is spelled as it is after them."""
INVALID_PREFIX = "Invalid prefix"
"""The beginning of the message of DecodeStream's error; it has no type of its own."""


class Detokenizer:
    """One request's text. Never splits a character, and never shows the beginning of what may be a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_special_token_ids: Sequence[int] = (),
    ):
        """With `skip_special_tokens`, special tokens are left out but for those that are to be shown."""
        self._tokenizer = tokenizer
        self._left_out: frozenset[int] = frozenset()
        if skip_special_tokens and shown_special_token_ids:
            self._left_out = special_token_ids(tokenizer) - frozenset(shown_special_token_ids)
            skip_special_tokens = False
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        tail = [token for token in _prompt_tail(tokenizer, prompt) if token not in self._left_out]
        given = "".join(map(self._decode, tail))
        settled = tokenizer.decode(tail, skip_special_tokens=skip_special_tokens).rstrip(REPLACEMENT)
        self._in_prompt = max(0, len(settled) - len(given))
        """Characters of the prompt that come with the first text, since its last token ends inside a character."""
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._include_stop = include_stop
        self._held = ""

    def add(self, token: int, check_stop: bool = True) -> tuple[str, str | None]:
        """Text that is settled now, and the stop string that was found, if any."""
        text = self._decode(token)
        if text and self._in_prompt:
            text, self._in_prompt = text[self._in_prompt :], 0
        self._held += text
        if not self._stop:
            return self.flush(), None
        found = self._find_stop() if check_stop else None
        if found is not None:
            at, stop = found
            text = self._held[: at + len(stop)] if self._include_stop else self._held[:at]
            self._held = ""
            return text, stop
        keep = self._partial_stop()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, None

    def flush(self) -> str:
        """The text that was held back for a stop string that did not come."""
        text, self._held = self._held, ""
        return text

    def _decode(self, token: int) -> str:
        """Text that `token` completes.

        Byte tokens that turn out to be no character make the stream fail, because they change how the bytes before them
        are read, some of which have been sent. They become one U+FFFD, and a new stream goes on from this token.
        """
        if token in self._left_out:
            return ""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            if INVALID_PREFIX not in str(error):
                raise
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        return REPLACEMENT + (self._stream.step(self._tokenizer, token) or "")

    def _find_stop(self) -> tuple[int, str] | None:
        """The stop string that begins first; of those that begin together, the first in the list."""
        places = [(self._held.find(stop), order, stop) for order, stop in enumerate(self._stop)]
        at, _, stop = min((p for p in places if p[0] >= 0), default=(-1, 0, ""))
        return (at, stop) if at >= 0 else None

    def _partial_stop(self) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


@lru_cache(maxsize=4)
def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that `skip_special_tokens` leaves out."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _prompt_tail(tokenizer: Tokenizer, prompt: Sequence[int]) -> Sequence[int]:
    """The last PROMPT_TAIL tokens, or a few more where those begin inside a character.

    Tokenizers that spell rare characters in bytes would read none of the bytes after a beginning like that.
    """
    for length in range(PROMPT_TAIL, 4 * PROMPT_TAIL):
        tail = prompt[-length:]
        if length >= len(prompt) or not tokenizer.decode(tail).startswith(REPLACEMENT):
            return tail
    return prompt[-PROMPT_TAIL:]
