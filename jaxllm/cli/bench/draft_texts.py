"""What `bench speculation` asks for: three kinds of text, which differ in how much of them was said before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_PARAGRAPHS = Path(__file__).with_name("perplexity.txt")
"""Of Alice's Adventures in Wonderland (1865, public domain), one a line."""

_PROGRAMS = (
    """\
def total_price(items, rate):
    total = 0
    for item in items:
        if item.price < 0:
            raise ValueError("a price is negative")
        total = total + item.price * item.count
    if total > 100:
        total = total - 10
    return total * (1 + rate)
""",
    """\
class Stack:
    def __init__(self):
        self.values = []

    def push(self, value):
        self.values.append(value)

    def pop(self):
        if not self.values:
            raise IndexError("the stack is empty")
        return self.values.pop()

    def __len__(self):
        return len(self.values)
""",
    """\
def word_counts(path):
    counts = {}
    with open(path) as file:
        for line in file:
            for word in line.split():
                word = word.strip(".,;:!?").lower()
                if word:
                    counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda pair: -pair[1])
""",
    """\
def merge(left, right):
    merged = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i = i + 1
        else:
            merged.append(right[j])
            j = j + 1
    return merged + left[i:] + right[j:]
""",
)

_QUESTIONS = (
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain to a child why the sky is blue.",
    "Give advice to somebody who moves to a city where they know nobody.",
    "Describe a walk through a market early in the morning.",
)


def _edits() -> list[str]:
    words = (("total", "amount"), ("values", "entries"), ("counts", "numbers"), ("merged", "result"))
    return [
        f"Rewrite this program, with every `{old}` called `{new}`. Answer with the whole program.\n\n"
        f"```python\n{program}```"
        for program, (old, new) in zip(_PROGRAMS, words, strict=True)
    ]


def _extractions() -> list[str]:
    paragraphs = [line for line in _PARAGRAPHS.read_text(encoding="utf-8").splitlines() if 300 < len(line) < 900]
    return [
        f"Copy out of this text, word by word, all sentences that say what Alice did:\n\n{paragraph}"
        for paragraph in paragraphs[:4]
    ]


TEXTS: dict[str, Callable[[], list[str]]] = {
    "code edits": _edits,
    "extraction": _extractions,
    "free text": lambda: list(_QUESTIONS),
}
"""Kind -> what is asked, four of each."""
