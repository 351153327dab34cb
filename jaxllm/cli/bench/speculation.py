"""`jaxllm bench speculation`: what tokens tried ahead gain, by kind of text and number of streams."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jaxllm.cli.bench.measuring import Count, JsonFile, counts, report
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig
from jaxllm.config.parts import SpeculativeConfig
from jaxllm.errors import ConfigError
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


DEFAULT = SpeculativeConfig(
    num_speculative_tokens=8,
    prompt_lookup_min=2,
    prompt_lookup_max=4,
    num_speculative_tokens_per_batch_size=[(1, 1, 8), (2, 4096, 4)],
)

StreamCounts = Annotated[list[int] | None, counts("--num-streams")]


@takes_settings(EngineConfig)
def speculation(
    config: EngineConfig,
    *,
    num_streams: StreamCounts = None,
    output_len: Count = 256,
    num_iters: Count = 3,
    json: JsonFile = None,
) -> None:
    """Tokens a second with drafts and without, in turns: on code edits, extraction from a text, and free text.

    Both engines answer the same, or the benchmark fails. A speedup is the median of those of the iterations. Before
    them one round is not counted: it leaves the prompts in the prefix cache, so that the answers alone are compared.

    Args:
        num_streams: How many answers are under way at a time; the next question begins when one ends. Several numbers
            give more rows. [default: 1 4]
        output_len: Most tokens of an answer.
        num_iters: Repetitions.
        json: Write the result to this file.
    """
    from jaxllm.llm import LLM

    given = {"max_model_len": 2048} | config.model_dump(exclude_unset=True)
    if "max_num_seqs" in given:
        raise ConfigError(f"max_num_seqs is {config.max_num_seqs}, and here num_streams sets it; leave it out")
    streams = num_streams or [1, 4]
    asked = given.pop("speculative_config", None) or DEFAULT.model_dump(exclude_unset=True)
    results = []
    for count in streams:
        sizes = given | {"max_num_seqs": count}
        with LLM(**sizes) as plain, LLM(**sizes, speculative_config=asked) as drafting:
            for llm in (plain, drafting):
                while llm.stats().compiles_pending:
                    time.sleep(0.2)
            results += [_compare(plain, drafting, kind, count, output_len, num_iters) for kind in TEXTS]
    kinds = list(TEXTS)
    results.sort(key=lambda result: kinds.index(result["text"]))
    load = {"num_streams": streams, "output_len": output_len, "num_iters": num_iters, "speculative_config": asked}
    report("speculation", config, load, results, json)


def _compare(plain: LLM, drafting: LLM, kind: str, count: int, output_len: int, num_iters: int) -> dict[str, Any]:
    conversations = [[{"role": "user", "content": question}] for question in TEXTS[kind]()] * count
    params = SamplingParams(temperature=0, max_tokens=output_len, detokenize=False)
    before, rates = drafting.stats(), list[tuple[float, float]]()
    for iteration in range(num_iters + 1):
        pair = [_rate(llm, conversations, params) for llm in (plain, drafting)]
        if pair[0][1] != pair[1][1]:
            raise ConfigError(f"with drafts the answers to {kind} are others than without: this is a fault of jaxllm")
        if iteration:  # the first time something may still be loaded
            rates.append((pair[0][0], pair[1][0]))
    after = drafting.stats()
    tried = after.num_draft_tokens - before.num_draft_tokens
    taken = sum(after.accepted_by_position) - sum(before.accepted_by_position)
    return {
        "text": kind,
        "streams": count,
        "without_tok_s": statistics.median(rate for rate, _ in rates),
        "with_tok_s": statistics.median(rate for _, rate in rates),
        "speedup": statistics.median(drafted / alone for alone, drafted in rates),
        "accepted": taken / tried if tried else 0.0,
    }


def _rate(llm: LLM, conversations: list[Any], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens a second of all answers, as many of which are under way as the engine has places for; and the answers."""
    begin = time.perf_counter()
    said = [output.outputs[0].token_ids for output in llm.chat(conversations, params, use_tqdm=False)]
    return sum(map(len, said)) / (time.perf_counter() - begin), said


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
