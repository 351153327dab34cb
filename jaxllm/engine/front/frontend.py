"""What both front doors do with a request before and after the engine: check, split, collect."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from jaxllm.config import EngineConfig
from jaxllm.engine.front.messages import EngineInfo, EngineRequest, TokenDelta
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from jaxllm.requests.pooling import PoolingParams
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.structured_outputs import compile_grammar
from jaxllm.text.bad_words import check_bad_words
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.weights.source import resolve_tokenizer as source_tokenizer

MAX_ALL_LOGITS = 4096
"""The largest vocabulary, or number of classes, whose logits may be asked for without naming them."""

Prompt = str | Sequence[int] | dict
"""Text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`."""


def resolve_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that `config` means; None where it is to be left out."""
    if config.skip_tokenizer_init:
        return None
    source = config.tokenizer or config.model
    return load_tokenizer(source_tokenizer(source, revision=config.revision, download_dir=config.download_dir))


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
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError("prompt is text, but skip_tokenizer_init is on; give token ids", param="prompt")
        return prompt, tokenizer.encode(prompt)
    ids = list(prompt)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidRequestError("prompt must be text or a list of integer token ids", param="prompt")
    return None, ids


def check_request(
    info: EngineInfo, tokenizer: Tokenizer | None, ids: Sequence[int], params: SamplingParams, *, pools: bool = False
) -> None:
    """Refuse what the engine could not honour.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    if info.tasks.labels and not pools:
        classes = ", ".join(info.tasks.labels[:5]) + (", …" if len(info.tasks.labels) > 5 else "")
        raise InvalidRequestError(f"this model generates no text, it classifies (as {classes}); use /classify")
    if not ids:
        raise InvalidRequestError("prompt is empty; it must have at least one token", param="prompt")
    bad = next((i for i in ids if not 0 <= i < info.vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(f"prompt has token id {bad}; ids go from 0 to {info.vocab_size - 1}", param="prompt")
    if len(ids) >= info.max_model_len:
        raise InvalidRequestError(
            f"prompt has {len(ids)} tokens; with at least one to generate it must be shorter than the context of "
            f"{info.max_model_len} tokens",
            param="prompt",
        )
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "shown_special_token_ids"):
        tokens = getattr(params, name) or ()
        bad = next((i for i in tokens if not 0 <= i < info.vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(f"{name} has token id {bad}; ids go from 0 to {info.vocab_size - 1}", param=name)
    for name in ("stop", "bad_words", "structured_outputs"):
        if getattr(params, name) and tokenizer is None:
            raise InvalidRequestError(f"{name} needs a tokenizer, but skip_tokenizer_init is on", param=name)
    if params.structured_outputs is not None:
        compile_grammar(params.structured_outputs)
    if params.bad_words and tokenizer is not None:
        check_bad_words(tokenizer.backend, params.bad_words)


def check_pooling(info: EngineInfo, ids: Sequence[int], pooling: PoolingParams) -> None:
    """Refuse what the engine could not honour.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    params = SamplingParams(max_tokens=1, allowed_token_ids=pooling.token_ids or None)
    check_request(info, None, ids, params, pools=True)
    outputs = len(info.tasks.labels) or info.vocab_size
    if pooling.kind == "logits" and not pooling.token_ids and outputs > MAX_ALL_LOGITS:
        raise InvalidRequestError(
            f"token_ids is empty, which asks for all {outputs} logits; at most {MAX_ALL_LOGITS} are given",
            param="token_ids",
        )


def split_request(
    ids: list[int], params: SamplingParams, request_id: str | None = None, priority: int = 0, salt: str | None = None
) -> list[EngineRequest]:
    """One engine request for each of `params.n` choices; their prompts share pages, their seeds differ."""
    request_id = request_id or uuid.uuid4().hex
    now = time.time()
    return [
        EngineRequest(
            request_id=request_id if params.n == 1 else f"{request_id}-{choice}",
            prompt_token_ids=ids,
            sampling_params=replace(params, n=1, seed=None if params.seed is None else params.seed + choice),
            arrival_time=now,
            priority=priority,
            cache_salt=salt,
        )
        for choice in range(params.n)
    ]


def pooling_request(
    ids: list[int], pooling: PoolingParams, request_id: str | None = None, priority: int = 0, salt: str | None = None
) -> EngineRequest:
    """The engine request of one prompt to read values off."""
    return EngineRequest(
        request_id=request_id or uuid.uuid4().hex,
        prompt_token_ids=ids,
        sampling_params=SamplingParams(max_tokens=1),
        arrival_time=time.time(),
        priority=priority,
        cache_salt=salt,
        pooling=pooling,
    )


def name_tokens(delta: TokenDelta, tokenizer: Tokenizer | None) -> None:
    """Give the log-probabilities of a delta their tokens' texts."""
    if tokenizer is None:
        return

    def named(entries: list[tuple[int, Logprob]] | None) -> list[tuple[int, Logprob]] | None:
        if entries is None:
            return None
        return [(i, lp._replace(decoded_token=tokenizer.token_text(i))) for i, lp in entries]

    if delta.logprobs is not None:
        delta.logprobs = [named(entries) or [] for entries in delta.logprobs]
    if delta.prompt_logprobs is not None:
        delta.prompt_logprobs = [named(entries) for entries in delta.prompt_logprobs]


class Collector:
    """Gathers the deltas of one caller's request into a RequestOutput."""

    def __init__(self, request_id: str, prompt: str | None, ids: list[int], params: SamplingParams):
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

    def add(self, choice: int, delta: TokenDelta) -> None:
        """Append a delta of one choice."""
        output, metrics = self.output.outputs[choice], self.output.metrics
        assert metrics is not None
        if delta.token_ids and metrics.first_token_time is None:
            metrics.first_token_time = time.time()
            metrics.first_scheduled_time = delta.first_scheduled_time
            self.output.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [None if e is None else dict(e) for e in delta.prompt_logprobs]
        output.token_ids += delta.token_ids
        output.text += delta.text
        if output.logprobs is not None and delta.logprobs is not None:
            entries: list[TokenLogprobs] = [dict(e) for e in delta.logprobs]
            output.logprobs += entries
            chosen = zip(delta.token_ids, entries, strict=True)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(e[t].logprob for t, e in chosen)
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            self._open -= 1
            if self._open == 0:
                self.output.finished = True
                metrics.finished_time = time.time()
