"""Log-probabilities of given completions, and whole rows of logits, which are computed at access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.doors.sequences import Prompt, Prompts, one_or_many, prompt_ids, prompt_list
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import PromptScores
from jaxllm.requests.shown import frame
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class ScoredCompletion:
    """How likely a completion is after its prompt.

    Attributes:
        prompt_token_ids, token_ids: the tokens of both.
        logprobs: `[n]` float32, the log-probability of each token of the completion (natural log), of the model's raw
            distribution.
        ranks: `[n]` int32, each token's place among all, from 1.
        num_cached_tokens: tokens of the prompt that another request had computed already.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray
    ranks: np.ndarray
    num_cached_tokens: int

    @property
    def total(self) -> float:
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        return bool((self.ranks == 1).all())

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each completion token: position, token_id, logprob, rank. Raises ConfigError without pandas."""
        columns = zip(self.token_ids, self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        names = ("position", "token_id", "logprob", "rank")
        return frame(dict(zip(names, (at, *row), strict=True)) for at, row in enumerate(columns))

    def __repr__(self) -> str:
        greedy = ", greedy" if self.is_greedy else ""
        return f"ScoredCompletion(total={self.total:.3f}, {len(self.token_ids):,} tokens{greedy})"


def pairs(prompts: Prompts, completions: Prompts, tokenizer: Tokenizer | None) -> list[tuple[list[int], int]]:
    """The token ids of each prompt with its completion, and how many of them are the prompt's.

    A text's completion begins where the tokens of both together differ from those of the prompt alone.
    Raises InvalidRequestError if the numbers of both do not match, or one cannot be scored.
    """
    after = prompt_list(completions)
    before, is_one = one_or_many(prompts)
    before = before * len(after) if is_one else before
    if len(before) != len(after):
        raise InvalidRequestError(
            f"completions has {len(after)} entries for {len(before)} prompts; give one a prompt, or one prompt for all",
            "completions",
        )
    return [_pair(*both, index, tokenizer) for index, both in enumerate(zip(before, after, strict=True))]


def _pair(prompt: Prompt, completion: Prompt, index: int, tokenizer: Tokenizer | None) -> tuple[list[int], int]:
    if isinstance(prompt, str) != isinstance(completion, str):
        kinds = ["text" if isinstance(given, str) else "token ids" for given in (completion, prompt)]
        raise InvalidRequestError(
            f"completions[{index}] is {kinds[0]} and its prompt {kinds[1]}; both must be text, or both token ids",
            "completions",
        )
    first = prompt_ids(prompt, tokenizer)[1]
    if isinstance(prompt, str) and isinstance(completion, str):
        whole = prompt_ids(prompt + completion, tokenizer)[1]
        count = next((i for i, both in enumerate(zip(first, whole, strict=False)) if both[0] != both[1]), len(first))
        count = min(count, len(whole))
    else:
        whole, count = first + prompt_ids(completion, tokenizer)[1], len(first)
    if count == len(whole):
        raise InvalidRequestError(f"completions[{index}] is empty; it must have a token", "completions")
    if count == 0:
        raise InvalidRequestError(
            f"prompts[{index}] is empty; it must have a token that the completion's first one follows", "prompts"
        )
    return whole, count


def scored(ids: list[int], count: int, scores: PromptScores, num_cached_tokens: int) -> ScoredCompletion:
    """The result for one of `pairs`, from the engine's scores of its completion's tokens."""
    logprobs, ranks = np.frombuffer(scores.logprobs, np.float32), np.frombuffer(scores.ranks, np.int32)
    return ScoredCompletion(ids[:count], ids[count:], logprobs, ranks, num_cached_tokens)


CHUNK = 256  # rows that are computed together while iterating


class LogitRows:
    """The logits after each token of a prompt, as if `[T, V]` float32: `rows[5]`, `rows[-3:]`, `np.asarray(rows)`.

    It keeps the hidden states behind them, `[T, E]`. Iterating gives row after row, a few hundred in memory at a time.
    """

    def __init__(self, states: np.ndarray, unembed: Callable[[np.ndarray], np.ndarray], vocab_size: int):
        self.states = states
        self.shape = (len(states), vocab_size)
        self._unembed = unembed

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._unembed(self.states[index])

    def __iter__(self) -> Iterator[np.ndarray]:
        for chunk in self.chunks():
            yield from chunk

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.float32, copy=False)

    def __repr__(self) -> str:
        return f"LogitRows(shape={self.shape})"

    def chunks(self, rows: int = CHUNK) -> Iterator[np.ndarray]:
        """`[rows, V]` after `[rows, V]`; the last may be shorter."""
        for start in range(0, len(self), rows):
            yield self[start : start + rows]
