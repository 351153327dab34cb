"""Text that arrives in pieces, and scanners that read from it, JSON among it.

A scanner is a generator that yields where it needs more text; every way of splitting a text gives the same result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Scan = Generator[None, None, T]
Emit = Callable[[str], object]

WHITESPACE = " \t\r\n"
_SPACE = re.compile(f"[{WHITESPACE}]+")


class MalformedError(Exception):
    """The text is not what the scanner reads; everything consumed so far is in `Source.kept`."""


class UnfinishedError(MalformedError):
    """The text ended where the scanner could have gone on."""


class Source:
    """Text not read yet, and what was read since `kept` was last cleared. Each character is read once.

    Attributes:
        ended: no more text comes.
        cut: it ended where more would have come.
        position: how many characters have been read, those that were put back not counted.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        self.position = 0
        self.kept: list[str] = []

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, count: int) -> str:
        taken = self.text[self.at : self.at + count]
        self.at += count
        self.position += count
        self.kept.append(taken)
        return taken

    def put_back(self, count: int) -> None:
        """The last `count` characters, all of them in `kept`, come next again."""
        if not count:
            return
        kept = "".join(self.kept)
        self.kept[:] = [kept[:-count]]
        self.position -= count
        if count <= self.at:
            self.at -= count
        else:
            self.text = kept[-count:] + self.text[self.at :]
            self.at = 0

    def take_run(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        return self.take(match.end() - self.at) if match else ""

    def starts_with(self, text: str) -> bool | None:
        """Whether the next text is `text`; None while that is open."""
        if self.text.startswith(text, self.at):
            return True
        left = len(self.text) - self.at
        if left >= len(text) or not self.text.startswith(text[:left], self.at):
            return False
        return None

    def any_left(self) -> Scan[bool]:
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self, *, spaced: bool = False) -> Scan[str]:
        """The next character; if `spaced`, whitespace may come before it, here and below."""
        if spaced:
            yield from self.skip_space()
        if not (yield from self.any_left()):
            raise UnfinishedError
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> Scan[str]:
        """All that comes next and matches `pattern`, character by character."""
        pieces = []
        while (yield from self.any_left()) and (piece := self.take_run(pattern)):
            pieces.append(piece)
        return "".join(pieces)

    def skip_space(self) -> Scan[None]:
        yield from self.run(_SPACE)

    def literal(self, text: str, *, whole: bool = False) -> Scan[bool]:
        """Consume `text` if it is next; unless it must be `whole`, its beginning is enough at the end of the source."""
        while (found := self.starts_with(text)) is None and not self.ended:
            yield
        if not found and (whole or found is not None):
            return False
        self.take(min(len(text), len(self.text) - self.at))
        return True

    def next_of(self, texts: Sequence[str]) -> Scan[str]:
        """The one of `texts` that comes next, not consumed; "" if none does."""
        while True:
            found = {text: self.starts_with(text) for text in texts}
            known = next((text for text, is_next in found.items() if is_next), None)
            if known is not None or self.ended or not any(is_next is None for is_next in found.values()):
                return known or ""
            yield

    def one_of(self, texts: Sequence[str], *, spaced: bool = False) -> Scan[str]:
        """Consume the first of `texts` that is next; of texts that begin alike the longer comes first."""
        if spaced:
            yield from self.skip_space()
        while True:
            for text in texts:
                found = self.starts_with(text)
                if found:
                    self.take(len(text))
                    return text
                if found is None:
                    break
            else:
                raise MalformedError
            if self.ended:
                self.take(len(self.text) - self.at)
                raise UnfinishedError
            yield

    def expect(self, text: str, *, spaced: bool = False) -> Scan[None]:
        yield from self.one_of((text,), spaced=spaced)

    def copy_until(self, stops: Sequence[str], emit: Emit, last: Sequence[str] = ()) -> Scan[str]:
        """Give `emit` the text before the first of `stops`, or of `last` at its end; the stop is returned, not
        consumed.
        """
        pattern = re.compile("|".join(map(re.escape, stops)))
        while True:
            match = pattern.search(self.text, self.at)
            stop = match.group() if match else self._ending(last)
            held = len(stop) or self.possible_start((*stops, *last))
            end = match.start() if match else len(self.text) - held
            if end > self.at:
                emit(self.take(end - self.at))
            if stop:
                return stop
            if self.ended:
                self.take(len(self.text) - self.at)
                raise UnfinishedError
            yield

    def _ending(self, texts: Sequence[str]) -> str:
        """The longest of `texts` that an answer which was not cut ends with; "" if it goes on, or ends otherwise."""
        if not self.ended or self.cut:
            return ""
        return max((text for text in texts if self.text.endswith(text, self.at)), key=len, default="")

    def text_until(self, stop: str) -> Scan[str]:
        """The text before `stop`, which is consumed as well."""
        pieces: list[str] = []
        yield from self.copy_until((stop,), pieces.append)
        self.take(len(stop))
        return "".join(pieces)

    def possible_start(self, markers: Sequence[str]) -> int:
        """The length of a possible beginning of a marker at the end of the text; a cut text's words are none."""
        tail = self.text[max(self.at, len(self.text) - max(map(len, markers), default=0)) :]
        first = {marker[0] for marker in markers}
        for skipped, char in enumerate(tail):
            if char in first and any(marker.startswith(tail[skipped:]) for marker in markers):
                is_marker = not self.ended or (self.cut and len(tail) - skipped > 1 and not tail[skipped:].isalnum())
                return len(tail) - skipped if is_marker else 0
        return 0


