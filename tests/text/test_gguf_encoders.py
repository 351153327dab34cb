"""Tokenizers of XLM-RoBERTa and RoBERTa out of GGUF metadata against transformers' own."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from jaxllm.errors import CheckpointError
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.odd_texts import CHOSEN, odd_texts

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
TEXTS = [*odd_texts(400), "a <mask> b", "a<mask>b", " x </s>y ", "<s><pad>"]
CHARSMAP = base64.b64decode(
    "AAQAAAAgAAAJCQAACgUAAAEAAIDMDAIADRkAAIEFAAAUAACAoC0AAAsAAICAPAIAAAAAgIk9AACgCQAAixUAAAkAAICABAIAgEkA"
    "ALEFAAADAACAgQkAAL1xAAARAACAkWEAAIjsAgAPAACAGwAAAJHYAgAdAAAAHAAAAB8AAAAeAAAArNQCACAAAAAjAAAAIgAAACUA"
    "AAAkAAAAJwAAAKH5AAApAAAAKAAAACsAAAAqAAAALQAAACwAAAAvAAAALgAAALzYAgAwAAAAMwAAADIAAAA1AAAANAAAADcAAAA2"
    "AAAAOQAAADgAAAA7AAAAOgAAAD0AAAA8AAAAPwAAAD4AAABBAAAAQAAAAEMAAABCAAAARQAAAEQAAABHAAAARgAAAEkAAABIAAAA"
    "SwAAAEoAAABNAAAATAAAAE8AAABOAAAAUQAAAFAAAABTAAAAUgAAAFUAAABUAAAAVwAAAFYAAABZAAAAWAAAAFsAAABaAAAAXQAA"
    "AFwAAABfAAAAXgAAAGEAAABgAAAAYwAAAGIAAABlAAAAZAAAAGcAAABmAAAAaQAAAGgAAABrAAAAagAAAG0AAABllAIAbwAAAG4A"
    "AABxAAAAcAAAAHMAAAByAAAAdQAAAHQAAAB3AAAAdgAAAHkAAAB4AAAAewAAAHoAAAB9AAAAfAAAAH8AAAB+AAAAgQAAAIAAAACD"
    "AAAAggAAAIUAAACEAAAAhwAAAIYAAACJAAAAiAAAAIsAAACKAAAAjQAAAIwAAACPAAAAjgAAAJEAAACQAAAAkwAAAJIAAACVAAAA"
    "lAAAAJcAAACWAAAAmQAAAJgAAACbAAAAmgAAAJ0AAACcAAAAnwAAAJ4AAAChAAAAoAAAAKMAAACiAAAApQAAAKQAAACnAAAApgAA"
    "AKkAAACoAAAAqwAAAKoAAACtAAAArAAAAK8AAACuAAAAsQAAALAAAACzAAAAsgAAALUAAAC0AAAAtwAAALYAAAC5AAAAuAAAALsA"
    "AAC6AAAAvQAAALwAAAC/AAAAvgAAAMEAAADAAAAAwwAAAMIAAADFAAAAxAAAAMcAAADGAAAAyQAAAMgAAADCiAEAygAAAM0AAADM"
    "AAAAzwAAAM4AAADRAAAA0AAAANMAAADSAAAA1QAAANQAAADXAAAA1gAAANkAAADYAAAA2wAAANoAAADdAAAA3AAAAN8AAADeAAAA"
    "4QAAAOAAAADjAAAA4gAAAOUAAADkAAAA5wAAAO+sAQDpAAAA6AAAAOKAAQDj7AEA7QAAAOwAAADvAAAA7gAAAPEAAADwAAAA8wAA"
    "APIAAAD1AAAA9AAAAPcAAAD2AAAA+QAAAPgAAAD7AAAA+gAAAP0AAAD8AAAA/wAAAP4AAAAAIAAo5qCqKQAxADEvMgBBAGZpAMOp"
    "AA=="
)
"""SentencePiece's form of some rules: full-width letters, ligatures, wide spaces and such become plain ones."""


def pieces() -> list[tuple[str, float]]:
    """A vocabulary as XLM-RoBERTa's: specials, pieces with the logarithms of their probabilities, the mask."""
    rng = random.Random(0)
    words = [f"\u2581{word}" for text in CHOSEN for word in text.split() if not word.startswith("<")]
    spans = [sorted(rng.sample(range(len(word) + 1), 2)) for word in words for _ in range(4)]
    cuts = [word[a:b] for word, (a, b) in zip([word for word in words for _ in range(4)], spans, strict=True)]
    known = dict.fromkeys(["\u2581", *(c for word in words for c in word), *cuts, "fi", "A1", "\u2581A"])
    known = {piece: None for index, piece in enumerate(known) if index % 9 or piece == "\u2581"}  # some are unknown
    specials = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    return [*specials, *((piece, rng.uniform(-12, -2)) for piece in known if piece), ("<mask>", 0.0)]


