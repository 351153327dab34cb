"""From what a step sampled to what a caller is told: tokens, text up to a stop, and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from jaxllm.engine.core.feature import Feature, Followed
from jaxllm.engine.core.handle import Handle, Result
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sampler import Logprobs
from jaxllm.engine.messages import TokenDelta
from jaxllm.requests.outputs import Logprob, RankedLogprobs
from jaxllm.requests.sampling import RepetitionDetectionParams, SamplingParams
from jaxllm.text.detokenizer import Detokenizer


class Results:
    """Turns what was sampled for a request into what its caller is told. It schedules nothing and counts nothing."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], features: Features):
        self._tokenizer = tokenizer
        self._features = features
        self._eos = frozenset(eos_token_ids)
        self._detokenizers: dict[str, Detokenizer] = {}
        self._repetitions: dict[str, Repetition] = {}

    def begin(self, request: Request) -> None:
        """Get ready to write a request's text, where it is to be written here."""
        params = request.params
        if params.repetition_detection is not None and params.repetition_detection.max_pattern_size:
            self._repetitions[request.request_id] = Repetition(params.repetition_detection)
        if self._tokenizer is not None and params.detokenize and request.samples:
            self._detokenizers[request.request_id] = Detokenizer(
                self._tokenizer,
                request.token_ids,
                stop=params.stop,
                stop_regex=params.stop_regex,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_token_ids=params.shown_special_token_ids,
            )

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._repetitions.pop(request.request_id, None)
        self._detokenizers.pop(request.request_id, None)

    def accept(self, result: Result, logprobs: Logprobs | None, pending: Handle | None) -> tuple[TokenDelta, int]:
        """The delta of what a step gave one request, and the number of sampled rows that it settles.

        `pending` is the step under way: where a feature says what follows, the request's rows are withdrawn from it,
        and are settled too.
        """
        request = result.request
        delta = TokenDelta(request_id=request.request_id, token_ids=[])
        if request.num_output == 0:
            delta.num_cached_tokens = max(request.num_cached, 0)
            delta.first_scheduled_time = request.first_scheduled_time
        settled = len(result.tokens)
        self._take(request, result.tokens, delta)
        if request.params.logprobs is not None and not request.params.wants_vocabulary and logprobs is not None:
            delta.logprobs = [
                _row_logprobs(logprobs, row, token, request.params)
                for row, token in enumerate(delta.token_ids, result.row)
            ]
        for feature, extra in self._features.of(request, Feature.said):
            feature.said(request, extra, delta)
        for feature, extra in self._features.of(request, Feature.follow):
            settled += self._follow(request, feature.follow(request, extra, delta), delta, pending)
        return delta, settled

    def _follow(self, request: Request, followed: Followed, delta: TokenDelta, pending: Handle | None) -> int:
        """Add what must follow; returns how many rows of the step under way are not sampled for that."""
        withdrawn = pending.withdraw(request) if followed.forced and pending is not None else 0
        self._take(request, followed.forced, delta)
        if followed.complete and delta.finish_reason is None:
            detokenizer = self._detokenizers.get(request.request_id)
            delta.finish_reason = "stop"
            delta.text += detokenizer.flush() if detokenizer is not None else ""
        return withdrawn

    def _take(self, request: Request, tokens: Sequence[int], delta: TokenDelta) -> None:
        """Add tokens and their text to `delta`, up to and with the one that ends the request."""
        for token in tokens:
            delta.token_ids.append(token)
            self._detokenize_and_stop(request, token, len(request.token_ids) + len(delta.token_ids), delta)
            if delta.finish_reason is not None:
                return

    def _detokenize_and_stop(self, request: Request, token: int, length: int, delta: TokenDelta) -> None:
        """`length` is that of prompt and tokens up to this one."""
        params = request.params
        detokenizer, repetition = self._detokenizers.get(request.request_id), self._repetitions.get(request.request_id)
        repeats = repetition is not None and repetition.add(token)
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
        elif enough and repeats:
            delta.finish_reason, delta.stop_reason = "repetition", "repetition_detected"
        if delta.finish_reason is not None and detokenizer is not None:
            delta.text += detokenizer.flush()


class Repetition:
    """Whether the end of an answer is some tokens again and again.

    `_runs[n]` is for how many tokens each has been the one `n` tokens before it. A pattern of n tokens stands `count`
    times at the end if that is `n * (count - 1)` or more.
    """

    def __init__(self, asked: RepetitionDetectionParams):
        self._sizes = np.arange(max(asked.min_pattern_size, 1), asked.max_pattern_size + 1)
        self._needed = self._sizes * (asked.min_count - 1)
        self._runs = np.zeros_like(self._sizes)
        self._last = np.full(asked.max_pattern_size, -1)
        self._at = 0
        """Where in `_last`, a ring, the next token goes."""

    def add(self, token: int) -> bool:
        """Take the next token; returns True if with it the answer repeats itself."""
        same = self._last[(self._at - self._sizes) % len(self._last)] == token
        self._runs = np.where(same, self._runs + 1, 0)
        self._last[self._at] = token
        self._at = (self._at + 1) % len(self._last)
        return bool((self._runs >= self._needed).any())


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
