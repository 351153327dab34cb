"""tokenizer.json and the tokens that a folder's other files add to it -> a `tokenizers` object.

What its Rust code does to Python is kept in bounds; tokens are added as transformers' AutoTokenizer adds them.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxllm.errors import CheckpointError, rust_errors
from jaxllm.folders import make_once
from jaxllm.text.spellings import KIMI, byte_level
from jaxllm.weights.fields import FLAG, NULL, TEXT, FieldKind, FieldKinds, check_fields, either, many, shown
from jaxllm.weights.folder import model_file, read_object, read_text

MAX_GROWTH = 4096  # how many times longer the replacements of a tokenizer may make a text, one after the other
KEPT_WORDS = 1000
"""Whose tokens a thread keeps, instead of the ten thousand that are usual: words of 200 letters take 6 KB each, in
every thread that encodes, and it is strangers who choose them. Texts are encoded 4 % slower."""
_TRIAL = "Hello  wörld, it's 12345.\n\n世界 🤖\x00 <s></s>"

MOST = 2**20
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TOKEN = FieldKind(
    f"an object with content and the flags {', '.join(_FLAGS)}",
    lambda value: (
        isinstance(value, dict)
        and TEXT.fits(value.get("content"))
        and all(either(FLAG, NULL).fits(value.get(flag)) for flag in _FLAGS)
    ),
)
_TOKEN_OR_TEXT = either(TEXT, _TOKEN)
ADDED_TOKEN_FIELDS: FieldKinds = {  # of tokenizer_config.json
    "added_tokens_decoder": FieldKind(
        f"an object of up to {MOST} entries, from ids to tokens; each token is {_TOKEN.accepted}",
        lambda value: (
            isinstance(value, dict)
            and len(value) <= MOST
            and all(key.isdecimal() and len(key) < 12 for key in value)
            and all(map(_TOKEN.fits, value.values()))
        ),
    ),
    "extra_special_tokens": either(
        many(_TOKEN_OR_TEXT, MOST),
        FieldKind(
            "an object of names and tokens",
            lambda value: (
                isinstance(value, dict) and len(value) <= MOST and all(map(_TOKEN_OR_TEXT.fits, value.values()))
            ),
        ),
        NULL,
    ),
    "additional_special_tokens": either(many(_TOKEN_OR_TEXT, MOST), NULL),
}
_IDS = FieldKind(  # of added_tokens.json
    f"an object of up to {MOST} tokens with their ids",
    lambda value: len(value) <= MOST and all(type(i) is int and 0 <= i < 2**31 for i in value.values()),
)


class _Steps(msgspec.Struct):
    """The parts of a tokenizer.json that rewrite text; the vocabulary is skipped."""

    normalizer: Any = None
    decoder: Any = None


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a folder, without truncation or padding. Raises CheckpointError if it fails on a test text."""
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


def _growth(step: Any) -> float:
    """The product of what each replacement in a normalizer or decoder can do to the length of a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    own = step.get("content") if step.get("type") == "Replace" else ""
    parts = [value for value in step.values() if isinstance(value, (dict, list))]
    return max(len(own) if isinstance(own, str) else 1, 1) * math.prod(map(_growth, parts))


def text_of(token: Any) -> str | None:
    """'</s>' or {'content': '</s>', …}, whichever way the file spells it; None for what is no token."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def named_extras(config: dict[str, Any]) -> dict[str, str]:
    """The `extra_special_tokens` that have names, by which chat templates know them."""
    extras = config.get("extra_special_tokens")
    return {name: text_of(token) or "" for name, token in extras.items()} if isinstance(extras, dict) else {}


