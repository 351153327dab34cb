"""What becomes of a step's result: tokens and text up to a stop, log-probabilities, tokens that a grammar forces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.device.handle import Handle, Result, Score, on_host
from jaxllm.engine.device.sampler import Logprobs
from jaxllm.engine.messages import TokenDelta
from jaxllm.engine.request import Request
from jaxllm.engine.thinking_budget import Thinking
from jaxllm.requests.outputs import Logprob, RankedLogprobs
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.grammar import Constraint


class Results:
    """Turns what was sampled for a request into what its caller is told. It schedules nothing and counts nothing."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._detokenizers: dict[str, Detokenizer] = {}

    def begin(self, request: Request) -> None:
        """Get ready to write a request's text, where it is to be written here."""
        params = request.params
        if self._tokenizer is not None and params.detokenize and request.pooling is None:
            self._detokenizers[request.request_id] = Detokenizer(
                self._tokenizer,
                request.token_ids,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_token_ids=params.shown_special_token_ids,
            )

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._detokenizers.pop(request.request_id, None)

    def accept(
        self,
        result: Result,
        logprobs: Logprobs | None,
        num_running: int,
        pending: Handle | None,
        vocabulary: np.ndarray | None = None,
    ) -> tuple[TokenDelta, int]:
        """What a step gave one request, and how many sampled rows that settles.

        `pending` is the step under way: where a grammar forces more tokens than there are running requests, the
        request's rows are withdrawn from it, and are settled too. `vocabulary` has a row of log-probabilities for each
        token, where the request wants them of all tokens.
        """
        request = result.request
        delta = TokenDelta(request_id=request.request_id, token_ids=[])
        if request.num_output == 0:
            delta.num_cached_tokens = max(request.num_cached, 0)
            delta.prompt_logprobs = None if request.prompt_scores is None else request.prompt_scores.finish()
            delta.first_scheduled_time = request.first_scheduled_time
        delta.captured, request.captured = request.captured, []
        settled = len(result.tokens)
        self._take(request, result.tokens, delta)
        if vocabulary is not None:
            delta.vocabulary = vocabulary[: len(delta.token_ids)].astype("<f4").tobytes()
        elif request.params.logprobs is not None and logprobs is not None:
            delta.logprobs = [
                _row_logprobs(logprobs, row, token, request.params)
                for row, token in enumerate(delta.token_ids, result.row)
            ]
        if request.thinking is not None:
            self._follow_thinking(request, request.thinking, delta)
        if request.constraint is not None:
            settled += self._follow_grammar(request, request.constraint, delta, num_running, pending)
        return delta, settled

    def _take(self, request: Request, tokens: Sequence[int], delta: TokenDelta) -> None:
        """Add tokens and their text to `delta`, up to and with the one that ends the request."""
        for token in tokens:
            delta.token_ids.append(token)
            self._detokenize_and_stop(request, token, len(request.token_ids) + len(delta.token_ids), delta)
            if delta.finish_reason is not None:
                return

    @staticmethod
    def _follow_thinking(request: Request, thinking: Thinking, delta: TokenDelta) -> None:
        """Count what was thought; once the reasoning is over the request is like any other."""
        for token in delta.token_ids:
            if not thinking.over:
                thinking.accept(token)
        if thinking.over:
            request.thinking = None

    def _follow_grammar(
        self, request: Request, constraint: Constraint, delta: TokenDelta, num_running: int, pending: Handle | None
    ) -> int:
        """Move on in the grammar, over the tokens that it forces too; it may be complete then.

        Returns how many rows of the step under way are not sampled for that. Raises GrammarError, also of the token
        that ends the answer: a grammar that has failed allows it.
        """
        for token in delta.token_ids:
            constraint.accept(token)
        if delta.finish_reason is not None:
            return 0
        forced = constraint.forced() if request.fast_forwards else []
        if len(forced) <= num_running:
            forced = []  # a step with a chunk in it takes longer, for everyone: more than sampling these would
        withdrawn = pending.withdraw(request) if forced and pending is not None else 0
        for token in forced:
            constraint.accept(token)
        self._take(request, forced, delta)
        constraint.check()
        if constraint.complete and delta.finish_reason is None:
            detokenizer = self._detokenizers.get(request.request_id)
            delta.finish_reason = "stop"
            delta.text += detokenizer.flush() if detokenizer is not None else ""
        return withdrawn

    def _detokenize_and_stop(self, request: Request, token: int, length: int, delta: TokenDelta) -> None:
        """`length` is that of prompt and tokens up to this one."""
        params = request.params
        detokenizer = self._detokenizers.get(request.request_id)
        enough = length - request.num_prompt >= params.min_tokens
        is_eos = token in self._eos and not params.ignore_eos
        if enough and (is_eos or token in params.stop_token_ids):
            delta.finish_reason = "stop"
            delta.stop_reason = token if token in params.stop_token_ids else None
            if detokenizer is not None:
                shown = detokenizer.add(token, False)[0] if params.include_stop_str_in_output else ""
                delta.text += shown + detokenizer.flush()
            return
        if detokenizer is not None:
            text, stop = detokenizer.add(token, enough)
            delta.text += text
            if stop is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop
                return
        if length >= request.max_total:
            delta.finish_reason = "length"
            if detokenizer is not None:
                delta.text += detokenizer.flush()


def _row_logprobs(logprobs: Logprobs, row: int, token: int, params: SamplingParams) -> RankedLogprobs:
    """The chosen token first, then the most likely, best first, then those that were asked for, in their order."""
    chosen = (token, Logprob(float(logprobs.chosen[row]), int(logprobs.rank[row])))
    pairs = list(zip(logprobs.top_ids[row].tolist(), logprobs.top[row].tolist(), strict=True))
    count, asked = params.logprobs or 0, len(params.logprob_token_ids)
    found = {i: Logprob(v, rank) for rank, (i, v) in enumerate(pairs[:count], 1)}
    for i, v in pairs[len(pairs) - asked :]:
        found.setdefault(i, Logprob(v, None))
    shown = (entry for entry in found.items() if entry[1].logprob > -math.inf)  # a small vocabulary has fewer
    return [chosen, *(entry for entry in shown if entry[0] != token)]


def store_scores(score: Score) -> None:
    """Keep a prompt's scores: their first row is of the first token that is scored."""
    request, positions = score.request, score.positions
    scores, first = request.prompt_scores, request.scores_from
    assert scores is not None
    rows, found = slice(positions.start - first, positions.stop - first), slice(score.row, score.row + len(positions))
    if not isinstance(score.result, Logprobs):
        scores.logprobs[rows] = np.asarray(score.result)[found]
        return
    host = Logprobs(*(array[found] for array in on_host(score.result)))
    others = scores.ids.shape[1] - 1
    scores.ids[rows] = np.column_stack([scores.tokens[rows], host.top_ids[:, :others]])
    scores.logprobs[rows] = np.column_stack([host.chosen, host.top[:, :others]])
    scores.ranks[rows, 0] = host.rank
    scores.ranks[rows, 1:] = np.arange(1, others + 1)
