"""Tokenizers from GGUF metadata, written out as the files a Hugging Face directory has.

A GGUF stores vocabulary, scores or merges, and the *name* of the split regex (`tokenizer.ggml.pre`); normalizer, regex
and decoder are code in llama.cpp (src/llama-vocab.cpp), reproduced here as data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.errors import CheckpointError, rust_errors
from jaxllm.folders import make_once
from jaxllm.text.backend import split_to_bytes
from jaxllm.text.spellings import BLOOM, DEEPSEEK3, GPT2, GPT4O, KIMI, LLAMA3, QWEN2, QWEN35, SEED, TEKKEN
from jaxllm.weights.fields import FLAG, TEXT, FieldKind, FieldKinds, check_fields, many, real, shown, whole
from jaxllm.weights.gguf_file import read_header

_REVISION = 5  # part of the cache key: raise it whenever this file builds something different
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


class _Ends(NamedTuple):
    """The tokens around an encoder's text where a file names none; `doubled` means two between texts."""

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

_SPECIAL_TOKENS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
    "prefix_token": "fim_pre", "suffix_token": "fim_suf", "middle_token": "fim_mid",
}  # fmt: skip
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
        for name in (*_SPECIAL_TOKENS.values(), "eot", "eom", "cls", "seperator", "mask")
    },
    _TEMPLATE: TEXT,
}
_FIRST, _LAST = ("cls", "bos"), ("seperator", "eos")  # keys of the tokens around an encoder's text
_WORD, _PIECE = "\u2581", "##"
_PIECES_SPECIAL = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]"}  # usual tokens by their keys
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


