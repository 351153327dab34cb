"""Spellings of texts in tokens: cuts of each family, the bytes of parts of characters, and bad words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import MAX_BAD_WORDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
SEED = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HAN = r"[\p{Han}]"
_NOT_HAN = r"&&[^\p{Han}]]"
KIMI = (
    rf"{_HAN}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER[:-1]}{_NOT_HAN}*{LOWER[:-1]}{_NOT_HAN}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER[:-1]}{_NOT_HAN}+{LOWER[:-1]}{_NOT_HAN}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)


REPLACEMENT = "\ufffd"  # what decoders give for bytes that are no whole character
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # a byte in SentencePiece's vocabularies


# Characters for bytes in byte-level vocabularies, by `bytes_to_unicode` of GPT-2's encoder.py: visible ones of Latin-1
# stand for themselves, and those from U+0100 on, in their order, for the other bytes.
_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]
_CHARACTERS = {byte: chr(byte) for byte in _VISIBLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_ALPHABET = {character: byte for byte, character in _CHARACTERS.items()}


def piece_bytes(piece: str) -> bytes | None:
    """The bytes that a vocabulary's entry spells, where it spells any.

    Worked example: `piece_bytes("<0xE2>")` is b"\xe2", `piece_bytes("Ġâ")` is b" \xe2", `piece_bytes("世")` is None.
    """
    if found := _BYTE_TOKEN.fullmatch(piece):
        return bytes.fromhex(found[1])
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return None


def byte_level(token: bytes) -> str:
    """The spelling of these bytes in a byte-level vocabulary: `byte_level(b" â")` is "Ġâ"."""
    return "".join(_CHARACTERS[byte] for byte in token)


def escaped(token: bytes) -> str | None:
    """A part of a character as OpenAI names it, bytes that are not ASCII as escapes; None for a token that is text.

    Worked example: `escaped(b" \xe2\x80")` is ' \\xe2\\x80'.
    """
    try:
        token.decode()
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else f"\\x{byte:02x}" for byte in token)
    return None


MAX_SPELLINGS = 2 * MAX_BAD_WORDS  # each word may follow a space, or not
MAX_SPELLING_LENGTH = 16


def spellings(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each word: at the start of a text, and after a space."""
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