def add_stated_tokens(
    path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str], rows: int | None
) -> None:
    """Add what tokenizer_config.json, or added_tokens.json where that states none, has more than tokenizer.json.

    Tokens that have a name among `special_tokens` are special, whatever tokenizer.json says: `skip_special_tokens`
    leaves them out. Ids are the next free ones, in the order of those that the files state. Tokens for which a model
    of `rows` embeddings has none are not added.

    Raises CheckpointError if the tokenizer refuses one, or added_tokens.json is not of ids by tokens.
    """
    stated = config.get("added_tokens_decoder")
    if stated is not None:
        by_id = {int(key): _token(value) for key, value in stated.items()}
    else:
        special = {*special_tokens.values(), *_unnamed(config)}
        older: dict[str, int] = {}
        if model_file(path, "added_tokens.json").exists():
            older = read_object(path, "added_tokens.json")
            check_fields({"added_tokens.json": older}, {"added_tokens.json": _IDS}, f"{path}: ")
        tokens_of_file = {
            i: AddedToken(text, normalized=text not in special, special=text in special) for text, i in older.items()
        }
        by_id = tokens_of_file | backend.get_added_tokens_decoder()
    tokens = [by_id[i] for i in sorted(by_id)]
    for token in tokens:
        token.special = token.special or token.content in special_tokens.values()
    _add(path, backend, tokens, rows)


def add_special_tokens(
    path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str], rows: int | None
) -> None:
    """Add the special tokens that no file gives an id. Arguments and errors are as those of `add_stated_tokens`."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    texts = dict.fromkeys([*special_tokens.values(), *_unnamed(config)])
    _add(path, backend, [AddedToken(text, special=True) for text in texts if text not in known], rows)


def _add(path: Path, backend: tokenizers.Tokenizer, tokens: list[AddedToken], rows: int | None) -> None:
    new = [token for token in tokens if backend.token_to_id(token.content) is None]
    if rows is not None:
        left_out = {token.content for token in new[max(rows - backend.get_vocab_size(with_added_tokens=True), 0) :]}
        tokens = [token for token in tokens if token.content not in left_out]
    with rust_errors(CheckpointError, f"{path / 'tokenizer_config.json'}: its added tokens: "):
        backend.add_tokens(tokens)


def _unnamed(config: dict[str, Any]) -> list[str]:
    extras = config.get("extra_special_tokens")
    listed = extras if isinstance(extras, list) and extras else config.get("additional_special_tokens") or []
    return [text for token in listed if (text := text_of(token))]


def _token(value: dict[str, Any]) -> AddedToken:
    return AddedToken(value["content"], **{flag: value[flag] for flag in _FLAGS if value.get(flag) is not None})


def split_to_bytes(backend: Tokenizer, *patterns: str) -> None:
    """Have texts cut by these regexes, one after the other, and their parts into bytes."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()


# Kimi's tokenizer, published as a file of tiktoken's and code: the same from the files alone, as a tokenizer.json. The
# code (tokenization_kimi.py, in Moonlight tokenization_moonshot.py) adds two things to the file's tokens: the pattern
# that cuts a text before bytes are merged, and further tokens, which have the names that tokenizer_config.json gives.
TIKTOKEN_FILE = "tiktoken.model"
_REVISION = 1  # part of the cache key: raise it whenever this file builds something different
_CODE = ("tokenization_kimi", "tokenization_moonshot")
_BESIDE = (  # files that a tokenizer's directory has as they are, each where there is one
    "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_LONGEST = 1024  # bytes of a token
_MOST_RESERVED = 4096


def cached_tiktoken_tokenizer(folder: Path, cache_dir: Path) -> Path:
    """The directory with the tokenizer.json made of a folder's tiktoken.model; its name has a hash of what that is of.

    Raises CheckpointError if a file is corrupt, or the tokenizer is none that this file knows the code of.
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
        split_to_bytes(backend, KIMI)
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
    """The tokens of tiktoken.model and their ranks, which are their ids. Raises CheckpointError for a corrupt file."""
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
    """The tokens after the ranks by id: those that are stated, and reserved ones between them."""
    named = {int(key): value for key, value in stated.items()}
    last = max(named, default=first - 1)
    if min(named, default=first) < first or last >= first + _MOST_RESERVED:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has ids from {min(named)} to {last}; accepted "
            f"are {first} to {first + _MOST_RESERVED - 1}"
        )
    return {
        index: AddedToken(
            named[index]["content"] if index in named else f"<|reserved_token_{index}|>",
            normalized=False,
            special=index not in named or bool(named[index].get("special")),
        )
        for index in range(first, last + 1)
    }
