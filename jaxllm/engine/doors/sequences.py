"""From a caller's request to the sequences that the engine runs, and from their deltas back to one output."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.errors import InvalidRequestError, JaxLLMError
from jaxllm.requests.captures import CaptureParams, CapturesInProgress
from jaxllm.requests.outputs import (
    CompletionOutput,
    Logprob,
    PooledOutput,
    RankedLogprobs,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    extend_versions,
    of_vocabulary,
)
from jaxllm.requests.sampling import SamplingParams
from jaxllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | dict
"""Text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`."""
Prompts = Prompt | Iterable[Prompt]
"""One prompt, or several."""
_BYTES = (bytes, bytearray, memoryview)


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """The prompt's text, where it has one, and its token ids.

    Raises:
        InvalidRequestError: a text without a tokenizer, or none of the accepted shapes.
    """
    if isinstance(prompt, dict):
        inner = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if inner is None:
            raise InvalidRequestError(
                f"prompt has the keys {sorted(prompt)}; it must have 'prompt' or 'prompt_token_ids'", param="prompt"
            )
        prompt = inner
    if isinstance(prompt, _BYTES):
        raise InvalidRequestError(f"prompt is {type(prompt).__name__}; it must be text: decode it", param="prompt")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError("prompt is text, but skip_tokenizer_init is on; give token ids", param="prompt")
        return prompt, tokenizer.encode(prompt)
    _check_iterable(prompt)
    ids = list(prompt)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidRequestError("prompt must be text or a list of integer token ids", param="prompt")
    return None, ids


def prompt_list(prompts: Prompts) -> list[Any]:
    """One prompt or many -> many."""
    return one_or_many(prompts)[0]


def one_or_many(prompts: Prompts) -> tuple[list[Any], bool]:
    """One prompt or many -> many, and whether it was one; a list of integers is one prompt.

    Raises InvalidRequestError for what is neither.
    """
    if isinstance(prompts, (str, dict, *_BYTES)):
        return [prompts], True
    _check_iterable(prompts)
    listed = list(prompts)  # an iterator can be looked at only once
    if listed and all(isinstance(item, int) for item in listed):
        return [listed], True
    return listed, False


def _check_iterable(given: object) -> None:
    if not isinstance(given, Iterable):
        raise InvalidRequestError(f"prompt is {given!r}; it must be text, or a list of integer token ids", "prompt")


def split_request(request: EngineRequest) -> list[EngineRequest]:
    """One request for each of its choices; their prompts share pages, their seeds differ."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    seeds = [None if params.seed is None else params.seed + choice for choice in range(params.n)]
    return [msgspec.structs.replace(request, sampling_params=replace(params, n=1, seed=seed)) for seed in seeds]


def failure(delta: TokenDelta) -> JaxLLMError:
    """What to raise for a delta that ends its request before it is complete."""
    kind = InvalidRequestError if delta.invalid else JaxLLMError
    return kind(f"request {delta.request_id} failed: {delta.error or delta.finish_reason}")


def pooled_output(delta: TokenDelta) -> PooledOutput:
    """The result that the one delta of a request with pooling carries. Raises JaxLLMError when it failed."""
    if delta.pooled is None:
        raise failure(delta)
    return PooledOutput(np.frombuffer(delta.pooled, "<f4").astype(np.float32), delta.num_cached_tokens)


def rank_vocabulary(delta: TokenDelta) -> None:
    """Make a delta's log-probabilities of those of the whole vocabulary, where it brings these."""
    if delta.vocabulary is not None:
        rows = np.frombuffer(delta.vocabulary, "<f4").reshape(len(delta.token_ids), -1)
        delta.logprobs = [of_vocabulary(token, row) for token, row in zip(delta.token_ids, rows, strict=True)]
        delta.vocabulary = None


def name_tokens(delta: TokenDelta, tokenizer: Tokenizer) -> None:
    """Give the log-probabilities of a delta their tokens' texts and bytes."""
    if delta.logprobs is not None:
        delta.logprobs = [_named(entries, tokenizer) for entries in delta.logprobs]


def _named(entries: RankedLogprobs, tokenizer: Tokenizer) -> RankedLogprobs:
    return [(token, _with_name(token, logprob, tokenizer)) for token, logprob in entries]


def _with_name(token: int, logprob: Logprob, tokenizer: Tokenizer) -> Logprob:
    raw = tokenizer.token_bytes(token)
    return logprob._replace(decoded_token=raw.decode(errors="replace"), token_bytes=raw)


class Collector:
    """Gathers the deltas of one caller's request into a RequestOutput."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None = None,
        capture: CaptureParams | None = None,
        width: int = 0,
    ):
        """`tokenizer` names the tokens of the prompt's log-probabilities; `capture` are of up to `width`."""
        wants = params.logprobs is not None
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=ids,
            outputs=[
                CompletionOutput(index=i, logprobs=[] if wants else None, cumulative_logprob=0.0 if wants else None)
                for i in range(params.n)
            ],
            metrics=RequestMetrics(arrival_time=time.time()),
        )
        self._open = params.n
        self._captures = [CapturesInProgress(capture, width) for _ in range(params.n)] if capture else []
        self._tokenizer = tokenizer

    def add(self, choice: int, delta: TokenDelta) -> None:
        """Append a delta of one choice."""
        output, metrics = self.output.outputs[choice], self.output.metrics
        assert metrics is not None
        if delta.token_ids and metrics.first_token_time is None:
            metrics.first_token_time = time.time()
            metrics.first_scheduled_time = delta.first_scheduled_time
            self.output.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [self._dict(step) for step in delta.prompt_logprobs.steps()]
        for rows in delta.captured:
            self._captures[choice].add(rows.positions, rows.values)
        output.token_ids += delta.token_ids
        output.text += delta.text
        if delta.token_ids and delta.weight_version:  # beams have none
            extend_versions(output.weight_versions, delta.weight_version, len(delta.token_ids))
        if output.logprobs is not None and delta.logprobs is not None:
            entries: list[TokenLogprobs] = [dict(e) for e in delta.logprobs]
            output.logprobs += entries
            chosen = zip(delta.token_ids, entries, strict=True)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(e[t].logprob for t, e in chosen)
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            if self._captures:
                output.captures = self._captures[choice].finish()
            self._open -= 1
            if self._open == 0:
                self.output.finished = True
                metrics.finished_time = time.time()

    def _dict(self, step: RankedLogprobs | None) -> TokenLogprobs | None:
        if step is None:
            return None
        return dict(step if self._tokenizer is None else _named(step, self._tokenizer))