MAX_DEPTH = 200
"""Deeper values are no JSON that a client's parser would take."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def quoted_text(text: str) -> str:
    """`text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_scalar(text: str) -> bool:
    """Whether `text` is a JSON number, true, false or null."""
    return _SCALAR.fullmatch(text) is not None


def nowhere(text: str) -> None:
    """Ignore a text."""


def json_value(source: Source, emit: Emit = nowhere) -> Scan[None]:
    """Consume one JSON value and give `emit` its text, with control characters in strings escaped."""
    closers: list[str] = []
    expected = "value"
    while True:
        yield from _space(source, emit)
        char = yield from source.peek()
        if closers and char == closers[-1] and expected in ("first key", "first value", "comma"):
            emit(source.take(1))
            closers.pop()
            expected = "comma"
        elif expected in ("value", "first value"):
            expected = yield from _value(source, emit, char, closers)
        elif expected in ("key", "first key") and char == '"':
            yield from _string(source, emit)
            yield from _space(source, emit)
            if (yield from source.peek()) != ":":
                raise MalformedError
            emit(source.take(1))
            expected = "value"
        elif expected == "comma" and char == ",":
            emit(source.take(1))
            expected = "key" if closers[-1] == "}" else "value"
        else:
            raise MalformedError
        if not closers and expected == "comma":
            return


def object_in_string(source: Source, emit: Emit) -> Scan[None]:
    r"""Consume a JSON string that holds an object, "{\"a\": 1}", and give `emit` the object's text; "" holds {}."""
    inner = Source()
    scan = _only_an_object(inner, emit)

    def decoded(text: str) -> None:
        inner.feed(text)
        next(scan, None)

    yield from _string(source, decoded, decode=True)
    inner.ended = True
    try:
        next(scan, None)
    except UnfinishedError:
        raise MalformedError from None


def _only_an_object(source: Source, emit: Emit) -> Scan[None]:
    yield from source.skip_space()
    if not (yield from source.any_left()):
        emit("{}")
        return
    if (yield from source.peek()) != "{":
        raise MalformedError
    yield from json_value(source, emit)
    yield from source.skip_space()
    if (yield from source.any_left()):
        raise MalformedError


def _space(source: Source, emit: Emit) -> Scan[None]:
    while (yield from source.any_left()) and (space := source.take_run(_SPACE)):
        emit(space)


def _value(source: Source, emit: Emit, char: str, closers: list[str]) -> Scan[str]:
    if char in "{[":
        if len(closers) == MAX_DEPTH:
            raise MalformedError
        emit(source.take(1))
        closers.append("}" if char == "{" else "]")
        return "first key" if char == "{" else "first value"
    if char == '"':
        yield from _string(source, emit)
        return "comma"
    pieces = []
    while (yield from source.any_left()) and (piece := source.take_run(_WORD)):
        pieces.append(piece)
        emit(piece)
    if not is_scalar("".join(pieces)):
        raise MalformedError
    return "comma"


def _string(source: Source, emit: Emit, decode: bool = False) -> Scan[None]:
    """A string with its quotes; with `decode` the characters it stands for."""
    quote = source.take(1)
    if not decode:
        emit(quote)
    high = ""  # of a surrogate pair, whose other half must follow
    char = ""
    while char != quote:
        char = yield from source.peek()
        if plain := source.take_run(_PLAIN):
            written = meant = plain
        elif char == "\\":
            written, meant = yield from _escape(source)
        else:
            source.take(1)
            written, meant = (char, "") if char == quote else (quoted_text(char), char)
        if not decode:
            emit(written)
            continue
        is_high, is_low = "\ud800" <= meant <= "\udbff", "\udc00" <= meant <= "\udfff"
        if high and is_low:
            emit((high + meant).encode("utf-16", "surrogatepass").decode("utf-16"))
        else:
            emit(("\ufffd" if high else "") + ("" if is_high else "\ufffd" if is_low else meant))
        high = meant if is_high else ""


def _escape(source: Source) -> Scan[tuple[str, str]]:
    r"""An escape as written, and the character it means: \n is a newline."""
    source.take(1)
    char = yield from source.peek()
    if char in _ESCAPES:
        return "\\" + source.take(1), _ESCAPES[char]
    if char != "u":
        raise MalformedError
    digits = ""
    source.take(1)
    while len(digits) < 4:
        yield from source.peek()
        digits += source.take(1)
        if not _HEX.fullmatch(digits.ljust(4, "0")):
            raise MalformedError
    return "\\u" + digits, chr(int(digits, 16))
