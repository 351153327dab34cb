"""Text that comes a token at a time, with the real models' tokenizers."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import load_tokenizer
from tests.weights.models import real_model

TEXTS = {
    "ascii": "The quick brown fox, jumped!  Over\n\n\ttwo lazy dogs; 3.14159 times.",
    "european": "Grüße aus Köln — Привет мир; ça coûte 5€, naïve façade",
    "indic and arabic": "नमस्ते दुनिया، مرحبا بالعالم สวัสดี",
    "cjk": "你好，世界。こんにちは 안녕하세요 𠜎𠜱𡿺",
    "emoji": "🤖👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 e\u0301 ①",
    "rare, spelled in bytes": "𓀀𓁐 ⸻ ꙮ 𒐫 ᚠᛇᚻ \x7f",
}
NAMES = ("smollm2-135m", "gemma3-270m")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: load_tokenizer(real_model(name)).backend for name in NAMES}


@pytest.fixture(params=NAMES)
def tokenizer(request, tokenizers) -> Tokenizer:
    return tokenizers[request.param]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TEXTS)
def test_deltas_add_up_to_the_text(tokenizer, name):
    text = TEXTS[name]
    detokenizer = Detokenizer(tokenizer, [])
    deltas = [detokenizer.add(token)[0] for token in encode(tokenizer, text)]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", TEXTS)
def test_after_any_prompt_the_text_goes_on_as_it_would(tokenizer, name):
    """Cut anywhere. A character that was cut is whole in what follows; nothing is lost, and nothing is there twice."""
    ids = encode(tokenizer, TEXTS[name])
    whole, settled = tokenizer.decode(ids), ""
    for cut in range(len(ids)):
        prompt = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        settled = prompt if "\ufffd" not in prompt and len(prompt) > len(settled) else settled
        detokenizer = Detokenizer(tokenizer, ids[:cut])
        text = "".join(detokenizer.add(token)[0] for token in ids[cut:])
        assert settled + text == whole


def test_the_prompts_part_of_a_cut_token_is_not_said_again(letters):
    """A token may have whole characters before the half one."""
    vocabulary = {"café": 0, "caf\u00c3": 1, "\u00a9": 2, "s": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "s"))
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(tokenizer, [3, 1])
    assert detokenizer.add(2)[0] + detokenizer.add(3)[0] == "és"


def test_a_character_is_shown_when_its_last_token_comes(tokenizer):
    ids = encode(tokenizer, "x𓀀y")
    detokenizer = Detokenizer(tokenizer, [])
    seen = ""
    for count, token in enumerate(ids, 1):
        seen += detokenizer.add(token)[0]
        assert seen == tokenizer.decode(ids[:count]).rstrip("\ufffd")
    assert len(ids) > 3, "the character should have taken several tokens"


def test_special_tokens_are_left_out_unless_asked_for(tokenizer):
    end = next(id for text in ("<|im_end|>", "<end_of_turn>") if (id := tokenizer.token_to_id(text)) is not None)
    ids = [*encode(tokenizer, "Hello"), end, *encode(tokenizer, " there")]
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skip)
        text = "".join(detokenizer.add(token)[0] for token in ids)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
        assert (len(text) > len("Hello there")) == (not skip)


@settings(max_examples=60)
@given(st.data())
def test_no_tokens_however_senseless_make_it_fail(tokenizers, data):
    """Sampled bytes need not be characters; text after them comes through."""
    tokenizer = tokenizers[data.draw(st.sampled_from(NAMES))]
    bytes_first = tokenizer.token_to_id("<0x00>")
    token = st.integers(0, tokenizer.get_vocab_size() - 1)
    if bytes_first is not None:
        token |= st.integers(bytes_first, bytes_first + 255)
    detokenizer = Detokenizer(tokenizer, data.draw(st.lists(token, max_size=10)))
    for item in data.draw(st.lists(token, max_size=30)):
        detokenizer.add(item)
    tail = [detokenizer.add(item)[0] for item in encode(tokenizer, " and then it goes on")]
    assert "".join(tail).endswith(" it goes on")


def test_bytes_that_are_no_character_become_a_replacement_character(tokenizers):
    tokenizer = tokenizers["gemma3-270m"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x61, 0xE4, 0x62)] + encode(tokenizer, " yes")
    detokenizer = Detokenizer(tokenizer, [])
    text = "".join(detokenizer.add(token)[0] for token in ids)
    assert text == "a\ufffd yes"


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """Every string of letters up to three long is a token, so that text can be cut into tokens in every way."""
    pieces = [""] + [chr(c) for c in range(33, 127)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    for text in ("STOP", "xSTOPy", "abcabcd", "ababac", "one two", "\n\nUser:"):
        for start in range(len(text)):
            for end in range(start + 1, len(text) + 1):
                vocab.setdefault(text[start:end], len(vocab))
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut `text` into pieces."""
    if not text:
        yield []
    for end in range(1, len(text) + 1):
        for rest in cuts(text[end:]):
            yield [text[:end], *rest]


