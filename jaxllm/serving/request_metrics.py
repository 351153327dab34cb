"""Measurements of requests as they pass, by vLLM's names: times, lengths and parameters."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from jaxllm.engine.messages import TokenDelta
from jaxllm.requests.sampling import SamplingParams

_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TTFT_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)

SECONDS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT_SECONDS),
    "inter_token_latency_seconds": ("Between one output of a sequence and its next.", _ITL_SECONDS),
    "request_time_per_output_token_seconds": ("From the first token to the last, for each after it.", _ITL_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step that ran the request.", _REQUEST_SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token.", _REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST_SECONDS),
}
COUNTS = {
    "request_params_n": ("The n of a request.", (1, 2, 5, 10, 20)),
    "request_num_preemptions": ("How often a sequence was preempted.", (1, 2, 3, 4, 5, 10, 20)),
}
LENGTHS = {
    "request_prompt_tokens": "Prompt tokens of a sequence.",
    "request_generation_tokens": "Tokens that a sequence generated.",
    "request_max_num_generation_tokens": "Tokens of the longest sequence of a request.",
    "request_params_max_tokens": "The max_tokens that a sequence ran with.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a sequence that no cache held.",
}
QUEUE_FULL = "max_num_queued_reqs"  # vLLM's name of the reason


def lengths_up_to(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … up to `most`."""
    found = (digit * 10**exponent for exponent in range(len(str(most))) for digit in (1, 2, 5))
    return [length for length in found if length <= most]


class RequestMetrics:
    """Histograms and counters that the server fills itself, without a prefix yet."""

    def __init__(self, model_name: str, max_model_len: int):
        labels = ["model_name"]
        self.model_name = model_name
        of_lengths = {name: (text, lengths_up_to(max_model_len)) for name, text in LENGTHS.items()}
        histograms: Mapping = SECONDS | COUNTS | of_lengths
        self.histograms = {
            name: Histogram(name, text, labels, registry=None, buckets=buckets)
            for name, (text, buckets) in histograms.items()
        }
        self.finished = Counter(
            "request_success", "Sequences finished, by reason.", [*labels, "finished_reason"], registry=None
        )
        self.rejected = Counter(
            "admission_rejections", "Requests refused at the door, by reason.", [*labels, "reason"], registry=None
        )
        self.rejected.labels(model_name, QUEUE_FULL)

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].labels(self.model_name).observe(max(value, 0.0))

    def count_rejected(self) -> None:
        self.rejected.labels(self.model_name, QUEUE_FULL).inc()

    def collect(self) -> Iterator[Metric]:
        for metric in (*self.histograms.values(), self.finished, self.rejected):
            yield from metric.collect()


class SequenceTimer:
    """Records the times and lengths of one sequence from its deltas."""

    def __init__(self, metrics: RequestMetrics, arrival: float, prompt_tokens: int, max_tokens: int | None):
        self.num_tokens = 0
        self._metrics = metrics
        self._clock = Clock(arrival)
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._cached_tokens = 0

    def on_delta(self, delta: TokenDelta) -> None:
        clock, now = self._clock, time.time()
        self._cached_tokens = self._cached_tokens or delta.num_cached_tokens
        if delta.token_ids:
            if clock.last is None:
                self._metrics.observe("time_to_first_token_seconds", now - clock.arrival)
            else:
                self._metrics.observe("inter_token_latency_seconds", now - clock.last)
            self.num_tokens += len(delta.token_ids)
        clock.on_delta(delta)
        if delta.finish_reason:
            self._on_finish(now, delta.finish_reason)
            self._metrics.observe("request_num_preemptions", delta.num_preemptions)

    def _on_finish(self, now: float, reason: str) -> None:
        clock, phases, scheduled = self._clock, self._clock.phases(1), self._clock.scheduled
        per_token = None if phases.decode is None or self.num_tokens < 2 else phases.decode / (self.num_tokens - 1)
        measured = {
            "e2e_request_latency_seconds": now - clock.arrival,
            "request_prompt_tokens": self._prompt_tokens,
            "request_generation_tokens": self.num_tokens,
            "request_params_max_tokens": self._max_tokens,
            "request_queue_time_seconds": phases.queue,
            "request_inference_time_seconds": None if scheduled is None else now - scheduled,
            "request_prefill_kv_computed_tokens": None
            if scheduled is None
            else self._prompt_tokens - self._cached_tokens,
            "request_prefill_time_seconds": phases.prefill,
            "request_decode_time_seconds": phases.decode,
            "request_time_per_output_token_seconds": per_token,
        }
        self._metrics.finished.labels(self._metrics.model_name, reason).inc()
        for name, value in measured.items():
            if value is not None:
                self._metrics.observe(name, value)


@dataclass(kw_only=True)
class ModelCall:
    """One question to the model for a request, and its result.

    Attributes:
        operation: "generate" or "embed".
        num_answers: sequences that were generated, of all prompts.
        prompts, answers: their texts, where the record is to have them.
        ended: when the last of it came, or it was given up.
    """

    operation: str
    model: str
    clock: Clock
    num_answers: int = 0
    prompt_tokens: int = 0
    params: SamplingParams | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    ended: float = 0.0


@dataclass
class Phases:
    """The phases of a request in seconds; None is not measured yet.

    Attributes:
        queue: from the request's arrival to the first step that ran it.
        prefill: from there to its first token.
        decode: from there to its last token so far, of `num_answers` sequences.
        padding: its share of the padding rows that its steps ran, once a sequence of it has ended.
    """

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    padding: float | None = None
    num_answers: int = 0

    def __add__(self, other: Phases) -> Phases:
        return Phases(
            _sum(self.queue, other.queue),
            _sum(self.prefill, other.prefill),
            _sum(self.decode, other.decode),
            _sum(self.padding, other.padding),
            self.num_answers + other.num_answers,
        )


@dataclass
class Clock:
    """A request's arrival, its first step, and its first and its last token so far, in seconds since the epoch."""

    arrival: float
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    padding: float | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        now = time.time()
        self.scheduled = self.scheduled or delta.first_scheduled_time
        if delta.token_ids:
            self.first, self.last = self.first or now, now
        if delta.finish_reason is not None:
            self.padding = _sum(self.padding, delta.padding)

    def phases(self, num_answers: int) -> Phases:
        queue, prefill = _between(self.arrival, self.scheduled), _between(self.scheduled, self.first)
        return Phases(queue, prefill, _between(self.first, self.last), self.padding, num_answers)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0)


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


@dataclass
class Usage:
    """Tokens of one request: cached ones are part of the prompt's, those of the reasoning of the completion's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    """Tokens tried ahead; the taken ones of them were the model's choice."""
    taken_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(operator.add, astuple(self), astuple(other)))
