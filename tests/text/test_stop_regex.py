"""Regular expressions that end a text, as its tokens come."""

from __future__ import annotations

import time
from functools import lru_cache

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxllm.errors import InvalidRequestError
from jaxllm.text.detokenizer import LONGEST_MATCH, Detokenizer, regex_matcher


@lru_cache
def spelled(pieces: tuple[str, ...]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer that has these pieces, and their ids."""
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(("", *pieces)))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer, [vocab[piece] for piece in pieces]


def feed(pieces: list[str], *stops: str, min_tokens: int = 0, **options: object) -> tuple[list[str], str | None]:
    """What is shown after each token, and last what was held back; and what was found."""
    tokenizer, ids = spelled(tuple(pieces))
    detokenizer, shown = Detokenizer(tokenizer, [], stop_regex=stops, **options), []  # type: ignore[arg-type]
    for count, token in enumerate(ids, 1):
        text, found = detokenizer.add(token, count >= min_tokens)
        shown.append(text)
        if found is not None:
            assert detokenizer.flush() == ""
            return shown, found
    return [*shown, detokenizer.flush()], None


def ways(text: str) -> list[list[str]]:
    """The text in pieces of each length."""
    return [[text[i : i + n] for i in range(0, len(text), n)] for n in range(1, len(text) + 1)]


@pytest.mark.parametrize(
    ("text", "stop", "before", "match"),
    [
        ("one 42 two", "[0-9]+", "one ", "4"),  # the first character that makes a match ends the text
        ("one 42 two", r"\d+ ", "one ", "42 "),
        ("a\n\nUser: hi", r"\n+User:", "a", "\n\nUser:"),
        ("ababac", "abac", "ab", "abac"),
        ("aab", "a+b", "", "aab"),  # from where it began first
        ("xx END", "(?i)end", "xx ", "END"),
        ("größer 😀 ja", "[😀😎] j", "größer ", "😀 j"),
        ("say \"no\" or 'no'", "'[a-z]+'|\"[a-z]+\"", "say ", '"no"'),
        ("a.b", r"\.", "a", "."),
    ],
)
def test_is_found_however_the_text_is_cut(text: str, stop: str, before: str, match: str) -> None:
    for pieces in ways(text):
        shown, found = feed(pieces, stop)
        assert ("".join(shown), found) == (before, stop)
        shown, found = feed(pieces, stop, include_stop=True)
        assert ("".join(shown), found) == (before + match, stop)


def test_what_may_begin_a_match_is_held_back_and_no_more() -> None:
    assert feed(list("ab12c"), r"[0-9]+\.") == (["a", "b", "", "", "12c", ""], None)
    assert feed(["x", "1", "2"], r"[0-9]+\.") == (["x", "", "", "12"], None)


def test_stands_beside_stop_strings_and_other_expressions() -> None:
    """What begins first wins, of those that the same token completes."""
    assert feed(["a", "bcd"], "c", stop=["bcd"]) == (["a", ""], "bcd")
    assert feed(["a", "bcd"], "b", stop=["cd"]) == (["a", ""], "b")
    assert feed(["a", "bcd"], "d", "[bc]") == (["a", ""], "[bc]")


def test_before_min_tokens_a_match_is_only_text() -> None:
    assert feed(["ab", "x", "ab"], "ab", min_tokens=3) == (["ab", "x", ""], "ab")


def test_a_match_has_a_longest_length() -> None:
    fits, longer = "(" + "x" * (LONGEST_MATCH - 2) + ")", "(" + "x" * (LONGEST_MATCH - 1) + ")"
    assert feed([*fits], r"\(x*\)")[1] is not None
    shown, found = feed([*longer], r"\(x*\)")
    assert found is None and "".join(shown) == longer


@pytest.mark.parametrize(
    ("stop", "said"),
    [("(a", "cannot be used"), ("a*", "matches the empty text"), ("^a", "cannot be used"), (r"a\b", "cannot be used"),
     ("a" * 1025, "longer than 1024"), (r"(a)\1", "cannot be used"), ("(?=a)b", "cannot be used")],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_a_line(stop: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as error:
        regex_matcher(stop)
    assert error.value.param == "stop_regex" and "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    "stop",
    ["(a+)+b", "(a|aa)+$b", "(.*)*b", "(a?){200}a{200}b", "((a{99}){99}){99}b", ".*.*.*b", "x*y{1,900}b", "[]" * 400],
)
def test_no_expression_takes_long(stop: str) -> None:
    """Neither to be refused nor to be followed through a text that would keep one that goes back busy for ages."""
    began = time.process_time()
    try:
        shown, found = feed(["aaaa"] * 250, stop)
        assert ("".join(shown), found) == ("a" * 1000, None)
    except InvalidRequestError:
        pass
    assert time.process_time() - began < 5
