"""The tokens that encoders' GGUF files put around a text, and between two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import processors

from jaxllm.errors import CheckpointError

FIRST, LAST = ("cls", "bos"), ("seperator", "eos")
"""Keys of the two tokens, spelled as files have them; the first that is there counts."""


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
