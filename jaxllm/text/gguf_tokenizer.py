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

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.errors import CheckpointError
from jaxllm.folders import make_once
from jaxllm.text.backend import rust_errors
from jaxllm.text.gguf_encoders import FIRST, LAST, around_texts, special_token, unigram, word_pieces
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
