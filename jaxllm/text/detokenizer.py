"""From token ids to text as they come, holding back what may still change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.structured_outputs import ascii_classes, failure
from jaxllm.text.spellings import REPLACEMENT

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
        stop_regex: Sequence[str] = (),
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
        self._search = RegexSearch(stop_regex) if stop_regex else None
        self._include_stop = include_stop
        self._held = ""

    def add(self, token: int, check_stop: bool = True) -> tuple[str, str | None]:
        """Text that is settled now, and the stop string or expression that was found, if any."""
        new = self._decode(token)
        if new and self._in_prompt:
            new, self._in_prompt = new[self._in_prompt :], 0
        self._held += new
        if not self._stop and self._search is None:
            return self.flush(), None
        matched = None if self._search is None else self._search.add(new, len(self._held))
        found = [match for match in (self._find_stop(), matched) if match is not None]
        if found and check_stop:
            begin, end, stop = min(found)
            text, self._held = self._held[: end if self._include_stop else begin], ""
            return text, stop
        keep = max(self._partial_stop(), 0 if self._search is None else self._search.open)
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

    def _find_stop(self) -> Match | None:
        """The stop string that begins first; of those that begin together, the first in the list."""
        places = [(self._held.find(stop), order, stop) for order, stop in enumerate(self._stop)]
        at, _, stop = min((p for p in places if p[0] >= 0), default=(-1, 0, ""))
        return Match(at, at + len(stop), stop) if at >= 0 else None

    def _partial_stop(self) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


class Match(NamedTuple):
    """A place in the text that is held, and the stop string or expression that was found there."""

    begin: int
    end: int
    stop: str


LONGEST_MATCH = 256
LONGEST_REGEX = 1024
REGEX_FUEL = 100_000
"""Of llguidance's, for an expression and for each character: some milliseconds of work."""


_ANCHOR = re.compile(r"(?:\\[^Az]|\[\^?+]?+(?:\\.|[^]\\])*+]|[^\\[^$])*+(?:[$^]|\\[Az])", re.DOTALL)
"""An expression up to its first anchor that is neither escaped nor in a class."""


class RegexSearch:
    """Looks for regular expressions in a text as it comes: the one that has matched first, from where it began first.

    llguidance steps through an expression without ever going back, so a character costs one step for each place where
    a match may have begun, of which there are LONGEST_MATCH at most.
    """

    def __init__(self, expressions: Sequence[str]):
        self._fresh = [(expression, regex_matcher(expression)) for expression in expressions]
        self._begun: list[tuple[int, str, LLMatcher]] = []
        """Where a match may have begun, oldest first, in characters of the whole text."""
        self._at = 0

    @property
    def open(self) -> int:
        """How many of the last characters may be the beginning of a match."""
        return self._at - self._begun[0][0] if self._begun else 0

    def add(self, text: str, held: int) -> Match | None:
        """Go on with `text`, the end of `held` characters; returns the first match, if there is one."""
        found, start = None, self._at + len(text) - held
        for character in text:
            spelled = list(character.encode(errors="replace"))
            for expression, matcher in self._fresh:
                if matcher.validate_tokens(spelled) == len(spelled):
                    self._begun.append((self._at, expression, matcher.deep_copy()))
            self._at += 1
            self._begun = [
                one for one in self._begun if self._at - one[0] <= LONGEST_MATCH and one[2].consume_tokens(spelled)
            ]
            whole = [one for one in self._begun if one[2].is_accepting()]
            if whole:
                found = found or Match(whole[0][0] - start, self._at - start, whole[0][1])
                self._begun = [one for one in self._begun if one not in whole]
        return found


def regex_matcher(expression: str) -> LLMatcher:
    """What follows bytes through an expression.

    Raises:
        InvalidRequestError: it is none, matches the empty text, or takes too much to follow; `param` is stop_regex.
    """
    from llguidance import LLMatcher, LLParserLimits

    fuel = {"initial_lexer_fuel": REGEX_FUEL, "step_lexer_fuel": REGEX_FUEL}
    problem = "it has an anchor, and a text that comes is searched all through" if _ANCHOR.match(expression) else ""
    problem = f"it is longer than {LONGEST_REGEX} characters" if len(expression) > LONGEST_REGEX else problem
    if not problem:
        grammar = LLMatcher.grammar_from_regex(ascii_classes(expression))
        limits = LLParserLimits(**fuel, precompute_large_lexemes=False, verbose_errors=False)
        matcher = LLMatcher(_byte_vocabulary(), grammar, log_level=0, limits=limits)
        problem = failure(matcher) or ("it matches the empty text" if matcher.is_accepting() else "")
    if problem:
        raise InvalidRequestError(f"stop_regex has {expression[:100]!r}, which cannot be used: {problem}", "stop_regex")
    return matcher


@lru_cache(maxsize=1)
def _byte_vocabulary() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


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
