"""Tokenizers of encoders and of T5 from GGUF metadata: unigrams, BERT's pieces of words, and the tokens around texts.

Unigrams, the likeliest cut of a text into pieces: Kudo 2018, arXiv:1804.10959, as SentencePiece has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.errors import CheckpointError
from jaxllm.text.backend import rust_errors
from jaxllm.weights.fields import shown

FIRST, LAST = ("cls", "bos"), ("seperator", "eos")
"""Keys of the two tokens, spelled as files have them; the first that is there counts."""
_WORD, _PIECE = "\u2581", "##"
_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6
_SPECIAL = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]"}
"""Keys, spelled as files have them, and the tokens that they are where a file has no such key."""


def unigram(path: Path, metadata: dict[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """The tokenizer of a file, with what it puts around texts.

    An encoder's texts begin with a token and end with one, of which there are two between texts; others end with one.

    Raises:
        CheckpointError: scores or a special token are missing, or a key has a value that is not supported.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise CheckpointError(f"{path}: a 't5' tokenizer needs tokenizer.ggml.scores, which is missing")
    if not metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise CheckpointError(f"{path}: tokenizer.ggml.add_space_prefix is false; accepted is true in a 't5' tokenizer")
    if _BYTE in kinds:
        raise CheckpointError(
            f"{path}: token {shown(tokens[kinds.index(_BYTE)])} stands for a byte; a 't5' tokenizer has none"
        )
    if _UNKNOWN not in kinds:
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type has no unknown token, which a 't5' tokenizer needs")
    encodes = metadata.get("general.architecture") == "bert"
    first = special_token(path, metadata, tokens, FIRST, "<s>") if _adds(metadata, "bos", encodes) else None
    last = special_token(path, metadata, tokens, LAST, "</s>") if _adds(metadata, "eos", True) else None
    vocabulary = list(zip(tokens, map(float, scores), strict=True))
    with rust_errors(CheckpointError, f"{path}: the tokenizer: "):
        backend = Tokenizer(models.Unigram(vocabulary, unk_id=kinds.index(_UNKNOWN), byte_fallback=False))
        charsmap = bytes(metadata.get("tokenizer.ggml.precompiled_charsmap") or ())
        if charsmap:
            backend.normalizer = normalizers.Precompiled(charsmap)
        marked = pre_tokenizers.Metaspace(replacement=_WORD, prepend_scheme="always")
        alone = metadata.get("tokenizer.ggml.remove_extra_whitespaces", True)
        words = [pre_tokenizers.WhitespaceSplit()] if alone else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*words, marked])
        backend.decoder = decoders.Metaspace(replacement=_WORD, prepend_scheme="always")
        ids = {token: index for index, token in enumerate(tokens)}
        backend.post_processor = around_texts(first, last, doubled=first is not None, ids=ids)
    return backend


def _adds(metadata: dict[str, Any], which: str, usual: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.add_{which}_token", usual))


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


def special_token(path: Path, metadata: dict[str, Any], tokens: list[str], keys: tuple[str, ...], usual: str) -> str:
    """The token that one of `keys` names, or the `usual` one where a file has no such key.

    Raises:
        CheckpointError: neither is there, or the key names no token.
    """
    names = [f"tokenizer.ggml.{key}_token_id" for key in keys]
    name = next((name for name in names if metadata.get(name) is not None), None)
    if name is None:
        if usual not in tokens:
            raise CheckpointError(f"{path}: has no {' or '.join(names)}, and no token {usual}")
        return usual
    if metadata[name] >= len(tokens):
        raise CheckpointError(
            f"{path}: {name} is {metadata[name]}; accepted is less than {len(tokens)}, the number of tokens"
        )
    return tokens[metadata[name]]


def around_texts(first: str | None, last: str | None, *, doubled: bool, ids: dict[str, int]) -> Any:
    """`first` text `last`, and of two texts `first` text `last` other `last`; where `doubled`, the middle one twice.

    Either may be None.
    """
    before, after = [[token] if token is not None else [] for token in (first, last)]
    single = [*before, "$A", *after]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *(after if doubled else []), "$B", *after],
        special_tokens=[(token, ids[token]) for token in {*before, *after}],
    )
