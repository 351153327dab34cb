"""BERT's tokenizer out of GGUF metadata against the one that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from jaxllm.errors import CheckpointError
from jaxllm.text.tokenizer import load_tokenizer

TOKENS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "paris", "play", "##ing", "##s", "e", "##t", "!", "中", "a"]
TEXTS = ["Paris plays!", "été 中中 playing", "", "a [SEP] unknown", "PLAYINGS"]


def original(lowercase: bool, tokens: list[str]) -> Tokenizer:
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return backend


def stored(token: str, *, newer: bool) -> str:
    """As llama.cpp's scripts write a token; since 2025 the words in brackets that are no special tokens as others."""
    if token.startswith("[") and not (newer and token == "[unused0]"):
        return token
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def write(path: Path, tokens: list[str], *, newer: bool = True, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list([stored(token, newer=newer) for token in tokens])
    writer.add_token_types([3 if token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") else 1 for token in tokens])
    for key, value in keys.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("cased", [True, False])
def test_tokens_and_types_are_those_of_the_original(tmp_path: Path, newer: bool, cased: bool):
    tokens = [*TOKENS, "Paris"] if cased else TOKENS
    file = write(tmp_path / "model.gguf", tokens, newer=newer, cls=3, seperator=4, unknown=2, padding=0)
    ours, theirs = load_tokenizer(file, cache_dir=tmp_path / "kept"), original(not cased, tokens)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
    ids, second = ours.encode_pair("paris", "plays !")
    pair = theirs.encode("paris", "plays !")
    assert (ids, second) == (pair.ids, pair.type_ids.index(1))
    assert ours.decode(ours.encode("Playings paris!")) == ("playings paris!" if not cased else ["[UNK]", "paris!"][1])


def test_what_a_file_may_lack(tmp_path: Path):
    ours = load_tokenizer(write(tmp_path / "plain.gguf", TOKENS), cache_dir=tmp_path / "kept")
    assert ours.encode("paris") == [3, 5, 4]
    with pytest.raises(CheckpointError, match=r"has no tokenizer.ggml.cls_token_id, and no token \[CLS\]"):
        load_tokenizer(write(tmp_path / "a.gguf", [t for t in TOKENS if t != "[CLS]"]), cache_dir=tmp_path / "kept")
    with pytest.raises(CheckpointError, match="seperator_token_id is 99; accepted is less than 14"):
        load_tokenizer(write(tmp_path / "b.gguf", TOKENS, seperator=99), cache_dir=tmp_path / "kept")
    with pytest.raises(CheckpointError, match="has a token twice"):
        load_tokenizer(write(tmp_path / "c.gguf", [*TOKENS, "paris"]), cache_dir=tmp_path / "kept")
