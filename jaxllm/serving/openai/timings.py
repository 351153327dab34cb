"""How fast an answer came, in llama.cpp's shape."""

from __future__ import annotations

import msgspec

from jaxllm.serving.generation import Generation


class Timings(msgspec.Struct, kw_only=True):
    """`prompt` is about the prompt's tokens that no cache held, `predicted` about the answer's behind its first.

    Times are in milliseconds, and null while nothing has been measured.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float | None
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float | None
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


def timings(generation: Generation) -> Timings:
    """Of all choices of a request so far."""
    usage, clock = generation.usage(), generation.clock
    prompt, predicted = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    prompt_ms, predicted_ms = _ms(clock.scheduled, clock.first), _ms(clock.first, clock.last)
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt),
        prompt_per_second=_ratio(1000 * prompt, prompt_ms),
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, predicted - generation.num_choices),
        predicted_per_second=_ratio(1000 * (predicted - generation.num_choices), predicted_ms),
    )


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0) * 1000


def _ratio(amount: float | None, per: float | None) -> float | None:
    return amount / per if amount is not None and per is not None and per > 0 else None
