"""Texts on which tokenizers differ if anywhere: scripts, marks, runs of spaces, control characters, fragments."""

from __future__ import annotations

import random

CHOSEN = (
    "",
    " ",
    "Hello world",
    "  two  spaces,\n\n\ttabs and\r\nlines  ",
    "I'll we've O'NEIL's HE'D it'ſ 12345 3.14159 x=f(y)[0];",
    "Grüße aus Köln, Привет мир, مرحبا بالعالم, नमस्ते दुनिया",
    "你好，世界。こんにちは 안녕하세요 漢字かな交じり文 abc漢字ABC",
    "🤖👩‍👩‍👧‍👦🏳️‍🌈 é vs e\u0301 ½ ² ① Ⅷ ﬁ Ａ１ ㈱",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\x00g\x7fh\x85i",
    "HTTPServer camelCase Title ǅungla ʰʷ ªº İstanbul",
    "<s> </s> <mask> <unk> <pad> [CLS] ▁ ▁▁ Ġ <0x0A>",
    "   \n \n\n  x \r\n\r\n\t\t y\u2028z",
)
_ALPHABETS = (
    "abcdefgh", "ABCDEF", "0123456789", "    \t\n\r", ".,;:!?'\"-()[]{}<>/|\\", "漢字你好世界", "かなカナ",
    "éüñçßøåœ", "ПриветΣΩ", "שלוםمرحب", "\u0301\u0308\u0327", "\u00a0\u3000\u2009", "ǅʰªˈ", "🤖🌸👍🏽", "▁Ġ<s>", "½²①Ⅷ",
    "ﬁＡ１㈱", "\u200b\u200d\ufe0f\x00\x1b",
)  # fmt: skip


def odd_texts(count: int, seed: int = 0) -> list[str]:
    """The chosen ones and `count` random ones, the same on every machine."""
    rng = random.Random(seed)
    found = list(CHOSEN)
    for _ in range(count):
        runs = (rng.choices(rng.choice(_ALPHABETS), k=rng.randint(1, 6)) for _ in range(rng.randint(1, 8)))
        found.append("".join(character for run in runs for character in run))
    return found
