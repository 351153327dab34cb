"""From what a step sampled to what a caller is told: tokens, text up to a stop, and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from jaxllm.engine.core.feature import Feature, Followed
from jaxllm.engine.core.handle import Handle, Result
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sampler import Logprobs
from jaxllm.engine.messages import TokenDelta
from jaxllm.requests.outputs import Logprob, RankedLogprobs
from jaxllm.requests.sampling import SamplingParams
from jaxllm.text.spellings import REPLACEMENT

PROMPT_TAIL = 8
"""Prompt tokens that are decoded first, so that the first generated token is spelled as it is after them."""
INVALID_PREFIX = "Invalid prefix"
"""The beginning of the message of DecodeStream's error; it has no type of its own."""


class Detokenizer:
    """One request's text. Never splits a character, and never shows the beginning of what may be a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_special_token_ids: Sequence[int] = (),
    ):
        """With `skip_special_tokens`, special tokens are left out but for those that are to be shown."""
        self._tokenizer = tokenizer
        self._left_out: frozenset[int] = frozenset()
        if skip_special_tokens and shown_special_token_ids:
            self._left_out = special_token_ids(tokenizer) - frozenset(shown_special_token_ids)
            skip_special_tokens = False
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        for token in _prompt_tail(tokenizer, prompt):
            self._decode(token)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._include_stop = include_stop
        self._held = ""

    def add(self, token: int, check_stop: bool = True) -> tuple[str, str | None]:
        """Text that is settled now, and the stop string that was found, if any."""
        self._held += self._decode(token)
        if not self._stop:
            return self.flush(), None
        found = self._find_stop() if check_stop else None
        if found is not None:
            at, stop = found
            text = self._held[: at + len(stop)] if self._include_stop else self._held[:at]
            self._held = ""
            return text, stop
        keep = self._partial_stop()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, None

    def flush(self) -> str:
        """The text that was held back for a stop string that did not come."""
        text, self._held = self._held, ""
        return text

    def _decode(self, token: int) -> str:
        """Text that `token` completes.

        Byte tokens that turn out to be no character make the stream fail, because they change how the bytes before them
        are read, some of which have been sent. They become one U+FFFD, and a new stream goes on from this token.
        """
        if token in self._left_out:
            return ""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            if INVALID_PREFIX not in str(error):
                raise
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        return REPLACEMENT + (self._stream.step(self._tokenizer, token) or "")

    def _find_stop(self) -> tuple[int, str] | None:
        """The stop string that begins first; of those that begin together, the first in the list."""
        places = [(self._held.find(stop), order, stop) for order, stop in enumerate(self._stop)]
        at, _, stop = min((p for p in places if p[0] >= 0), default=(-1, 0, ""))
        return (at, stop) if at >= 0 else None

    def _partial_stop(self) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


@lru_cache(maxsize=4)
def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that `skip_special_tokens` leaves out."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _prompt_tail(tokenizer: Tokenizer, prompt: Sequence[int]) -> Sequence[int]:
    """The last PROMPT_TAIL tokens, or a few more where those begin inside a character.

    Tokenizers that spell rare characters in bytes would read none of the bytes after a beginning like that.
    """
    for length in range(PROMPT_TAIL, 4 * PROMPT_TAIL):
        tail = prompt[-length:]
        if length >= len(prompt) or not tokenizer.decode(tail).startswith(REPLACEMENT):
            return tail
    return prompt[-PROMPT_TAIL:]


class Results:
    """Turns what was sampled for a request into what its caller is told. It schedules nothing and counts nothing."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], features: Features):
        self._tokenizer = tokenizer
        self._features = features
        self._eos = frozenset(eos_token_ids)
        self._detokenizers: dict[str, Detokenizer] = {}

    def begin(self, request: Request) -> None:
        """Get ready to write a request's text, where it is to be written here."""
        params = request.params
        if self._tokenizer is not None and params.detokenize and request.samples:
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
