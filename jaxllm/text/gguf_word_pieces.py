"""BERT's tokenizer from GGUF metadata: words, cut into the longest pieces that the vocabulary has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.errors import CheckpointError
from jaxllm.text.backend import rust_errors
from jaxllm.text.gguf_ends import special_token

_WORD, _PIECE = "\u2581", "##"
_UNKNOWN, _CONTROL = 2, 3
_SPECIAL = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]"}
"""Keys, spelled as files have them, and the tokens that they are where a file has no such key."""


def word_pieces(path: Path, metadata: dict[str, Any], stored: list[str], kinds: list[int]) -> Tokenizer:
    """The tokenizer of a file.

    llama.cpp stores the first piece of a word with a mark in front and what goes on a word as it is; here the others
    have ## in front. Whether letters are made small is not stored: they are unless the vocabulary has large ones.

    Raises:
        CheckpointError: two tokens are the same, or a special one is missing.
    """
    tokens = [_as_piece(token, kind) for token, kind in zip(stored, kinds, strict=True)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens has a token twice")
    special = {name: special_token(path, metadata, tokens, (name,), usual) for name, usual in _SPECIAL.items()}
    cls, sep = special["cls"], special["seperator"]
    cased = any(token != token.lower() for token in tokens if not token.startswith("["))
    with rust_errors(CheckpointError, f"{path}: the tokenizer: "):
        backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=special["unknown"]))
        backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(token, vocabulary[token]) for token in (cls, sep)],
        )
        controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
        names = dict.fromkeys([*special.values(), *controls])
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in names])
    return backend


def _as_piece(token: str, kind: int) -> str:
    if token.startswith(_WORD):
        return token.removeprefix(_WORD)
    in_brackets = token.startswith("[") and token.endswith("]")
    return token if in_brackets or kind in (_UNKNOWN, _CONTROL) else _PIECE + token
