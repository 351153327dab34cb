"""How fast an answer came, in llama.cpp's shape."""

from __future__ import annotations

import msgspec

from jaxllm.serving.request_metrics import Phases, Usage


class Timings(msgspec.Struct, kw_only=True):
    """`prompt` is about the prompt's tokens that no cache held, `predicted` about the answer's behind its first.

    Times are in milliseconds, and null while nothing has been measured. `queue_ms` and `padding_n` are ours: how long
    the request waited for its first step, and its share of the padding rows that its steps ran, known at its end, as
    is how many tokens were tried ahead.
    """

    queue_ms: float | None
    cache_n: int
    prompt_n: int
    prompt_ms: float | None
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float | None
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    padding_n: float | None
    draft_n: int
    draft_n_accepted: int


def timings(usage: Usage, phases: Phases) -> Timings:
    """Of all that a request has generated so far."""
    prompt, predicted = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    prompt_ms, predicted_ms = _ms(phases.prefill), _ms(phases.decode)
    timed = predicted - phases.num_answers
    return Timings(
        queue_ms=_ms(phases.queue),
        cache_n=usage.cached_tokens,
        prompt_n=prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt),
        prompt_per_second=_ratio(1000 * prompt, prompt_ms),
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, timed),
        predicted_per_second=_ratio(1000 * timed, predicted_ms),
        padding_n=None if phases.padding is None else round(phases.padding, 2),
        draft_n=usage.drafted_tokens,
        draft_n_accepted=usage.taken_tokens,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _ratio(amount: float | None, per: float | None) -> float | None:
    return amount / per if amount is not None and per is not None and per > 0 else None