def feed(tokenizer: Tokenizer, pieces: list[str], stop: list[str], **options: bool) -> tuple[str, str | None]:
    """The text up to the stop string, and which it was; checks what is held back on the way."""
    detokenizer = Detokenizer(tokenizer, [], stop=stop, **options)
    shown = ""
    for index, piece in enumerate(pieces):
        text, found = detokenizer.add(tokenizer.token_to_id(piece))
        shown += text
        if found is not None:
            assert detokenizer.flush() == ""
            return shown, found
        text = "".join(pieces[: index + 1])
        held = max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert shown == text[: len(text) - held], "all is shown that cannot become a stop string, and no more"
    return shown + detokenizer.flush(), None


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_however_it_is_cut(letters, include):
    ways = list(cuts("xSTOPy"))
    assert len(ways) == 32
    for pieces in ways:
        assert feed(letters, pieces, ["STOP"], include_stop=include) == ("xSTOP" if include else "x", "STOP")


@pytest.mark.parametrize(
    ("text", "stop", "shown", "found"),
    [
        ("abcabcd", ["abcd"], "abc", "abcd"),  # a beginning that comes to nothing, and then the stop string
        ("ababac", ["abac"], "ab", "abac"),  # it overlaps its own beginning
        ("abcabcd", ["abd", "cab"], "ab", "cab"),  # two beginnings at a time
        ("abcabcd", ["abx", "xyz"], "abcabcd", None),
        ("one two", ["two!", "o t"], "one two", None),
        ("\n\nUser:", ["\nUser:"], "\n", "\nUser:"),
    ],
)
def test_overlapping_stop_strings(letters, text, stop, shown, found):
    for pieces in cuts(text):
        assert feed(letters, pieces, stop) == (shown, found)


def test_of_two_stop_strings_in_one_token_the_first_in_the_text_wins(letters):
    assert feed(letters, ["xSTOPy"], ["P", "TO"]) == ("xS", "TO")
    assert feed(letters, ["xSTOPy"], ["STOP", "ST"]) == ("x", "STOP")
    assert feed(letters, ["xSTOPy"], ["ST", "STOP"]) == ("x", "ST")


def test_what_was_held_back_comes_out_at_the_end(letters):
    detokenizer = Detokenizer(letters, [], stop=["STOP"])
    assert detokenizer.add(letters.token_to_id("x")) == ("x", None)
    assert detokenizer.add(letters.token_to_id("STO")) == ("", None)
    assert detokenizer.flush() == "STO"
    assert detokenizer.flush() == ""


def test_before_min_tokens_a_stop_string_is_only_text(letters):
    detokenizer = Detokenizer(letters, [], stop=["STOP"])
    shown = ""
    for piece, check in (("STOP", False), ("x", False), ("ST", False), ("OP", True)):
        text, found = detokenizer.add(letters.token_to_id(piece), check)
        shown += text
    assert (shown, found) == ("STOPx", "STOP")