class _Stored:
    """The tokenizer that the metadata of a file describe."""

    def __init__(self, path: Path):
        self.path = path
        self.metadata = read_header(path, skip=()).metadata
        check_fields(self.metadata, _FIELDS, f"{path}: ")
        self.tokens: list[str] = self.get("tokens")
        if not self.tokens:
            raise self.error("holds no tokenizer (tokenizer.ggml.tokens); name one with the tokenizer setting")
        self.kinds: list[int] = self.get("token_type") or [_NORMAL] * len(self.tokens)
        self.scores: list[float] | None = self.get("scores")
        for name, listed in (("token_type", self.kinds), ("scores", self.scores)):
            if listed is not None and len(listed) != len(self.tokens):
                raise self.error(f"tokenizer.ggml.{name} has {len(listed)} entries for {len(self.tokens)} tokens")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def of_kind(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def named(self, key: str) -> str | None:
        index = self.get(f"{key}_token_id")
        return self.tokens[index] if index is not None and index < len(self.tokens) else None

    @property
    def merges(self) -> list[tuple[str, str]]:
        return [self._merge(merge) for merge in self.get("merges", [])]

    def _merge(self, merge: str) -> tuple[str, str]:
        left, space, right = merge[1:].partition(" ")
        if not space:
            raise self.error(f"tokenizer.ggml.merges holds {shown(merge)}, which is no pair")
        return merge[0] + left, right

    def bpe(self, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
        with rust_errors(CheckpointError, f"{self.path}: the tokenizer's merges do not fit its vocabulary: "):
            return Tokenizer(models.BPE(vocab=self.vocabulary, merges=merges, **options))

    def over_characters(self, merges: list[tuple[str, str]]) -> Tokenizer:
        """BPE over characters, whose bytes stand for those that are no tokens."""
        unknown = next(iter(self.of_kind(_UNKNOWN)), None)
        return self.bpe(merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def write_gguf_tokenizer(path: Path, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json for the tokenizer of a GGUF file."""
    file = _Stored(path)
    backend, add_bos = _build(file)
    config: dict[str, Any] = {}
    if add_bos is not None:
        config = {
            "add_bos_token": file.get("add_bos_token", add_bos),
            "add_eos_token": file.get("add_eos_token", False),
        }
    config |= {name: token for name, key in _SPECIAL_TOKENS.items() if (token := file.named(key)) is not None}
    if templates := _chat_templates(file.metadata):
        config["chat_template"] = templates
    backend.save(str(directory / "tokenizer.json"), pretty=False)
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": _turn_ends(file)})


def _build(file: _Stored) -> tuple[Tokenizer, bool | None]:
    """The tokenizer, and whether a text begins with BOS where the file does not say; None where that is settled."""
    model = file.get("model")
    add_bos: bool | None = True
    if model == "llama":
        backend = _sentencepiece(file)
    elif model == "gpt2":
        backend, add_bos = _byte_level(file)
    elif model == "gemma4":
        backend = _gemma4(file)
    elif model == "bert":
        return _word_pieces(file), None
    elif model == "t5":
        backend, add_bos = _unigram(file), None
    else:
        supported = "'gpt2', 'llama', 'gemma4', 'bert' and 't5'"
        raise file.error(f"tokenizer.ggml.model is {shown(model)}; supported are {supported}")
    vocabulary = backend.get_vocab()
    special, mask = file.of_kind(_UNKNOWN, _CONTROL), file.named("mask")  # RoBERTa's mask takes the space before it
    plain = [token for token in file.of_kind(_USER_DEFINED) if token in vocabulary]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True, lstrip=token == mask) for token in special]
    )
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return backend, add_bos


def _byte_level(file: _Stored) -> tuple[Tokenizer, bool | None]:
    pre = file.get("pre")
    if pre not in _SPLITS:
        raise file.error(f"tokenizer.ggml.pre is {shown(pre)}; supported are {', '.join(sorted(_SPLITS))}")
    split = _SPLITS[pre]
    backend = file.bpe(file.merges, ignore_merges=split.whole_words)
    split_to_bytes(backend, *split.patterns)
    if (ends := split.ends) is None:
        return backend, split.add_bos
    first = _special_token(file, _FIRST, ends.first) if file.get("add_bos_token", True) else None
    last = _special_token(file, _LAST, ends.last) if file.get("add_eos_token", True) else None
    backend.post_processor = _around_texts(file, first, last, doubled=ends.doubled)
    return backend, None


def _sentencepiece(file: _Stored) -> Tokenizer:
    """BPE over characters with byte fallback; a space is written ▁, and llama.cpp puts one before each text.

    Gemma's runs of spaces are written with real ones: they are found in the text as it is, and no merge makes them.
    """
    ranks: Sequence[float]
    if str(file.metadata.get("general.architecture")).startswith("gemma"):
        ranks = list(range(len(file.tokens)))  # Gemma's scores do not follow its merge order; the token order does
    elif file.scores is None:
        raise file.error("a 'llama' tokenizer needs tokenizer.ggml.scores, which is missing")
    else:
        ranks = [-score for score in file.scores]
    backend = file.over_characters(_implied_merges(file, ranks))
    space = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(steps)
    return backend


def _gemma4(file: _Stored) -> Tokenizer:
    """Gemma's BPE over characters with merges that are listed. Nothing merges over the end of a run of newlines."""
    backend = file.over_characters(file.merges)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _implied_merges(file: _Stored, ranks: Sequence[float]) -> list[tuple[str, str]]:
    """The merge list of a SentencePiece vocabulary: every split of a token into two tokens, best rank first.

    'abc' with 'a', 'bc', 'ab', 'c' all in the vocabulary gives (ab, c) and (a, bc): longer left parts first.
    """
    found = []
    for token, rank in zip(file.tokens, ranks, strict=True):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in file.vocabulary and right in file.vocabulary:
                found.append((rank, -cut, -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in found]


def _unigram(file: _Stored) -> Tokenizer:
    """SentencePiece's unigrams, the likeliest cut of a text into pieces (Kudo 2018, arXiv:1804.10959).

    An encoder's texts begin with a token and end with one, of which there are two between texts; others end with one.
    """
    if file.scores is None:
        raise file.error("a 't5' tokenizer needs tokenizer.ggml.scores, which is missing")
    if not file.get("add_space_prefix", True):
        raise file.error("tokenizer.ggml.add_space_prefix is false; accepted is true in a 't5' tokenizer")
    if _BYTE in file.kinds:
        token = file.tokens[file.kinds.index(_BYTE)]
        raise file.error(f"token {shown(token)} stands for a byte; a 't5' tokenizer has none")
    if _UNKNOWN not in file.kinds:
        raise file.error("tokenizer.ggml.token_type has no unknown token, which a 't5' tokenizer needs")
    encodes = file.metadata.get("general.architecture") == "bert"
    first = _special_token(file, _FIRST, "<s>") if file.get("add_bos_token", encodes) else None
    last = _special_token(file, _LAST, "</s>") if file.get("add_eos_token", True) else None
    vocabulary = list(zip(file.tokens, map(float, file.scores), strict=True))
    with rust_errors(CheckpointError, f"{file.path}: the tokenizer: "):
        backend = Tokenizer(models.Unigram(vocabulary, unk_id=file.kinds.index(_UNKNOWN), byte_fallback=False))
        if charsmap := bytes(file.get("precompiled_charsmap") or ()):
            backend.normalizer = normalizers.Precompiled(charsmap)
        marked = pre_tokenizers.Metaspace(replacement=_WORD, prepend_scheme="always")
        words = [pre_tokenizers.WhitespaceSplit()] if file.get("remove_extra_whitespaces", True) else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*words, marked])
        backend.decoder = decoders.Metaspace(replacement=_WORD, prepend_scheme="always")
        backend.post_processor = _around_texts(file, first, last, doubled=first is not None)
    return backend


def _word_pieces(file: _Stored) -> Tokenizer:
    """BERT's pieces of words.

    llama.cpp stores the first piece of a word with a mark in front and what goes on a word as it is; here the others
    have ## in front. Whether letters are made small is not stored: they are unless the vocabulary has large ones.
    """
    file = copy(file)
    file.tokens = [_as_piece(token, kind) for token, kind in zip(file.tokens, file.kinds, strict=True)]
    if len(file.vocabulary) < len(file.tokens):
        raise file.error("tokenizer.ggml.tokens has a token twice")
    special = {name: _special_token(file, (name,), usual) for name, usual in _PIECES_SPECIAL.items()}
    cls, sep = special["cls"], special["seperator"]
    cased = any(token != token.lower() for token in file.tokens if not token.startswith("["))
    with rust_errors(CheckpointError, f"{file.path}: the tokenizer: "):
        backend = Tokenizer(models.WordPiece(vocab=file.vocabulary, unk_token=special["unknown"]))
        backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(token, file.vocabulary[token]) for token in (cls, sep)],
        )
        names = dict.fromkeys([*special.values(), *file.of_kind(_UNKNOWN, _CONTROL)])
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in names])
    return backend


