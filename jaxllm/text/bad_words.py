"""How bad words are spelled in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import MAX_BAD_WORDS

MAX_SPELLINGS = 2 * MAX_BAD_WORDS
"""Each word may be behind a space, or not."""
MAX_SPELLING_LENGTH = 16


def spellings(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that each word is: at the start of a text, and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.strip(), " " + word.strip()):
            found[tuple(tokenizer.encode(text, add_special_tokens=False).ids)] = None
    return tuple(found)


def check_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> None:
    """Raises InvalidRequestError for a word of too many tokens."""
    for word in words:
        length = max(map(len, spellings(tokenizer, [word])))
        if length > MAX_SPELLING_LENGTH:
            raise InvalidRequestError(
                f"bad_words has {word!r}, which is {length} tokens; a bad word may have {MAX_SPELLING_LENGTH}",
                param="bad_words",
            )