def write_unigram(path: Path, types: dict[str, int] | None = None, architecture: str = "bert", **keys: Any) -> Path:
    kinds = {"<s>": CONTROL, "<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN, "<mask>": CONTROL} | (types or {})
    stored = pieces()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _ in stored])
    writer.add_token_scores([score for _, score in stored])
    writer.add_token_types([kinds.get(piece, NORMAL) for piece, _ in stored])
    writer.add_add_space_prefix(keys.pop("add_space_prefix", True))
    writer.add_remove_extra_whitespaces(keys.pop("remove_extra_whitespaces", True))
    if keys.pop("charsmap", True):
        writer.add_precompiled_charsmap(CHARSMAP)
    ids = {"bos": 0, "eos": 2, "unknown": 3, "seperator": 2, "padding": 1, "cls": 0, "mask": len(stored) - 1}
    for name, index in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    for name, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def mask_of(transformers: Any) -> Any:
    """As the published files have it."""
    return transformers.AddedToken("<mask>", lstrip=True, special=True)


def assert_equal(ours: Tokenizer, theirs: Any) -> None:
    def differs(text: str) -> bool:
        plain = ours.encode(text, add_special_tokens=False)
        return ours.encode(text) != theirs(text).input_ids or plain != theirs(text, add_special_tokens=False).input_ids

    assert [text for text in TEXTS if differs(text)] == []
    for text, other in zip(TEXTS, reversed(TEXTS), strict=True):
        ids, second = ours.encode_pair(text, other)
        assert (ids, second) == (theirs.backend_tokenizer.encode(text, other).ids, 0), (text, other)
        plain = ours.encode(text, add_special_tokens=False)
        assert ours.decode(plain) == theirs.backend_tokenizer.decode(plain), text


@pytest.mark.parametrize("charsmap", [True, False])
def test_xlm_roberta(tmp_path: Path, charsmap: bool) -> None:
    transformers = pytest.importorskip("transformers")
    file = write_unigram(tmp_path / "model.gguf", charsmap=charsmap)
    theirs = transformers.XLMRobertaTokenizer(
        vocab=pieces(), mask_token=mask_of(transformers), _spm_precompiled_charsmap=CHARSMAP if charsmap else None
    )
    assert_equal(load_tokenizer(file, cache_dir=tmp_path / "kept"), theirs)


def test_the_charsmap_changes_texts(tmp_path: Path) -> None:
    with_map, without = (
        load_tokenizer(write_unigram(tmp_path / f"{on}.gguf", charsmap=on), cache_dir=tmp_path / "kept")
        for on in (True, False)
    )
    assert with_map.encode("\uff21\uff11 \ufb01") == with_map.encode("A1 fi") != without.encode("\uff21\uff11 \ufb01")


def test_t5_has_an_end_and_no_beginning(tmp_path: Path) -> None:
    ours = load_tokenizer(write_unigram(tmp_path / "model.gguf", architecture="t5"), cache_dir=tmp_path / "kept")
    plain, other = (ours.encode(text, add_special_tokens=False) for text in ("Hello", "world"))
    assert ours.encode("Hello") == [*plain, 2]
    assert ours.encode_pair("Hello", "world")[0] == [*plain, 2, *other, 2]


def test_a_file_may_say_that_nothing_is_put_around_a_text(tmp_path: Path) -> None:
    file = write_unigram(tmp_path / "model.gguf", add_bos_token=False, add_eos_token=False)
    ours = load_tokenizer(file, cache_dir=tmp_path / "kept")
    assert ours.encode("Hello") == ours.encode("Hello", add_special_tokens=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"add_space_prefix": False}, "add_space_prefix is false; accepted is true"),
        ({"types": {"\u2581": BYTE}}, "stands for a byte; a 't5' tokenizer has none"),
        ({"types": {"<unk>": CONTROL}}, "token_type has no unknown token"),
    ],
)
def test_what_a_unigram_file_may_not_say(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(write_unigram(tmp_path / "model.gguf", **changes), cache_dir=tmp_path / "kept")


SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def bytes_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary as RoBERTa's, with merges learnt from the texts."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(list(CHOSEN) * 4, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def write_bytes(path: Path, pre: str, architecture: str, names: dict[str, str], **keys: bool) -> Path:
    vocabulary, merges = bytes_and_merges()
    tokens = [names.get(token, token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL] * len(SPECIALS) + [NORMAL] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    for name, index in {"bos": 0, "eos": 2, "unknown": 3, "seperator": 2, "padding": 1, "cls": 0, "mask": 4}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    for name, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("keys", [{}, {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}])
def test_roberta(tmp_path: Path, keys: dict[str, bool]) -> None:
    """Files of 2025 do not say that tokens are put around a text."""
    transformers = pytest.importorskip("transformers")
    vocabulary, merges = bytes_and_merges()
    file = write_bytes(tmp_path / "model.gguf", "roberta-bpe", "bert", {}, **keys)
    theirs = transformers.RobertaTokenizer(vocab=vocabulary, merges=merges, mask_token=mask_of(transformers))
    assert_equal(load_tokenizer(file, cache_dir=tmp_path / "kept"), theirs)


def test_modernbert_has_one_token_between_two_texts(tmp_path: Path) -> None:
    names = {"<s>": "[CLS]", "</s>": "[SEP]"}
    file = write_bytes(tmp_path / "model.gguf", "modern-bert", "modern-bert", names, add_bos_token=True)
    ours = load_tokenizer(file, cache_dir=tmp_path / "kept")
    a, b = (ours.encode(text, add_special_tokens=False) for text in ("Hello", "world"))
    assert ours.encode("Hello") == [0, *a, 2]
    assert ours.encode_pair("Hello", "world")[0] == [0, *a, 2, *b, 2]
