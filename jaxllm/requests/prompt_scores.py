"""Log-probabilities of a prompt's tokens, as arrays until somebody looks at a position."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from jaxllm.requests.outputs import Logprob, RankedLogprobs

MAX_ENTRIES = 2**20
"""Tokens of a prompt times the vocabulary, where the whole of it is asked for: 4 MB of numbers, 100 MB of JSON."""


class PromptScores(msgspec.Struct):
    """Row i is of the prompt's token i + 1: the first has none, as nothing predicts it. Where those of later tokens
    alone were asked for, the token before these counts as the first.

    Attributes:
        tokens: `[n]` int32, the prompt's tokens from the second on.
        ids: `[n, 1 + k]` int32, each token and the k most likely ones; empty where the whole vocabulary was asked for.
        ranks: `[n, 1 + k]` int32, likewise, from 1.
        logprobs: `[n, 1 + k]` float32, or `[n, V]` by token id.
    """

    tokens: bytes
    ids: bytes
    ranks: bytes
    logprobs: bytes

    @classmethod
    def empty(cls, tokens: list[int], width: int, *, whole: bool) -> ScoresInProgress:
        """Arrays to fill: `width` is `1 + k`, or with `whole` the vocabulary's."""
        rows = len(tokens) - 1
        ids = np.zeros((rows, 0 if whole else width), np.int32)
        return ScoresInProgress(np.asarray(tokens[1:], np.int32), ids, ids.copy(), np.zeros((rows, width), np.float32))

    def __len__(self) -> int:
        return len(self.tokens) // 4 + 1

    def steps(self) -> Iterator[RankedLogprobs | None]:
        """Position by position, made when it is asked for; None for the first."""
        tokens = np.frombuffer(self.tokens, np.int32)
        yield None
        if len(tokens) == 0:
            return
        logprobs = np.frombuffer(self.logprobs, np.float32).reshape(len(tokens), -1)
        if not self.ids:
            for token, row in zip(tokens.tolist(), logprobs, strict=True):
                yield of_vocabulary(token, row)
            return
        ids = np.frombuffer(self.ids, np.int32).reshape(logprobs.shape)
        ranks = np.frombuffer(self.ranks, np.int32).reshape(logprobs.shape)
        for entries in map(zip, ids.tolist(), logprobs.tolist(), ranks.tolist()):
            first, *others = [(i, Logprob(value, rank)) for i, value, rank in entries]
            # A small vocabulary has fewer candidates than were asked for; the token itself is listed once.
            yield [first, *((i, lp) for i, lp in others if i != first[0] and lp.logprob > -np.inf)]


class ScoresInProgress:
    """Arrays that are filled chunk by chunk; see PromptScores."""

    def __init__(self, tokens: np.ndarray, ids: np.ndarray, ranks: np.ndarray, logprobs: np.ndarray):
        self.tokens, self.ids, self.ranks, self.logprobs = tokens, ids, ranks, logprobs

    def finish(self) -> PromptScores:
        """As plain data."""
        return PromptScores(*(a.tobytes() for a in (self.tokens, self.ids, self.ranks, self.logprobs)))


def of_vocabulary(token: int, row: np.ndarray) -> RankedLogprobs:
    """`token`, then all others, most likely first, of `[V]` log-probabilities by token id."""
    order = np.argsort(-row, kind="stable")
    ranked = [(i, Logprob(v, at)) for at, (i, v) in enumerate(zip(order.tolist(), row[order].tolist(), strict=True), 1)]
    itself = int(np.flatnonzero(order == token)[0])
    return [ranked[itself], *ranked[:itself], *ranked[itself + 1 :]]
