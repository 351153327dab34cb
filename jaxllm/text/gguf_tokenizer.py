"""Tokenizers from GGUF metadata, written out as the files a Hugging Face directory has.

A GGUF stores vocabulary, scores or merges, and the *name* of the split regex (`tokenizer.ggml.pre`); normalizer, regex
and decoder are code in llama.cpp (src/llama-vocab.cpp), reproduced here as data.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.errors import CheckpointError
from jaxllm.text.backend import rust_errors
from jaxllm.weights.fields import FLAG, TEXT, FieldKind, FieldKinds, check_fields, many, real, shown, whole
from jaxllm.weights.gguf_header import GGUFHeader, read_header

_REVISION = 2  # part of the cache key: raise it whenever this file builds something different
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


class _Split(NamedTuple):
    """Regexes applied one after the other; `whole_words` looks a piece up before merging (BPE's ignore_merges)."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4"), _Split((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _Split((r"\p{N}", _GPT2))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _Split((_LLAMA3,), whole_words=True, add_bos=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), _Split((_QWEN2,))),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Split((_GPT4O,))),
    "tekken": _Split((_TEKKEN,), whole_words=True, add_bos=True),
    "seed-coder": _Split((_SEED,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _Split((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))),
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
    **{
        f"tokenizer.ggml.{name}_token_id": whole(0, 2**32 - 1)
        for name in ("bos", "eos", "unknown", "padding", "eot", "eom")
    },
    _TEMPLATE: TEXT,
}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


def cached_gguf_tokenizer(path: Path, cache_dir: Path) -> Path:
    """The directory that holds this GGUF's tokenizer files, built on the first call.

    The key is a hash of the metadata, so copies of a file share it and an edited file gets its own.
    Raises CheckpointError when the file has no tokenizer, or one that jaxllm cannot reproduce exactly.
    """
    header = read_header(path)
    target = cache_dir / f"{header.digest[:32]}-{_REVISION}"
    if not target.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=cache_dir, prefix=".building-"))
        try:
            write_gguf_tokenizer(path, building)
            building.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
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
    config: dict[str, Any] = {
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


def _build(path: Path, header: GGUFHeader, tokens: list[str]) -> tuple[Tokenizer, bool]:
    model = header.metadata.get("tokenizer.ggml.model")
    kinds = header.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    scores = header.metadata.get("tokenizer.ggml.scores")
    for name, listed in (("token_type", kinds), ("scores", scores)):
        if listed is not None and len(listed) != len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{name} has {len(listed)} entries for {len(tokens)} tokens")
    if model == "llama":
        backend, add_bos = _sentencepiece(path, header.metadata, tokens, kinds), True
    elif model == "gpt2":
        backend, add_bos = _byte_level(path, header.metadata, tokens)
    else:
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {shown(model)}; supported are 'gpt2' and 'llama'")
    vocabulary = backend.get_vocab()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    plain = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED and token in vocabulary]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return backend, add_bos


def _byte_level(path: Path, metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
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
    return backend, split.add_bos


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
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    merges = implied_merges(tokens, vocabulary, ranks)
    backend = Tokenizer(_bpe(path, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(steps)
    return backend


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
