"""Unigram tokenizers from GGUF metadata, as XLM-RoBERTa and T5 have: the likeliest cut of a text into pieces.

Kudo 2018, arXiv:1804.10959, as SentencePiece has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.errors import CheckpointError
from jaxllm.text.backend import rust_errors
from jaxllm.text.gguf_ends import FIRST, LAST, around_texts, special_token
from jaxllm.weights.fields import shown

_UNKNOWN = 2
_SPACE = "\u2581"
_BYTE = 6


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
        marked = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
        alone = metadata.get("tokenizer.ggml.remove_extra_whitespaces", True)
        words = [pre_tokenizers.WhitespaceSplit()] if alone else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*words, marked])
        backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
        ids = {token: index for index, token in enumerate(tokens)}
        backend.post_processor = around_texts(first, last, doubled=first is not None, ids=ids)
    return backend


def _adds(metadata: dict[str, Any], which: str, usual: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.add_{which}_token", usual))
