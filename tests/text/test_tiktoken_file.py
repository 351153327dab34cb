"""Kimi's tokenizer out of tiktoken.model, against what tiktoken itself made of texts (kimi_tokens.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.text.tokenizer import Tokenizer, has_chat_template, load_tokenizer

KNOWN = json.loads(Path(__file__).with_name("kimi_tokens.json").read_text(encoding="utf-8"))
FIRST = len(KNOWN["tokens"])
"""The id of the first token behind the ranks."""
ADDED = {
    FIRST: ("[BOS]", True),
    FIRST + 1: ("[EOS]", True),
    FIRST + 3: ("<|im_end|>", True),
    FIRST + 5: ("<|tool_calls_section_begin|>", False),
}
CONFIG: dict[str, Any] = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "added_tokens_decoder": {
        str(index): {"content": text, "special": special, "normalized": False}
        for index, (text, special) in ADDED.items()
    },
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}


def write(folder: Path, lines: list[str] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{token} {rank}" for rank, token in enumerate(KNOWN["tokens"])] if lines is None else lines
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture
def kimi(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(write(tmp_path / "kimi"), cache_dir=tmp_path / "kept")


def test_tokens_are_tiktokens(kimi: Tokenizer) -> None:
    differing = [text for text, ids in KNOWN["cases"] if kimi.encode(text) != ids]
    assert len(KNOWN["cases"]) > 300 and differing == []
    assert [text for text, ids in KNOWN["cases"] if kimi.decode(ids) != text] == []


def test_added_tokens_have_their_ids_and_reserved_ones_lie_between_them(kimi: Tokenizer) -> None:
    assert kimi.encode("a<|im_end|>[BOS]")[1:] == [FIRST + 3, FIRST]
    assert kimi.encode(f"<|reserved_token_{FIRST + 2}|><|reserved_token_{FIRST + 4}|>") == [FIRST + 2, FIRST + 4]
    assert kimi.vocab_size == FIRST + 6
    assert (kimi.bos_token_id, kimi.eos_token_ids) == (FIRST, [FIRST + 1])
    assert kimi.decode([FIRST + 1, FIRST + 2, FIRST + 5]) == "<|tool_calls_section_begin|>"


def test_the_other_files_of_the_folder_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "kimi")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": FIRST + 3}))
    assert not has_chat_template(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    loaded = load_tokenizer(folder, cache_dir=tmp_path / "kept")
    assert loaded.eos_token_ids == [FIRST + 1, FIRST + 3]
    assert loaded.chat_template is not None and has_chat_template(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert load_tokenizer(folder, cache_dir=tmp_path / "kept").chat_template == "of the processor"


def test_it_is_converted_once(tmp_path: Path) -> None:
    folder, kept = write(tmp_path / "kimi"), tmp_path / "kept"
    load_tokenizer(folder, cache_dir=kept)
    (made,) = kept.iterdir()
    before = (made / "tokenizer.json").stat().st_mtime_ns
    load_tokenizer(folder, cache_dir=kept)
    assert (made / "tokenizer.json").stat().st_mtime_ns == before
    write(folder, bos_token="[EOS]")
    load_tokenizer(folder, cache_dir=kept)
    assert len(list(kept.iterdir())) == 2


LINES = [f"{token} {rank}" for rank, token in enumerate(KNOWN["tokens"])]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["AA== 0", "x"], "tiktoken.model, line 2: 'x'; accepted is a new token of up to 1024 bytes in base64"),
        (["AA== 0", "AQ== -1"], "line 2: 'AQ== -1'; accepted is"),
        (["AA== 0", "AA== 1"], "line 2: 'AA== 1'; accepted is a new token"),
        (["AA== 0", "AQ== 2"], "ranks are not 0 to 1, each once"),
        (LINES[1:], "ranks are not 0 to"),
        (["AA== 0", "AQ== 1"], "has no token of the byte 0x02 alone"),
    ],
)
def test_a_corrupt_file_is_refused(lines: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(write(tmp_path / "kimi", lines), cache_dir=tmp_path / "kept")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}},
            "which is 'tokenization_qwen.*known",
        ),
        ({"auto_map": None}, "which is None; known is what tokenization_kimi and tokenization_moonshot do"),
        ({"added_tokens_decoder": {"3": {"content": "x"}}}, "has ids from 3 to 3; accepted are"),
        ({"added_tokens_decoder": {str(FIRST): {"content": "a"}}}, r"token 'a' is \d+ too"),
    ],
)
def test_what_the_config_may_not_say(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(write(tmp_path / "kimi", **changes), cache_dir=tmp_path / "kept")


def test_code_of_the_hub_may_have_its_repositorys_name(tmp_path: Path) -> None:
    named = {"AutoTokenizer": "moonshotai/Moonlight-16B-A3B--tokenization_moonshot.TikTokenTokenizer"}
    loaded = load_tokenizer(write(tmp_path / "kimi", auto_map=named), cache_dir=tmp_path / "kept")
    assert loaded.encode("[BOS]") == [FIRST]


def test_tiktoken_itself_says_the_same_of_more_texts(kimi: Tokenizer) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed; kimi_tokens.json has its answers")
    import base64

    from tests.text.make_kimi_tokens import PATTERN
    from tests.text.odd_texts import odd_texts

    ranks = {base64.b64decode(token): rank for rank, token in enumerate(KNOWN["tokens"])}
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    texts = odd_texts(3000, seed=1)
    assert [text for text in texts if kimi.encode(text) != encoding.encode_ordinary(text)] == []
