"""Custom tools: they take a text where functions take arguments, and a grammar may say which texts.

Models write such a call as that of a function with one argument, `input`. In most notations of calls it is a string of
JSON, so a grammar of the text becomes one of the text with JSON's escapes: `"a\\nb"` becomes `"a\\\\nb"`.
"""

from __future__ import annotations

import json
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.schema import UnenforceableError
from jaxllm.requests.structured_outputs import StructuredOutputs, ascii_classes, compile_grammar

INPUT = "input"
"""The argument that holds the text."""
PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}  # fmt: skip


@dataclass(frozen=True)
class TextInput:
    """What a custom tool takes: any text, or one that the grammar `definition` allows."""

    syntax: Literal["any", "lark", "regex"] = "any"
    definition: str = ""

    @property
    def told(self) -> str:
        """What the model is told of the grammar."""
        names = {"lark": "this grammar (Lark)", "regex": "this regular expression"}
        return f"The input must match {names[self.syntax]}:\n{self.definition}" if self.syntax in names else ""

    def outputs(self) -> StructuredOutputs:
        """The grammar alone, as a constraint on a text."""
        if self.syntax == "regex":
            return StructuredOutputs(regex=self._regex)
        return StructuredOutputs(grammar=self.definition)

    def lark(self, *, in_json: bool) -> str:
        """A value of a Lark grammar that matches the text. Raises UnenforceableError: not `in_json`.

        llguidance's lexer does not go back, so that a name of any characters before a line's end would swallow the
        backslash of the `\\n` that ends the line in JSON. Rules that do not refer to themselves are one lexeme instead.
        """
        lark = self.definition
        if self.syntax == "regex":
            escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", ascii_classes(self._regex), flags=re.DOTALL)
            lark = f"start: /{escaped}/"
        if in_json:
            whole = "" if "%ignore" in lark else escaped_lark(lark, as_terminals=True)
            lark = escaped_lark(lark)
            with suppress(InvalidRequestError):
                compile_grammar(StructuredOutputs(grammar=whole))
                lark = whole
        return f"%lark {{\n{lark}\n}}"

    @property
    def _regex(self) -> str:
        """It matches the whole text in any case."""
        ends = self.definition.endswith("$") and not self.definition.endswith(r"\$")
        return self.definition.removeprefix("^")[: -1 if ends else None]


class InputReader:
    """Reads the text out of a call's arguments as they come; arguments of another form are the text themselves."""

    _HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
    _PIECE = re.compile(
        r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}'
        r"(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*"
    )

    def __init__(self, index: int):
        self.index = index
        """Of the call."""
        self._text = ""
        self._inside = False
        self._ended = False

    def feed(self, text: str) -> str:
        """What the next piece of the arguments adds to the text."""
        self._text += text
        if not self._inside:
            head = self._HEAD.match(self._text)
            if head is None:
                return ""
            self._inside, self._text = True, self._text[head.end() :]
        if self._ended:
            return ""
        piece = self._PIECE.match(self._text)
        assert piece is not None
        self._text = self._text[piece.end() :]
        self._ended = self._text.startswith('"')
        said = json.loads(f'"{piece.group()}"', strict=False)
        return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def rest(self) -> str:
        """What is left at the end: all of it where the arguments had another form."""
        text, self._text = self._text, ""
        return "" if self._inside else text


_COMMON = {
    "ESCAPED_STRING": r"\"([^\"\\]|\\.)*\"", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n",
    "NEWLINE": r"(\r?\n)+", "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"\/\/[^\n]*", "SQL_COMMENT": r"--[^\n]*",
}  # fmt: skip
"""Lark's common terminals in which there is something that JSON escapes, or all but that."""
_ESCAPED = '"\\\n\t\r\b\f'
"""Other control characters cannot come."""
_PLAIN = r'[^"\\\x00-\x1f]'
_LARK = re.compile(
    r"""
      (?P<comment> (?:\#|//)[^\n]* )
    | (?P<string> "(?:\\.|[^"\\\n])*" ) (?P<ignore_case> i? )
    | / (?P<regex> (?:\\.|[^/\\])+ ) / (?P<flags> [imslux]* )
    | %import [ \t]+ common (?: \.(?P<name> [A-Z_]+) (?: [ \t]*->[ \t]* (?P<alias> \w+) )?
                              | [ \t]* \( (?P<names> [^)]*) \) )
    | (?P<other> %(?:json|regex|lark)\b )
    | %\w+ | (?<![\w%]) [!?_]* (?P<rule> [a-z][\w-]*) | (?P<as> ->[ \t]*\w+ )
    """,
    re.VERBOSE,
)
_REGEX = re.compile(
    r"""
      (?P<group> \( (?: \?P?<\w+> | \?(?P<options>[a-zA-Z-]*)(?P<after>[:)]) )? )
    | (?P<end> \) )
    | (?P<char> \\x[0-9a-fA-F]{2} | \\u[0-9a-fA-F]{4} | \\[xupP]\{[^}]*\} | \\. | [.\n\t"]
              | \[ \^? \]? (?: \\. | \[:\w+:\] | [^\]\\] )* \] )
    """,
    re.VERBOSE | re.DOTALL,
)