def _as_piece(token: str, kind: int) -> str:
    if token.startswith(_WORD):
        return token.removeprefix(_WORD)
    in_brackets = token.startswith("[") and token.endswith("]")
    return token if in_brackets or kind in (_UNKNOWN, _CONTROL) else _PIECE + token


def _special_token(file: _Stored, keys: tuple[str, ...], usual: str) -> str:
    """The token that one of `keys` names, or the `usual` one where a file has no such key."""
    names = [f"{key}_token_id" for key in keys]
    name = next((name for name in names if file.get(name) is not None), None)
    if name is None:
        if usual not in file.tokens:
            listed = " or ".join(f"tokenizer.ggml.{name}" for name in names)
            raise file.error(f"has no {listed}, and no token {usual}")
        return usual
    if (index := file.get(name)) >= len(file.tokens):
        accepted = f"less than {len(file.tokens)}, the number of tokens"
        raise file.error(f"tokenizer.ggml.{name} is {index}; accepted is {accepted}")
    return file.tokens[index]


def _around_texts(file: _Stored, first: str | None, last: str | None, *, doubled: bool) -> Any:
    """`first` text `last`, and of two texts `first` text `last` other `last`; where `doubled`, the middle one twice."""
    before, after = [[token] if token is not None else [] for token in (first, last)]
    single = [*before, "$A", *after]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *(after if doubled else []), "$B", *after],
        special_tokens=[(token, file.vocabulary[token]) for token in {*before, *after}],
    )


def _chat_templates(metadata: dict[str, Any]) -> str | list[dict[str, str]] | None:
    default, prefix = metadata.get(_TEMPLATE), f"{_TEMPLATE}."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    check_fields(named, dict.fromkeys(named, TEXT), prefix)
    if not named:
        return default
    every = {"default": default, **named} if default else named
    return [{"name": name, "template": template} for name, template in every.items()]


def _turn_ends(file: _Stored) -> list[int]:
    """eos, eot and eom as the metadata name them, and the end-of-turn token that the chat template writes."""
    named = [file.get(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    template = str(file.metadata.get(_TEMPLATE, ""))
    written = [file.tokens.index(text) for text in _TURN_ENDS if text in template and text in file.tokens]
    found = [index for index in (*named, *written) if index is not None and index < len(file.tokens)]
    return list(dict.fromkeys(found))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
