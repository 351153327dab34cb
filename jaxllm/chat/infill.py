"""Filling in the middle: prompts by which code models write the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from jaxllm.chat.prompt import ChatModel
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.text.tokenizer import Tokenizer

_FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder2, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral, which has no mark after which the middle is written
)
"""The tokens before the prefix and before the suffix, and the one after which the middle is written."""
_SUFFIX_FIRST = ("<[fim-prefix]>", "[PREFIX]")
_NAMED = ("prefix_token", "suffix_token", "middle_token")
"""Their names in tokenizer_config.json, also in the one that is made of GGUF's metadata."""
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>", "<|fim_repo|>", "<fim-repo>", "<REPO>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>")
_SNIPPET = "\n\n--- snippet ---\n\n"
"""llama.cpp's line before another file's text, for models that have no token for it."""


class FimPrompt(NamedTuple):
    """A prompt, and the tokens besides the model's own that end its answer."""

    token_ids: list[int]
    stop_token_ids: tuple[int, ...]


def fim_prompt(
    model: ChatModel,
    prefix: str,
    suffix: str,
    *,
    files: Sequence[tuple[str, str]] = (),
    room: int | None = None,
    fields: tuple[Field, Field] = (Field("prompt"), Field("suffix")),
) -> FimPrompt:
    """The prompt after which the model writes what stands between `prefix` and `suffix`.

    Args:
        files: names and texts of files that come before it. The first are left out if there are more than `room`
            tokens in all.
        fields: the caller's names of the prefix and the suffix, for errors.

    Raises InvalidRequestError if the tokenizer has no tokens for it, and ContextLengthError.
    """
    tokenizer = model.tokenizer
    marks = fim_marks(tokenizer)
    if marks is None:
        reason = " is set, but this model's tokenizer has no tokens for filling in the middle, as <|fim_prefix|>"
        raise InvalidRequestError([fields[1], f"{reason}; leave it out"])
    model.check_length(suffix, fields[1], may_be_cut=False)
    before, after, middle = (_first(tokenizer, [mark]) for mark in marks)
    parts = [
        [*before, *model.encode(prefix, fields[0], add_special_tokens=False)],
        [*after, *_without_space(tokenizer, suffix)],
    ]
    first, second = parts[::-1] if marks[0] in _SUFFIX_FIRST else parts
    own = [*first, *second, *middle]
    begin = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    mark, repository, padding = (_first(tokenizer, tokens) for tokens in (_FILE, _REPOSITORY, _PADDING))
    chunks = []
    for name, text in files:
        model.check_length(text, Field("input_extra"), may_be_cut=True)
        head = tokenizer.encode(f"{name}\n" if mark else _SNIPPET, False)
        chunks.append([*mark, *head, *tokenizer.encode(text, False)])
    if chunks:
        begin += [*repository, *tokenizer.encode("project\n", False)] if repository and mark else []
        own = [*mark, *tokenizer.encode("file\n", False), *own] if mark else own
    while room is not None and chunks and len(begin) + len(own) + sum(map(len, chunks)) > room:
        del chunks[0]
    return FimPrompt([*begin, *chain.from_iterable(chunks), *own], (*repository, *mark, *padding))


def fim_marks(tokenizer: Tokenizer) -> tuple[str | None, ...] | None:
    """The tokens before the prefix, before the suffix and before the middle; None where there are none."""
    stated = tuple(tokenizer.special_tokens.get(name) for name in _NAMED)
    families = [*([stated] if None not in stated else []), *_FAMILIES]
    return next((one for one in families if all(_first(tokenizer, [mark]) for mark in one if mark)), None)


def _first(tokenizer: Tokenizer, tokens: Iterable[str | None]) -> list[int]:
    """The id of the first of these tokens that the tokenizer has, alone; empty if it has none."""
    ids = (tokenizer.backend.token_to_id(token) for token in tokens if token)
    return [token for token in ids if token is not None][:1]


def _without_space(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text before which no space is put, as SentencePiece does at the beginning of every text."""
    alone = tokenizer.encode("\n", False)
    if not (tokenizer.backend.id_to_token(alone[0]) or "").startswith("▁"):
        return tokenizer.encode(text, False)
    return tokenizer.encode("\n" + text, False)[len(alone) :]
