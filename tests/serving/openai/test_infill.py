"""Prompts of models that fill in the middle, by the tokens of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from jaxllm.chat.infill import fim_prompt
from jaxllm.chat.prompt import ChatModel
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.serving.fake_engine import BOS, ByteTokenizer, FakeEngine
from tests.support.covers import covers
from tests.text.test_tokenizer import BYTES, byte_level_gguf, write_gguf

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def knowing(*tokens: str) -> FakeEngine:
    """An engine whose tokenizer has these tokens."""
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer()
    engine.tokenizer.backend.add_special_tokens(list(tokens))
    return engine


def spelled(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.backend.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (QWEN, "<s><|fim_prefix|>a(<|fim_suffix|>)b<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<s><fim_prefix>a(<fim_suffix>)b<fim_middle>"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<s><｜fim▁begin｜>a(<｜fim▁hole｜>)b<｜fim▁end｜>",
        ),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "<s>[SUFFIX])b[PREFIX]a("),
        (
            ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
            "<s><[fim-suffix]>)b<[fim-prefix]>a(<[fim-middle]>",
        ),
    ],
)
def test_each_family_has_its_own_order(tokens: tuple[str, ...], prompt: str) -> None:
    model = ChatModel(knowing(*tokens))
    assert spelled(model.tokenizer, fim_prompt(model, "a(", ")b").token_ids) == prompt


def test_other_files_come_before_it_as_far_as_there_is_room() -> None:
    model = ChatModel(knowing(*QWEN, "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"))
    files = [("one.py", "1" * 50), ("two.py", "22")]
    found = fim_prompt(model, "a", "b", files=files)
    rest = "<|file_sep|>two.py\n22<|file_sep|>file\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    whole = f"<s><|repo_name|>project\n<|file_sep|>one.py\n{'1' * 50}{rest}"
    assert spelled(model.tokenizer, found.token_ids) == whole
    assert sorted(found.stop_token_ids) == sorted(
        model.tokenizer.backend.token_to_id(token) for token in ("<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
    )
    cut = fim_prompt(model, "a", "b", files=files, room=len(found.token_ids) - 1)
    assert spelled(model.tokenizer, cut.token_ids) == f"<s><|repo_name|>project\n{rest}"
    plain = ChatModel(knowing(*QWEN))
    assert spelled(plain.tokenizer, fim_prompt(plain, "a", "b", files=files[1:]).token_ids) == (
        "<s>\n\n--- snippet ---\n\n22<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )


def test_the_tokens_that_a_gguf_file_names_win(tmp_path: Path) -> None:
    names = ("<s>", "</s>", *QWEN, "[p]", "[s]", "[m]")
    first = len(BYTES) + 2
    ids = {f"tokenizer.ggml.fim_{key}_token_id": first + 5 + at for at, key in enumerate(("pre", "suf", "mid"))}

    def with_ids(path: Path, ids: dict[str, int]) -> Tokenizer:
        return load_tokenizer(byte_level_gguf(path, names, numbers=ids), cache_dir=tmp_path)

    engine = FakeEngine()
    for tokenizer, prompt in (
        (with_ids(tmp_path / "plain.gguf", {}), "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (with_ids(tmp_path / "named.gguf", ids), "[p]a[s]b[m]"),
    ):
        engine.tokenizer = tokenizer
        assert spelled(tokenizer, fim_prompt(ChatModel(engine), "a", "b").token_ids) == prompt


def test_no_space_is_put_before_a_suffix(tmp_path: Path) -> None:
    """SentencePiece puts one before each text; CodeLlama was trained with one before the prefix alone."""
    special = ["<unk>", "<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    types = [2, 3, 3, 3, 3, 3, *[6] * 256, *[1] * 5]
    scores = [0.0] * (len(special) + 256) + [-9.0, -9.0, -9.0, -3.0, -3.0]
    path = write_gguf(
        tmp_path / "x.gguf", tokens=tokens, types=types, scores=scores, model="llama", pre="default", bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    engine = FakeEngine()
    engine.tokenizer = load_tokenizer(path, cache_dir=tmp_path)
    found = fim_prompt(ChatModel(engine), "a", "b").token_ids
    assert [tokens[token] for token in found] == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "b", "▁<MID>"]


def test_a_model_without_the_tokens_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="input_suffix is set, but this model's tokenizer has no tokens"):
        fim_prompt(ChatModel(FakeEngine()), "a", "b", fields=(Field("input_prefix"), Field("input_suffix")))


@covers("CompletionRequest", "suffix")
def test_completions_take_a_suffix(make_client, client: TestClient, engine: FakeEngine) -> None:
    knows = knowing(*QWEN, "<|file_sep|>")
    asked = make_client(knows)
    body = {"prompt": ["a", "b"], "suffix": "c", "max_tokens": 4}
    assert asked.post("/v1/completions", json=body).status_code == 200
    prefix, suffix, middle, stop = (knows.tokenizer.backend.token_to_id(token) for token in (*QWEN, "<|file_sep|>"))
    assert [ids for ids, _, _ in knows.seen] == [[BOS, prefix, byte, suffix, 99, middle] for byte in b"ab"]
    assert [params.stop_token_ids for _, params, _ in knows.seen] == [(stop,), (stop,)]
    for wrong in ({"echo": True}, {"prompt": [1, 2]}):
        response = asked.post("/v1/completions", json=body | wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 400 and "no tokens for filling in the middle" in refused.text
    assert client.post("/v1/completions", json=body | {"suffix": ""}).status_code == 200
    assert [ids for ids, _, _ in engine.seen] == [[BOS, 97], [BOS, 98]]
