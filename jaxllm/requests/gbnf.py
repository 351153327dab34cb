"""GBNF, llama.cpp's notation of grammars, as Lark for llguidance.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md

Every character becomes a terminal: with longer ones of a greedy lexer `root ::= [0-9]+ "0"` could never end.
"""

from __future__ import annotations

import json
import re
import string

MAX_DEPTH = 100
"""Groups inside groups."""
MAX_REPETITIONS = 2000
"""llama.cpp's own bound."""

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_SPACE, _SPACE_AND_LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+", re.ASCII)
_REPEAT = re.compile(r"[*+?]|\{[ \t]*(\d*)[ \t]*(,?)[ \t]*(\d*)[ \t]*\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}


def is_gbnf(grammar: str) -> bool:
    """Whether some line of it begins a rule as GBNF does, which Lark writes with one colon."""
    return _RULE.search(grammar) is not None


def gbnf_to_lark(grammar: str) -> str:
    """The same language in llguidance's dialect. Raises ValueError saying what is wrong, and in which line."""
    return _Translator(grammar).translated()


class _Translator:
    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._depth = 0
        self._numbers: dict[str, int] = {}

    def translated(self) -> str:
        bodies: dict[str, str] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._name()
            self._skip(_SPACE)
            if not self._take("::="):
                raise self._error("'::=' must follow the rule's name")
            self._skip(_SPACE_AND_LINES)
            if name in bodies:
                raise self._error(f"the rule {name!r} is there twice")
            bodies[name] = self._alternatives(_SPACE)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error(f"{self._text[self._at]!r} is not expected")
            self._skip(_SPACE_AND_LINES)
        missing = next((name for name in ("root", *self._numbers) if name not in bodies), None)
        if missing is not None:
            raise ValueError(f"there is no rule {missing!r}")
        rules = [f"{self._rule(name)}: {body}" for name, body in bodies.items()]
        return "\n".join(["%llguidance {}", f"start: {self._rule('root')}", *rules, ""])

    def _alternatives(self, space: re.Pattern[str]) -> str:
        found = [self._sequence(space)]
        while self._take("|"):
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(space))
        return " | ".join(found)

    def _sequence(self, space: re.Pattern[str]) -> str:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)\r\n":
            part = self._item()
            self._skip(space)
            while self._at < len(self._text) and (repeat := _REPEAT.match(self._text, self._at)):
                part = f"({part}){self._bounds(repeat)}"
                self._at = repeat.end()
                self._skip(space)
            parts.append(part)
        return " ".join(parts) or '""'

    def _item(self) -> str:
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return self._class()
        if self._take("("):
            return self._group()
        if self._take("."):
            return "/(?s:.)/"
        if self._text[self._at] in "<!":
            raise self._error("tokens in angle brackets are not supported")
        return self._rule(self._name())

    def _literal(self) -> str:
        characters = []
        while not self._take('"'):
            characters.append(json.dumps(self._character("a text's closing '\"'"), ensure_ascii=False))
        return f"({' '.join(characters)})" if characters else '""'

    def _class(self) -> str:
        negated = "^" if self._take("^") else ""
        ranges = []
        while not self._take("]"):
            first = last = self._character("a class's closing ']'")
            if self._text[self._at + 1 : self._at + 2] != "]" and self._take("-"):
                last = self._character("a range's end")
            if last < first:
                raise self._error(f"the range from {first!r} to {last!r} is empty")
            ranges.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
        if not ranges:
            raise self._error("a class of characters is empty")
        return f"/[{negated}{''.join(ranges)}]/"

    def _group(self) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups lie more than {MAX_DEPTH} deep")
        self._skip(_SPACE_AND_LINES)
        inside = self._alternatives(_SPACE_AND_LINES)
        if not self._take(")"):
            raise self._error("a group's closing ')' is missing")
        self._depth -= 1
        return f"({inside})"

    def _character(self, awaited: str) -> str:
        if self._at >= len(self._text):
            raise self._error(f"{awaited} is missing")
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._at : self._at + _HEX.get(kind, 0)]
        if kind not in _HEX or len(digits) < _HEX[kind] or not set(digits) <= set(string.hexdigits):
            raise self._error(f"\\{kind}{digits} is no escape of GBNF")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"\\{kind}{digits} is no character")
        return chr(code)

    def _bounds(self, repeat: re.Match[str]) -> str:
        if not repeat.group().startswith("{"):
            return repeat.group()
        low, comma, high = repeat.groups()
        if not low and not (comma and high):
            raise self._error(f"{repeat.group()} says not how often")
        if max(int(low or 0), int(high or 0)) > MAX_REPETITIONS:
            raise self._error(f"{repeat.group()} is more than {MAX_REPETITIONS} times")
        return "{" + (low or "0") + comma + high + "}"

    def _name(self) -> str:
        name = _NAME.match(self._text, self._at)
        if name is None:
            found = self._text[self._at : self._at + 1]
            raise self._error(f"{found!r} is not expected" if found else "a rule's name is missing")
        self._at = name.end()
        return name.group()

    def _rule(self, name: str) -> str:
        """The rule's name in Lark, where capitals and dashes mean something."""
        return f"rule_{self._numbers.setdefault(name, len(self._numbers))}"

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _skip(self, space: re.Pattern[str]) -> None:
        self._at = space.match(self._text, self._at).end()  # type: ignore[union-attr]

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{problem} (line {self._text.count(chr(10), 0, self._at) + 1})")