def escaped_lark(lark: str, *, as_terminals: bool = False) -> str:
    """The grammar of the same texts as they stand inside a string of JSON, its rules `as_terminals`.

    Worked example: `start: "a\\n" /[^x]/` becomes `start: "a\\\\n" /(...|\\\\n)/`, with each of JSON's escapes that
    `[^x]` allows. Raises UnenforceableError for what has no such grammar.
    """
    escaped = _LARK.sub(partial(_escaped_part, as_terminals=as_terminals), lark)
    return f"start: {_terminal('start')}\n{escaped}" if as_terminals else escaped


def _terminal(rule: str) -> str:
    return f"RULE_{rule.upper()}"


def _escaped_part(found: re.Match[str], as_terminals: bool) -> str:
    if as_terminals and found["rule"] is not None:
        return _terminal(found["rule"])
    if as_terminals and found["as"] is not None:
        return ""
    if found["string"] is not None:
        return _escaped_string(found["string"], found["ignore_case"])
    if found["regex"] is not None:
        return f"/{_escaped_regex(found['regex'], found['flags'])}/{found['flags']}"
    if found["other"] is not None:
        raise UnenforceableError(f"{found['other']} is not available in the grammar of a tool's input")
    if found["name"] is not None:
        return _import(found["name"], found["alias"] or found["name"])
    if found["names"] is not None:
        return "\n".join(_import(name, name) for name in re.findall(r"\w+", found["names"]))
    return found.group()


def _import(name: str, alias: str) -> str:
    if name not in _COMMON:
        return f"%import common.{name}" + ("" if alias == name else f" -> {alias}")
    return f"{alias}: /{_escaped_regex(_COMMON[name], '')}/"


def _escaped_string(literal: str, ignore_case: str) -> str:
    text = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", literal))
    escaped = _in_json(text)
    if ignore_case and escaped != text:
        raise UnenforceableError(
            f"{literal}i ignores case and has a character that JSON escapes; write it in two parts"
        )
    return json.dumps(escaped, ensure_ascii=False) + ignore_case


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escaped_regex(pattern: str, flags: str) -> str:
    if "x" in flags:
        raise UnenforceableError(f"/{pattern}/{flags} has the flag x, which is not available in a tool's input")
    dot_all = ["s" in flags]

    def escaped(found: re.Match[str]) -> str:
        if found["group"] is not None:
            on, _, off = (found["options"] or "").partition("-")
            is_all = ("s" in on or dot_all[-1]) and "s" not in off
            if found["after"] == ")":
                dot_all[-1] = is_all
            else:
                dot_all.append(is_all)
        elif found["end"] is not None:
            dot_all[1:] = dot_all[1:-1]
        else:
            return _escaped_char(found["char"], dot_all[-1], "i" in flags)
        return found.group()

    return _REGEX.sub(escaped, pattern)


def _escaped_char(char: str, dot_all: bool, ignore_case: bool) -> str:
    """The part of a regular expression that matches one character, for a text with JSON's escapes."""
    known = r"[\s\S]" if char == "." and dot_all else r"[^\n]" if char == "." else char
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of what other engines read as operations on sets
            matches = re.compile(known, re.IGNORECASE if ignore_case else 0).fullmatch
    except (re.error, FutureWarning):
        raise UnenforceableError(f"{char} is not available in the regular expressions of a tool's input") from None
    alternatives = [f"(?-i:{re.escape(_in_json(one))})" for one in _ESCAPED if matches(one)]
    if not alternatives:
        return char
    if any(matches(chr(code)) for code in (*range(0x20, 0x7F), 0xE9, 0x4E00) if chr(code) not in _ESCAPED):
        alternatives.append(f"[{known}&&{_PLAIN}]")
    return f"({'|'.join(alternatives)})"
