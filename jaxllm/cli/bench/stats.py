"""What a run of requests amounts to: percentiles of times, tokens a second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 90, 99)


@dataclass
class Trace:
    """One request as its client saw it; times are seconds on one clock."""

    start: float
    prompt_tokens: int
    arrivals: list[float] = field(default_factory=list)
    """When each piece of the answer arrived."""
    output_tokens: int = 0
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        """TTFT: from sending the request to the first piece of its answer."""
        return self.arrivals[0] - self.start

    @property
    def time_per_output_token(self) -> float:
        """TPOT: mean time of a token after the first; needs at least two tokens."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """ITL: gaps between successive pieces."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def end_to_end(self) -> float:
        """From sending the request to the last piece of its answer."""
        return self.arrivals[-1] - self.start


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile with linear interpolation between ranks (Hyndman & Fan 1996, type 7, as in NumPy).

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    ranked = sorted(values)
    position = (len(ranked) - 1) * percent / 100
    below, above = math.floor(position), math.ceil(position)
    return ranked[below] + (ranked[above] - ranked[below]) * (position - below)


def spread(values: Sequence[float]) -> dict[str, float]:
    """{'mean', 'p50', 'p90', 'p99', 'max'} of `values`; empty where there are none."""
    if not values:
        return {}
    ranks = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"mean": sum(values) / len(values), **ranks, "max": max(values)}


def summarize(traces: Sequence[Trace], duration: float) -> dict[str, object]:
    """Rates over `duration` seconds and the spread of each latency in milliseconds, over the requests that finished."""
    finished = [trace for trace in traces if trace.error is None and trace.arrivals]
    prompt_tokens = sum(trace.prompt_tokens for trace in finished)
    output_tokens = sum(trace.output_tokens for trace in finished)
    return {
        "duration_s": duration,
        "completed": len(finished),
        "failed": len(traces) - len(finished),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(finished) / duration,
        "prompt_tokens_per_s": prompt_tokens / duration,
        "output_tokens_per_s": output_tokens / duration,
        "ttft_ms": _milliseconds([trace.time_to_first_token for trace in finished]),
        "tpot_ms": _milliseconds([trace.time_per_output_token for trace in finished if trace.output_tokens > 1]),
        "itl_ms": _milliseconds([gap for trace in finished for gap in trace.inter_token_latencies]),
        "e2e_ms": _milliseconds([trace.end_to_end for trace in finished]),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {name: value * 1000 for name, value in spread(seconds).items()}
