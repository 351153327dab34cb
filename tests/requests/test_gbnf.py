"""GBNF means here what it means in llama.cpp: texts that its grammars accept and refuse, by llguidance."""

from __future__ import annotations

import re
from functools import cache

import pytest

from jaxllm.requests.gbnf import gbnf_to_lark, is_gbnf

llguidance = pytest.importorskip("llguidance")

JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CHESS = r"""root ::= (
    # a first move of each
    "1. " move " " move "\n"
    ([1-9] [0-9]? ". " move " " move "\n")+
)
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""


@cache
def compiled(grammar: str) -> str:
    lark = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(grammar))
    assert not llguidance.LLMatcher.validate_grammar(lark)
    return lark


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), compiled(grammar))
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (JSON, ['{"a": [1, -2.5e+1, "x\\n\\u00e9"], "b": null}', '{\n  "a":1}', "{}"], ['{"a": 1', "[1]", '{"a": 01}']),
        (ARITHMETIC, ["x+1=2\n", "x = (1*y)\n", "1=1\n2=2\n"], ["X=1\n", "x=\n", "x=1"]),
        (CHESS, ["1. e4 e5\n2. Nf3 O-O-O\n", "1. e4 e5\n2. exd8=Q+ Ka1\n"], ["1. e4 e5\n", "1. e9 e5\n2. e4 e5\n"]),
        ('root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\u2028]+ "\\n"\n', ["- a\n- é\n"], ["- a\r\n", "- \n"]),
        ("root ::= [ぁ-ゟ一-鿿]+", ["こん日"], ["abc", ""]),
        ('root ::= [0-9]+ "0"', ["10", "100"], ["1", "0"]),
        ('root ::= ("1" | "12") "2"? "3"', ["13", "123", "1223"], ["12", "12223"]),
        ('root ::= "a" . "b"', ["axb", "a\nb", "aéb"], ["ab", "axxb"]),
        ('root ::= "a"{2} "b"{1,} "c"{,3} ("de"){2,3} "fg"*', ["aabdede", "aabbcccdededefgfg"], ["aabccccdede"]),
        ('root ::= "\\U0001F600" [\\u4e00-\\u9fff]', ["\U0001f600中"], ["中", "\U0001f600a"]),
        (r"root ::= [\]x] [-a] [a-] [^\n] [/]", ["]-ax/", "xa-é/"], ["]--\n/", "a--x/"]),
        ('root ::= "" | root "a"', ["", "aaa"], ["b"]),
        ('root ::= My-Rule START2\r\nMy-Rule ::= "x"\r\nSTART2 ::= start\nstart ::= "#\\"" # too', ['x#"'], ["x#"]),
    ],
)  # fmt: skip
def test_what_a_grammar_accepts(grammar: str, accepted: list[str], refused: list[str]) -> None:
    assert is_gbnf(grammar)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('root ::= a "b"', "there is no rule 'a'"),
        ('start ::= "b"', "there is no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "the rule 'root' is there twice (line 2)"),
        ('root ::= "a"\n | "b"', "'|' is not expected (line 2)"),
        ('root ::= "a" ]', "']' is not expected (line 1)"),
        ('root ::= ("a"', "a group's closing ')' is missing (line 1)"),
        ('root ::= "a', "a text's closing '\"' is missing (line 1)"),
        ("root ::= [a", "a class's closing ']' is missing (line 1)"),
        ("root ::= []", "a class of characters is empty (line 1)"),
        ("root ::= [z-a]", "the range from 'z' to 'a' is empty (line 1)"),
        (r'root ::= "\q"', r"\q is no escape of GBNF (line 1)"),
        (r'root ::= "\ud800"', r"\ud800 is no character (line 1)"),
        ("root ::= " + "(" * 3000, "groups lie more than 100 deep (line 1)"),
        ('root ::= "a"{2001}', "{2001} is more than 2000 times (line 1)"),
        ('root ::= "a"{,}', "{,} says not how often (line 1)"),
        ("root ::= <think>", "tokens in angle brackets are not supported (line 1)"),
        ('root ::= "a"\nb', "'::=' must follow the rule's name (line 2)"),
    ],
)
def test_what_is_wrong_with_a_grammar(grammar: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        gbnf_to_lark(grammar)


def test_lark_is_told_apart() -> None:
    assert not is_gbnf('start: "a ::= b" | other\nother: /x::=/')
