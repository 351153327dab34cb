"""Makes kimi_tokens.json: a small vocabulary, and what tiktoken makes of odd texts by it and Kimi's pattern.

Needs tiktoken 0.13 and regex: `python -m tests.text.make_kimi_tokens`.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import tiktoken
from tiktoken._educational import bpe_train

from tests.text.odd_texts import CHOSEN, odd_texts

# As tokenization_kimi.py has it, line by line.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
CORPUS = " ".join(
    [*CHOSEN, "the quick brown fox aaaa aaaaaaa banana bananas HTTP HTTPS 漢字漢字 世界世界 12 123 1234"] * 8
)
FILE = Path(__file__).with_name("kimi_tokens.json")


def main() -> None:
    ranks = bpe_train(CORPUS, 640, r"\s?\S+|\s+", visualise=None)
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    cases = [[text, encoding.encode_ordinary(text)] for text in odd_texts(300)]
    tokens = [base64.b64encode(token).decode() for token in sorted(ranks, key=ranks.__getitem__)]
    FILE.write_text(json.dumps({"tokens": tokens, "cases": cases}, ensure_ascii=True), encoding="utf-8")


if __name__ == "__main__":
    main()
