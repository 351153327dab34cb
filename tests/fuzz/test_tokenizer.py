"""tokenizer.json and the files beside it: loaded, and a text encoded and decoded."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.errors import CheckpointError, InvalidRequestError
from jaxllm.text.tokenizer import load_tokenizer
from tests.fuzz.harness import COUNTS, check_message, fuzz
from tests.fuzz.mutants import json_bytes, mutate_json, pick

TEXT = "ab a é 12 世界 </s>"


def byte_level() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(3)
    backend.enable_padding()
    return backend


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("a", -2.0), ("b", -2.0), ("▁ab", -3.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Prepend("▁")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "<s>": 3, "</s>": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("</s>", 4), ("<s>", 3))
    return backend


def without_most_of_the_vocabulary(backend: Tokenizer) -> dict[str, Any]:
    """As JSON; a full byte alphabet would take most mutations."""
    value = json.loads(backend.to_str())
    vocabulary = value["model"]["vocab"]
    if isinstance(vocabulary, dict) and len(vocabulary) > 20:
        value["model"]["vocab"] = {t: i for t, i in vocabulary.items() if t in "abĠ12éÃ©" or len(t) > 1}
    return value


TOKENIZERS = [without_most_of_the_vocabulary(make()) for make in (byte_level, unigram, word_piece)]
CONFIG = {
    "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "model_max_length": 1e30,
    "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": "{{ messages[0].content }}",
    "additional_special_tokens": ["</s>"],
}  # fmt: skip
NAMED = CONFIG | {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}


def use(path) -> None:
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode(TEXT))
    tokenizer.encode_pair("a", TEXT)
    if tokenizer.chat_template is not None:
        assert isinstance(tokenizer.chat_template_values([{"content": ""}])["template"], str)


@COUNTS
def test_a_tokenizer_json_is_used_or_refused(count, tmp_path):
    def attempt(rng: np.random.Generator) -> None:
        valid = pick(rng, *TOKENIZERS)
        (tmp_path / "tokenizer.json").write_bytes(json_bytes(rng, mutate_json(rng, valid)))
        if rng.integers(2):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
        else:
            (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        use(tmp_path)

    refused = fuzz(count, attempt)
    assert count / 4 < refused < count


@COUNTS
def test_the_files_beside_it_are_used_or_refused(count, tmp_path):
    word_piece().save(str(tmp_path / "tokenizer.json"))
    valid = {
        "tokenizer_config.json": CONFIG, "special_tokens_map.json": {"bos_token": "<s>", "unk_token": {"content": "a"}},
        "generation_config.json": {"eos_token_id": [256, 257]}, "config.json": {"eos_token_id": 256},
    }  # fmt: skip

    def attempt(rng: np.random.Generator) -> None:
        name = pick(rng, *valid)
        before = NAMED if name == "tokenizer_config.json" and rng.integers(2) else valid[name]
        (tmp_path / name).write_bytes(json_bytes(rng, mutate_json(rng, before)))
        use(tmp_path)
        (tmp_path / name).unlink()

    assert 0 < fuzz(count, attempt) < count


def saved(path, **changes):
    (path / "tokenizer.json").write_text(json.dumps(json.loads(byte_level().to_str()) | changes))
    return path


def test_replacements_that_double_a_text_again_and_again(tmp_path):
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    saved(tmp_path, normalizer={"type": "Sequence", "normalizers": [doubling] * 40})
    with pytest.raises(CheckpointError, match=r"normalizer makes texts up to 1\.1e\+12 times longer; accepted is 4096"):
        load_tokenizer(tmp_path)


def test_a_file_on_which_the_rust_code_panics(tmp_path, capfd):
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    saved(tmp_path, post_processor=template | {"single": [{"SpecialToken": {"id": "<gone>", "type_id": 0}}]})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: ") as caught:
        load_tokenizer(tmp_path)
    check_message(str(caught.value))


def test_a_text_on_which_the_rust_code_panics_fails_alone(tmp_path, capfd):
    split = {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_tokenizer(saved(tmp_path, pre_tokenizer=split))
    with pytest.raises(InvalidRequestError, match=r"the tokenizer fails on this text: .*retry-limit"):
        tokenizer.encode("a" * 200 + "b")
    with pytest.raises(InvalidRequestError, match="the tokenizer fails on this text"):
        tokenizer.encode_pair("b", "a" * 200 + "b")
    assert tokenizer.encode("b")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chat_template": 5}, "chat_template is 5; accepted is a string"),
        ({"chat_template": [{"name": "x"}]}, "chat_template is [{'name': 'x'}]; accepted is"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; accepted is true or false"),
        ({"add_bos_token": True, "bos_token": "<gone>"}, "bos_token is '<gone>', which is not in the vocabulary"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(config, says, tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    check_message(str(caught.value))
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_refused(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level().save(str(folder / "tokenizer.json"))
    (tmp_path / name).write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="leads out of the model's folder"):
        load_tokenizer(folder)


def test_a_vocabulary_of_long_tokens_takes_no_time(tmp_path):
    """Every split of a SentencePiece token is looked up, which is quadratic in its length."""
    from tests.fuzz.test_gguf import write_tokenizer

    tokens = ["<unk>", "a", "a" * 200_000]
    path = tmp_path / "long.gguf"
    write_tokenizer(path, model="llama", tokens=tokens, scores=[0.0] * 3, token_type=[2, 1, 1])
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens is .*up to 4096 characters"):
        load_tokenizer(path, cache_dir=tmp_path)
    assert time.perf_counter() - began < 20
