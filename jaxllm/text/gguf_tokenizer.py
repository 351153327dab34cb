"""Tokenizers from GGUF metadata, written out as the files a Hugging Face directory has.

A GGUF stores vocabulary, scores or merges, and the *name* of the split regex (`tokenizer.ggml.pre`); normalizer, regex
and decoder are code in llama.cpp (src/llama-vocab.cpp), reproduced here as data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.errors import CheckpointError
from jaxllm.folders import make_once
from jaxllm.text.backend import rust_errors
from jaxllm.text.spellings import BLOOM, DEEPSEEK3, GPT2, GPT4O, KIMI, LLAMA3, QWEN2, QWEN35, SEED, TEKKEN
from jaxllm.weights.fields import FLAG, TEXT, FieldKind, FieldKinds, check_fields, many, real, shown, whole
from jaxllm.weights.gguf_file import GGUFHeader, read_header

_REVISION = 4  # part of the cache key: raise it whenever this file builds something different
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


class _Ends(NamedTuple):
    """What encoders have around a text where a file names no tokens; `doubled` says that two are between texts."""

    first: str
    last: str
    doubled: bool


class _Split(NamedTuple):
    """Regexes applied one after the other; `whole_words` looks a piece up before merging (BPE's ignore_merges)."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    ends: _Ends | None = None


_SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "mpt"), _Split((GPT2,))),
    "bloom": _Split((BLOOM,)),
    "roberta-bpe": _Split((GPT2,), ends=_Ends("<s>", "</s>", doubled=True)),
    "modern-bert": _Split((GPT2,), ends=_Ends("[CLS]", "[SEP]", doubled=False)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _Split((r"\p{N}", GPT2))),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2"), _Split((LLAMA3,), whole_words=True, add_bos=True)
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _Split((LLAMA3,))),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan"), _Split((QWEN2,))),
    "qwen35": _Split((QWEN35,)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Split((GPT4O,))),
    "kimi-k2": _Split((KIMI,), whole_words=True),
    "tekken": _Split((TEKKEN,), whole_words=True, add_bos=True),
    "seed-coder": _Split((SEED,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _Split((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3))),
}

_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATE = "tokenizer.chat_template"
_TOKEN = FieldKind("a string of up to 4096 characters", lambda value: isinstance(value, str) and len(value) <= 4096)
_FIELDS: FieldKinds = {
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.tokens": many(_TOKEN, 2**24),
    "tokenizer.ggml.scores": many(real(-1e38, 1e38), 2**24),
    "tokenizer.ggml.token_type": many(whole(0, 2**10), 2**24),
    "tokenizer.ggml.merges": many(TEXT, 2**24),
    "tokenizer.ggml.add_bos_token": FLAG,
    "tokenizer.ggml.add_eos_token": FLAG,
    "tokenizer.ggml.add_space_prefix": FLAG,
    "tokenizer.ggml.remove_extra_whitespaces": FLAG,
    "tokenizer.ggml.precompiled_charsmap": many(whole(0, 255), 2**24),
    **{
        f"tokenizer.ggml.{name}_token_id": whole(0, 2**32 - 1)
        for name in ("bos", "eos", "unknown", "padding", "eot", "eom", "cls", "seperator", "mask")
    },
    _TEMPLATE: TEXT,
}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>")


def cached_gguf_tokenizer(path: Path, cache_dir: Path) -> Path:
    """The directory that holds this GGUF's tokenizer files, built on the first call.

    The key is a hash of the metadata, so copies of a file share it and an edited file gets its own.
    Raises CheckpointError when the file has no tokenizer, or one that jaxllm cannot reproduce exactly.
    """
    header = read_header(path)
    target = cache_dir / f"{header.digest[:32]}-{_REVISION}"
    make_once(target, partial(write_gguf_tokenizer, path))
    return target


