"""Tokens beside tokenizer.json against transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxllm.errors import CheckpointError
from jaxllm.text.tokenizer import load_tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = {"eos_token": "</s>"}
TEXT = "a <tool>b</tool> <s>c<image> d<more></s>"


def write(path: Path, config: dict[str, Any], /, **files: Any) -> Path:
    """A tokenizer whose tokenizer.json has `<s>` as special, and `</s>` as an added token that is not."""
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*LETTERS, "<s>", "</s>"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([AddedToken("</s>", normalized=False)])
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    for name, value in ({"tokenizer_config": config} | files).items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an eos token that tokenizer.json has as ordinary": (EOS, {}),
    "no eos token": ({}, {}),
    "added_tokens.json": (EOS, {"added_tokens": {"<tool>": 258, "</tool>": 259}}),
    "added_tokens.json with a special one": (
        EOS | {"extra_special_tokens": ["</tool>"]}, {"added_tokens": {"</tool>": 259, "<tool>": 258}},
    ),
    "added_tokens_decoder": (
        EOS
        | {
            "added_tokens_decoder": {
                "259": {"content": "</tool>", "special": False},
                "258": {"content": "<tool>", "special": True, "lstrip": True},
                "257": {"content": "</s>", "special": False, "normalized": False},
            }
        },
        {"added_tokens": {"<image>": 260}},
    ),
    "extra_special_tokens, a list": (EOS | {"extra_special_tokens": ["<image>", "<more>"]}, {}),
    "additional_special_tokens": (EOS | {"additional_special_tokens": ["<image>", "<more>"]}, {}),
    "extra_special_tokens by name": (EOS | {"extra_special_tokens": {"image_token": "<image>"}}, {}),
    "special tokens that tokenizer.json lacks": (EOS | {"pad_token": "<more>", "boi_token": "<image>"}, {}),
    "special_tokens_map.json": ({}, {"special_tokens_map": {"eos_token": {"content": "</s>", "lstrip": False}}}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    config, files = CASES[case]
    ours, theirs = (
        load_tokenizer(write(tmp_path, config, **files)),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
    )
    ids = theirs.encode(TEXT, add_special_tokens=False)
    assert ours.encode(TEXT, add_special_tokens=False) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.vocab_size == len(theirs)
    template = "{{ image_token }}|{{ eos_token }}|{{ boi_token }}|{{ messages[0].content }}"
    messages = [{"role": "user", "content": "hi"}]
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert ours.apply_chat_template(messages, chat_template=template) == expected
    ours.close()


def test_names_of_extra_tokens_do_not_replace_the_conversation(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, {"extra_special_tokens": {"messages": "x", "template": "y"}}))
    values = tokenizer.chat_template_values([{"role": "user", "content": "hi"}], chat_template="t")
    assert (values["messages"], values["template"]) == ([{"role": "user", "content": "hi"}], "t")


def test_tokens_without_a_row_in_the_model_are_left_out(tmp_path):
    """transformers adds them all; the model has no embedding for them, and a grammar's vocabulary no place."""
    config = EOS | {"pad_token": "<more>", "extra_special_tokens": ["<image>"]}
    files = {"added_tokens": {"<tool>": 258, "</tool>": 259}, "config": {"vocab_size": 261}}
    tokenizer = load_tokenizer(write(tmp_path, config, **files))
    ids = [tokenizer.backend.token_to_id(token) for token in ("<tool>", "</tool>", "<more>", "<image>")]
    assert ids == [258, 259, 260, None]
    assert tokenizer.vocab_size == 261


@pytest.mark.parametrize(
    ("config", "files", "says"),
    [
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, {}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": {"1": {"content": 5}}}, {}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": []}, {}, "added_tokens_decoder is"),
        ({"extra_special_tokens": [5]}, {}, "extra_special_tokens is"),
        ({"extra_special_tokens": {"a": 5}}, {}, "extra_special_tokens is"),
        ({}, {"added_tokens": {"a": "1"}}, "added_tokens.json is"),
    ],
)
def test_what_is_no_token_is_refused(config, files, says, tmp_path):
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(write(tmp_path, config, **files))
