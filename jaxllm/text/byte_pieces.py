"""The bytes of tokens that are parts of characters, as vocabularies spell them and as OpenAI names them."""

from __future__ import annotations

import re

REPLACEMENT = "\ufffd"
"""What decoders give for bytes that are no whole character."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A byte in SentencePiece's vocabularies."""


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies.

    The formula is `bytes_to_unicode` of GPT-2's encoder.py: visible characters of Latin-1 stand for themselves, and the
    other bytes, in their order, are the characters from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_CHARACTERS = {byte: character for character, byte in _ALPHABET.items()}


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
    """How a byte-level vocabulary spells these bytes.

    Worked example: `byte_level(b" \xe2")` is "Ġâ".
    """
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
