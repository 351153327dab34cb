"""Prometheus metrics: the engine's counters read when scraped, request times recorded as they pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jaxllm.engine.front.messages import EngineStats, TokenDelta

if TYPE_CHECKING:
    from jaxllm.engine.front.async_llm import AsyncLLM

_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TTFT_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT_SECONDS),
    "inter_token_latency_seconds": ("Between one output of a sequence and its next.", _ITL_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step that ran the request.", _REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST_SECONDS),
}

# Names shared with vLLM.
GAUGES = {
    "num_requests_running": ("Sequences in the running batch.", lambda s: s.num_running),
    "num_requests_waiting": ("Sequences waiting for their first step.", lambda s: s.num_waiting),
    "kv_cache_usage_perc": ("Share of KV pages in use, 1 is all of them.", lambda s: _used_pages(s)),
}
COUNTERS = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    "num_preemptions": ("Sequences preempted to be recomputed.", lambda s: s.num_preemptions),
    "prompt_tokens": ("Prompt tokens processed.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.generation_tokens),
}

# Names of our own.
OWN_GAUGES = {
    "kv_pages": ("KV pages.", lambda s: s.num_pages),
    "kv_pages_free": (
        "KV pages not in use, those that still hold reusable prefixes included.",
        lambda s: s.num_free_pages,
    ),
    "compiles_pending": ("Buckets still to be compiled.", lambda s: s.compiles_pending),
    "step_host_seconds_mean": (
        "Host time of a step, everything but waiting for the device, averaged since the start.",
        lambda s: s.step_host_seconds / max(s.num_steps, 1),
    ),
    "step_device_wait_seconds_mean": (
        "Time a step waited for the device, averaged since the start.",
        lambda s: s.step_device_wait_seconds / max(s.num_steps, 1),
    ),
}
OWN_COUNTERS = {
    "steps": ("Steps run.", lambda s: s.num_steps),
    "step_host_seconds": (
        "Host time of all steps, everything but waiting for the device.",
        lambda s: s.step_host_seconds,
    ),
    "step_device_wait_seconds": ("Time all steps waited for the device.", lambda s: s.step_device_wait_seconds),
    "compile_seconds": ("Time spent compiling.", lambda s: s.compile_seconds),
}


class RequestMetrics:
    """Histograms and counters that the server fills itself, without a prefix yet."""

    def __init__(self, model_name: str):
        labels = ["model_name"]
        self.model_name = model_name
        self.histograms = {
            name: Histogram(name, text, labels, registry=None, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.finished = Counter(
            "request_success", "Sequences finished, by reason.", [*labels, "finished_reason"], registry=None
        )

    def observe(self, name: str, seconds: float) -> None:
        self.histograms[name].labels(self.model_name).observe(max(seconds, 0.0))

    def count_finished(self, reason: str) -> None:
        self.finished.labels(self.model_name, reason).inc()

    def collect(self) -> Iterator[Metric]:
        for metric in (*self.histograms.values(), self.finished):
            yield from metric.collect()


class SequenceTimer:
    """Records the times of one sequence from its deltas."""

    def __init__(self, metrics: RequestMetrics, arrival: float):
        self._metrics = metrics
        self._arrival = arrival
        self._scheduled: float | None = None
        self._first: float | None = None
        self._last = arrival

    def on_delta(self, delta: TokenDelta) -> None:
        now = time.time()
        self._scheduled = self._scheduled or delta.first_scheduled_time
        if delta.token_ids:
            if self._first is None:
                self._first = now
                self._metrics.observe("time_to_first_token_seconds", now - self._arrival)
            else:
                self._metrics.observe("inter_token_latency_seconds", now - self._last)
            self._last = now
        if delta.finish_reason:
            self._on_finish(now, delta.finish_reason)

    def _on_finish(self, now: float, reason: str) -> None:
        self._metrics.count_finished(reason)
        self._metrics.observe("e2e_request_latency_seconds", now - self._arrival)
        if self._scheduled is not None:
            self._metrics.observe("request_queue_time_seconds", self._scheduled - self._arrival)
            if self._first is not None:
                self._metrics.observe("request_prefill_time_seconds", self._first - self._scheduled)
        if self._first is not None:
            self._metrics.observe("request_decode_time_seconds", now - self._first)


class ServerCollector(Collector):
    """Everything /metrics shows, under `jaxllm:` and, where vLLM has the name and it is asked for, `vllm:`."""

    def __init__(self, engine: AsyncLLM, requests: RequestMetrics, vllm_metrics: bool):
        self._engine = engine
        self._requests = requests
        self._prefixes = ("jaxllm:", "vllm:") if vllm_metrics else ("jaxllm:",)
        self._model_name = requests.model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for prefix in self._prefixes:
            yield from self._families(prefix, stats, GAUGES, COUNTERS)
            for metric in self._requests.collect():
                yield _prefixed(metric, prefix)
        yield from self._families("jaxllm:", stats, OWN_GAUGES, OWN_COUNTERS)
        yield from self._compiles(stats)
        yield from self._buckets(stats)

    def _families(self, prefix: str, stats: EngineStats, gauges: dict, counters: dict) -> Iterator[Metric]:
        for family, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, read) in table.items():
                metric = family(prefix + name, text, labels=["model_name"])
                metric.add_metric([self._model_name], read(stats))
                yield metric

    def _compiles(self, stats: EngineStats) -> Iterable[Metric]:
        metric = CounterMetricFamily(
            "jaxllm:compiles", "Executables compiled, foreseen by the planner or not.", labels=["model_name", "kind"]
        )
        metric.add_metric([self._model_name, "foreseen"], stats.compiles_foreseen)
        metric.add_metric([self._model_name, "unforeseen"], stats.compiles_unforeseen)
        return [metric]

    def _buckets(self, stats: EngineStats) -> Iterable[Metric]:
        labels = ["model_name", "bucket"]
        real = CounterMetricFamily("jaxllm:bucket_scheduled_tokens", "Real tokens run, by bucket.", labels=labels)
        padding = CounterMetricFamily("jaxllm:bucket_padded_tokens", "Padding rows run, by bucket.", labels=labels)
        waste = GaugeMetricFamily(
            "jaxllm:padding_waste_ratio", "Padding rows among all rows run, by bucket.", labels=labels
        )
        for bucket in sorted(stats.scheduled_tokens.keys() | stats.padded_tokens.keys()):
            scheduled, padded = stats.scheduled_tokens.get(bucket, 0), stats.padded_tokens.get(bucket, 0)
            real.add_metric([self._model_name, bucket], scheduled)
            padding.add_metric([self._model_name, bucket], padded)
            waste.add_metric([self._model_name, bucket], padded / max(scheduled + padded, 1))
        return [real, padding, waste]


def build_registry(engine: AsyncLLM, requests: RequestMetrics, vllm_metrics: bool) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(engine, requests, vllm_metrics))
    return registry


def _used_pages(stats: EngineStats) -> float:
    return 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0


def _prefixed(metric: Metric, prefix: str) -> Metric:
    renamed = Metric(prefix + metric.name, metric.documentation, metric.type)
    renamed.samples = [
        Sample(prefix + s.name, s.labels, s.value, s.timestamp, s.exemplar)
        for s in metric.samples
        if not s.name.endswith("_created")
    ]
    return renamed