def write_gguf_tokenizer(path: Path, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json for the tokenizer of a GGUF file."""
    header = read_header(path, skip=())
    metadata = header.metadata
    check_fields(metadata, _FIELDS, f"{path}: ")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(
            f"{path}: holds no tokenizer (tokenizer.ggml.tokens); name one with the tokenizer setting"
        )
    backend, add_bos = _build(path, header, tokens)
    config: dict[str, Any] = {}
    if add_bos is not None:
        config = {
            "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
            "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        }
    for name, key in _SPECIAL_TOKENS.items():
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None and token_id < len(tokens):
            config[name] = tokens[token_id]
    if templates := _chat_templates(metadata):
        config["chat_template"] = templates
    backend.save(str(directory / "tokenizer.json"), pretty=False)
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": _turn_ends(metadata, tokens)})


def _build(path: Path, header: GGUFHeader, tokens: list[str]) -> tuple[Tokenizer, bool | None]:
    """The tokenizer, and whether a text begins with BOS where the file does not say; None where that is settled."""
    model = header.metadata.get("tokenizer.ggml.model")
    kinds = header.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    scores = header.metadata.get("tokenizer.ggml.scores")
    for name, listed in (("token_type", kinds), ("scores", scores)):
        if listed is not None and len(listed) != len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{name} has {len(listed)} entries for {len(tokens)} tokens")
    add_bos: bool | None = True
    if model == "llama":
        backend = _sentencepiece(path, header.metadata, tokens, kinds)
    elif model == "gpt2":
        backend, add_bos = _byte_level(path, header.metadata, tokens)
    elif model == "gemma4":
        backend = _gemma4(path, header.metadata, tokens, kinds)
    elif model == "bert":
        return word_pieces(path, header.metadata, tokens, kinds), None
    elif model == "t5":
        backend, add_bos = unigram(path, header.metadata, tokens, kinds), None
    else:
        supported = "'gpt2', 'llama', 'gemma4', 'bert' and 't5'"
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {shown(model)}; supported are {supported}")
    vocabulary = backend.get_vocab()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    plain = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED and token in vocabulary]
    mask = header.metadata.get("tokenizer.ggml.mask_token_id", len(tokens))
    masks = tokens[mask : mask + 1]  # RoBERTa's takes the space before it
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True, lstrip=token in masks) for token in special]
    )
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return backend, add_bos


def _byte_level(path: Path, metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool | None]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise CheckpointError(f"{path}: tokenizer.ggml.pre is {shown(pre)}; supported are {', '.join(sorted(_SPLITS))}")
    split = _SPLITS[pre]
    merges = [_merge(path, merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(_bpe(path, vocabulary, merges, ignore_merges=split.whole_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    if split.ends is None:
        return backend, split.add_bos
    adds_first, adds_last = (metadata.get(f"tokenizer.ggml.add_{end}_token", True) for end in ("bos", "eos"))
    first = special_token(path, metadata, tokens, FIRST, split.ends.first) if adds_first else None
    last = special_token(path, metadata, tokens, LAST, split.ends.last) if adds_last else None
    backend.post_processor = around_texts(first, last, doubled=split.ends.doubled, ids=vocabulary)
    return backend, None


def _merge(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge[1:].partition(" ")
    if not space:
        raise CheckpointError(f"{path}: tokenizer.ggml.merges holds {shown(merge)}, which is no pair")
    return merge[0] + left, right


def _sentencepiece(path: Path, metadata: dict[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """BPE over characters with byte fallback; a space is written ▁, and llama.cpp puts one before each text.

    Gemma's runs of spaces are written with real ones: they are found in the text as it is, and no merge makes them.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if str(metadata.get("general.architecture")).startswith("gemma"):
        ranks = list(range(len(tokens)))  # Gemma's scores do not follow its merge order; the token order does
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if scores is None:
            raise CheckpointError(f"{path}: a 'llama' tokenizer needs tokenizer.ggml.scores, which is missing")
        ranks = [-score for score in scores]
    backend = _over_characters(path, tokens, kinds, implied_merges(tokens, vocabulary, ranks))
    space = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(steps)
    return backend


def _gemma4(path: Path, metadata: dict[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Gemma's BPE over characters with merges that are listed. Nothing merges over the end of a run of newlines."""
    merges = [_merge(path, merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    backend = _over_characters(path, tokens, kinds, merges)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _over_characters(path: Path, tokens: list[str], kinds: list[int], merges: list[tuple[str, str]]) -> Tokenizer:
    """BPE over characters, whose bytes stand for those that are no tokens."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    return Tokenizer(_bpe(path, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))


def implied_merges(tokens: list[str], vocabulary: dict[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """The merge list of a SentencePiece vocabulary: every split of a token into two tokens, best rank first.

    'abc' with 'a', 'bc', 'ab', 'c' all in the vocabulary gives (ab, c) and (a, bc): longer left parts first.
    """
    found = []
    for token, rank in zip(tokens, ranks, strict=True):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((rank, -cut, -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in found]


def _bpe(path: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    with rust_errors(CheckpointError, f"{path}: the tokenizer's merges do not fit its vocabulary: "):
        return models.BPE(vocab=vocabulary, merges=merges, **options)


def _chat_templates(metadata: dict[str, Any]) -> str | list[dict[str, str]] | None:
    default, prefix = metadata.get(_TEMPLATE), f"{_TEMPLATE}."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    check_fields(named, dict.fromkeys(named, TEXT), prefix)
    if not named:
        return default
    every = {"default": default, **named} if default else named
    return [{"name": name, "template": template} for name, template in every.items()]


def _turn_ends(metadata: dict[str, Any], tokens: list[str]) -> list[int]:
    """eos, eot and eom as the metadata name them, and the end-of-turn token that the chat template writes."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    template = str(metadata.get("tokenizer.chat_template", ""))
    written = [tokens.index(text) for text in _TURN_ENDS if text in template and text in tokens]
    return list(
        dict.fromkeys(token_id for token_id in (*named, *written) if token_id is not None and token_id < len(tokens))
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")


FIRST, LAST = ("cls", "bos"), ("seperator", "eos")
"""Keys of the two tokens, spelled as files have them; the first that is there counts."""
_WORD, _PIECE = "\u2581", "##"
_BYTE = 6
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
