"""Kimi's tokenizer, published as a file of tiktoken's and code: the same from the files alone, as a tokenizer.json.

The code (tokenization_kimi.py, in Moonlight tokenization_moonshot.py) adds two things to the file's tokens: the pattern
that cuts a text before bytes are merged, and tokens behind them, which have the names that tokenizer_config.json gives.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxllm.errors import CheckpointError
from jaxllm.folders import make_once
from jaxllm.text.backend import ADDED_TOKEN_FIELDS, rust_errors
from jaxllm.text.spellings import KIMI, byte_level
from jaxllm.weights.fields import check_fields, shown
from jaxllm.weights.folder import model_file, read_object, read_text

TIKTOKEN_FILE = "tiktoken.model"
_REVISION = 1  # part of the cache key: raise it whenever this file builds something different
_CODE = ("tokenization_kimi", "tokenization_moonshot")
_BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files that a tokenizer's directory has as they are, each where there is one."""
_LONGEST = 1024
"""Bytes of a token."""
_MOST_RESERVED = 4096


def cached_tiktoken_tokenizer(folder: Path, cache_dir: Path) -> Path:
    """The directory with the tokenizer.json made of a folder's tiktoken.model, built on the first call.

    The key is a hash of what it is made of.

    Raises:
        CheckpointError: a file is corrupt, or the tokenizer is none that this file knows the code of.
    """
    digest = hashlib.sha256()
    for name in (TIKTOKEN_FILE, *_BESIDE):
        text = read_text(folder, name) if model_file(folder, name).exists() else ""
        digest.update(f"{name} {len(text)} {text}".encode())
    target = cache_dir / f"{digest.hexdigest()[:32]}-tiktoken-{_REVISION}"
    make_once(target, partial(_write, folder))
    return target


def _write(folder: Path, directory: Path) -> None:
    _build(folder).save(str(directory / "tokenizer.json"), pretty=False)
    for name in _BESIDE:
        if model_file(folder, name).exists():
            shutil.copyfile(model_file(folder, name), directory / name)


def _build(folder: Path) -> Tokenizer:
    config = read_object(folder, "tokenizer_config.json")
    check_fields(config, ADDED_TOKEN_FIELDS, f"{folder / 'tokenizer_config.json'}: ")
    _check_code(folder, config)
    ranks = read_ranks(folder)
    vocabulary = {byte_level(token): rank for token, rank in ranks.items()}
    merges = [(byte_level(left), byte_level(right)) for left, right in merges_of(ranks)]
    with rust_errors(CheckpointError, f"{folder / TIKTOKEN_FILE}: "):
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(KIMI), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        added = _reserved(folder, config.get("added_tokens_decoder") or {}, len(ranks))
        backend.add_tokens(list(added.values()))
    for index, token in added.items():
        if (found := backend.token_to_id(token.content)) != index:
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: token {shown(token.content)} is {found} too")
    return backend


def _check_code(folder: Path, config: Mapping[str, Any]) -> None:
    named = config.get("auto_map")
    named = named.get("AutoTokenizer") if isinstance(named, dict) else None
    code = named[0] if isinstance(named, list) and named else named
    if not isinstance(code, str) or code.rpartition("--")[2].partition(".")[0] not in _CODE:
        raise CheckpointError(
            f"{folder}: {TIKTOKEN_FILE} goes with the code that auto_map of tokenizer_config.json names, which is "
            f"{shown(code)}; known is what {' and '.join(_CODE)} do"
        )


def read_ranks(folder: Path) -> dict[bytes, int]:
    """The tokens of a folder's tiktoken.model and their ranks, which are 0, 1, … and their ids.

    Raises:
        CheckpointError: a line is no token and rank, a token or rank is there twice or missing.
    """
    file, ranks = folder / TIKTOKEN_FILE, dict[bytes, int]()
    for number, line in enumerate(read_text(folder, TIKTOKEN_FILE).splitlines(), 1):
        if not line:
            continue
        encoded, _, rank = line.partition(" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except ValueError:
            token = b""
        if not 0 < len(token) <= _LONGEST or not (rank.isascii() and rank.isdecimal()) or token in ranks:
            raise CheckpointError(
                f"{file}, line {number}: {shown(line)}; accepted is a new token of up to {_LONGEST} bytes in base64, a "
                "space and its rank"
            )
        ranks[token] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: ranks are not 0 to {len(ranks) - 1}, each once")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{file}: has no token of the byte {missing[0]:#04x} alone")
    return ranks


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every two tokens that make a third, in the order of that one's rank.

    tiktoken joins the neighbours that make the token of the lowest rank, whatever they are themselves.
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _reserved(folder: Path, stated: Mapping[str, Any], first: int) -> dict[int, AddedToken]:
    """The tokens behind the ranks by id: those that are stated, and reserved ones between them."""
    named = {int(key): value for key, value in stated.items()}
    last = max(named, default=first - 1)
    if min(named, default=first) < first or last >= first + _MOST_RESERVED:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has ids from {min(named)} to {last}; "
            "accepted are "
            f"{first} to {first + _MOST_RESERVED - 1}"
        )
    return {
        index: AddedToken(
            named[index]["content"] if index in named else f"<|reserved_token_{index}|>",
            normalized=False,
            special=index not in named or bool(named[index].get("special")),
        )
        for index in range(first, last + 1)
    }
