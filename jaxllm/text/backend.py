"""tokenizer.json -> a `tokenizers` object, with what its Rust code does to Python kept in bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from jaxllm.errors import CheckpointError, JaxLLMError, one_line
from jaxllm.weights.folder import read_text

MAX_GROWTH = 4096
"""How many times longer the replacements of a tokenizer may make a text, one after the other."""
KEPT_WORDS = 1000
"""Whose tokens a thread keeps, instead of the ten thousand that are usual: words of 200 letters take 6 KB each, in
every thread that encodes, and it is strangers who choose them. Texts are encoded 4 % slower."""
_TRIAL = "Hello  wörld, it's 12345.\n\n世界 🤖\x00 <s></s>"


class _Steps(msgspec.Struct):
    """The parts of a tokenizer.json that rewrite text; the vocabulary is skipped."""

    normalizer: Any = None
    decoder: Any = None


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a folder, without truncation or padding, and tried once on a text.

    Raises:
        CheckpointError: it is missing, corrupt, or cannot encode and decode a text.
    """
    text, file = read_text(folder, "tokenizer.json"), folder / "tokenizer.json"
    with rust_errors(CheckpointError, f"{file}: "):
        steps = msgspec.json.decode(text, type=_Steps)
        for name in ("normalizer", "decoder"):
            if (growth := _growth(getattr(steps, name))) > MAX_GROWTH:
                raise CheckpointError(f"{name} makes texts up to {growth:.3g} times longer; accepted is {MAX_GROWTH}")
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE | tokenizers.models.Unigram):
            backend.model._resize_cache(KEPT_WORDS)
        backend.encode(_TRIAL, "a")
        backend.decode(backend.encode(_TRIAL).ids)
    return backend


@contextmanager
def rust_errors(kind: type[JaxLLMError], before: str) -> Iterator[None]:
    """What tokenizers raises, as one line of `kind`: bare Exceptions, and a BaseException of pyo3's where it panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{before}{one_line(error)}") from None


def _growth(step: Any) -> float:
    """The product of what each replacement in a normalizer or decoder can do to the length of a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    own = step.get("content") if step.get("type") == "Replace" else ""
    parts = [value for value in step.values() if isinstance(value, (dict, list))]
    return max(len(own) if isinstance(own, str) else 1, 1) * math.prod(map(_growth, parts))
