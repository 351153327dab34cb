"""/metrics: the engine's counters, read when scraped, beside what request_metrics.py recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from math import ceil

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jaxllm.engine.messages import STEP_TOKENS, EngineStats
from jaxllm.serving.access.usage import Collected
from jaxllm.serving.served_model import LoadableModel
from jaxllm.serving.state import Registry

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Read = str | Callable[[EngineStats], float]
"""An attribute of the statistics, or what is computed of them."""

# Names shared with vLLM.
GAUGES: dict[str, tuple[str, Read]] = {
    "num_requests_running": ("Sequences in the running batch.", "num_running"),
    "num_requests_waiting": ("Sequences waiting for their first step.", lambda s: s.num_waiting + s.num_preparing),
    "kv_cache_usage_perc": (
        "Share of KV pages in use, 1 is all of them.",
        lambda s: 1 - s.num_free_pages / s.num_pages if s.num_pages else 0.0,
    ),
}
COUNTERS: dict[str, tuple[str, Read]] = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    "external_prefix_cache_queries": (
        "Prompt tokens that the devices did not hold, looked up in host memory.",
        "offload_queries",
    ),
    "external_prefix_cache_hits": ("Prompt tokens found in host memory.", "offload_hits"),
    "num_preemptions": ("Sequences preempted to be recomputed.", "num_preemptions"),
    "prompt_tokens": ("Prompt tokens processed.", "prompt_tokens"),
    "prompt_tokens_cached": ("Those of them that the prefix cache held.", "cached_prompt_tokens"),
    "spec_decode_num_drafts": ("Times that tokens were tried ahead with a sequence.", "num_drafts"),
    "spec_decode_num_draft_tokens": ("Tokens tried ahead.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": (
        "Those of them that were the model's choice.",
        lambda s: sum(s.accepted_by_position),
    ),
    "generation_tokens": ("Tokens generated.", "generation_tokens"),
}

# Names of our own.
OWN_GAUGES: dict[str, tuple[str, Read]] = {
    "kv_pages": ("KV pages.", "num_pages"),
    "kv_pages_free": ("KV pages not in use, those that still hold reusable prefixes included.", "num_free_pages"),
    "kv_pages_host": ("KV pages and states of prefixes kept in host memory.", "num_host_pages"),
    "kv_pages_disk": ("KV pages and states of prefixes kept on disk.", "num_disk_pages"),
    "engine_resident_memory_bytes": ("Host memory that the engine's process holds.", "resident_bytes"),
    "compiles_pending": ("Buckets still to be compiled.", "compiles_pending"),
    "step_host_seconds_mean": (
        "Host time of a step, everything but waiting for the device, averaged since the start.",
        lambda s: s.step_host_seconds / max(s.num_steps, 1),
    ),
    "step_device_wait_seconds_mean": (
        "Time a step waited for the device, averaged since the start.",
        lambda s: s.step_device_wait_seconds / max(s.num_steps, 1),
    ),
}
OWN_COUNTERS: dict[str, tuple[str, Read]] = {
    "steps": ("Steps run.", "num_steps"),
    "step_host_seconds": ("Host time of all steps, everything but waiting for the device.", "step_host_seconds"),
    "step_device_wait_seconds": ("Time all steps waited for the device.", "step_device_wait_seconds"),
    "compile_seconds": ("Time spent compiling.", "compile_seconds"),
    "kv_transfer_pulls": ("Requests whose KV pages were to be fetched from another server.", "num_pulls"),
    "kv_transfer_failures": (
        "Those of them that did not get all pages, and were computed here or failed.",
        "num_failed_pulls",
    ),
    "kv_transfer_seconds": ("Time that they waited for pages.", "pull_seconds"),
    "kv_transfer_pages_fetched": ("KV pages and states fetched from other servers.", "num_pulled_pages"),
    "kv_transfer_pages_given": ("KV pages and states sent to other servers.", "num_given_pages"),
}


class ServerCollector(Collector):
    """All models' metrics; with `vllm_names` under vLLM's names too."""

    def __init__(self, registry: Registry, *, vllm_names: bool):
        self._registry, self._vllm_names = registry, vllm_names

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model in self._registry:
            for metric in ModelMetrics(model, vllm_names=self._vllm_names).collect():
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples += metric.samples
        yield from families.values()


class ModelMetrics:
    """One model's, under `jaxllm:` and, where vLLM has the name and it is asked for, `vllm:`."""

    def __init__(self, model: LoadableModel, *, vllm_names: bool):
        self._model = model
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        """Nothing of a model that was never loaded; of one that is unloaded, what it counted."""
        if self._model.info is None:
            return
        stats = self._model.stats()
        shared = [*self._shared(stats)]
        for metric in shared:
            yield _prefixed(metric, "jaxllm:")
        for metric in shared if self._vllm_names else ():
            yield _prefixed(metric, "vllm:", engine="0")
        for metric in self._own(stats):
            yield _prefixed(metric, "jaxllm:")

    def _shared(self, stats: EngineStats) -> Iterator[Metric]:
        """The metrics that vLLM has too."""
        yield from self._simple(stats, GAUGES, COUNTERS)
        reasons = {"capacity": stats.num_waiting, "deferred": stats.num_preparing}
        text = "Sequences waiting for their first step: for a place in one, or deferred until their grammar is ready."
        yield self._family(GaugeMetricFamily, "num_requests_waiting_by_reason", text, "reason", reasons)
        cached = stats.cached_prompt_tokens
        sources = {"local_compute": stats.prompt_tokens - cached, "local_cache_hit": cached}
        text = "Prompt tokens processed, by where their keys and values come from."
        yield self._family(CounterMetricFamily, "prompt_tokens_by_source", text, "source", sources)
        positions = {str(position): count for position, count in enumerate(stats.accepted_by_position)}
        text = "Tokens tried ahead that were the model's choice, by how far ahead they were."
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._family(CounterMetricFamily, name, text, "position", positions)
        yield self._steps(stats)
        now = None if (served := self._model.served) is None else served.engine.sleep_level
        levels = enumerate(("awake", "weights_offloaded", "discard_all"))
        states = {state: float(level == now) for level, state in levels}
        text = "1 for the state that the engine is in: awake, or asleep with its weights in memory or without them."
        yield self._family(GaugeMetricFamily, "engine_sleep_state", text, "sleep_state", states)
        yield self._cache_config()
        if self._model.config.enable_lora:
            text = "When this was read, in seconds since 1970; the labels say which adapters requests use."
            labels = {
                "max_lora": self._model.config.max_loras,
                "running_lora_adapters": ",".join(sorted(stats.running_adapters)),
                "waiting_lora_adapters": ",".join(sorted(stats.waiting_adapters)),
            }
            yield self._info("lora_requests_info", text, labels, time.time())
        if self._model.metrics is not None:
            yield from self._model.metrics.collect()

    def _own(self, stats: EngineStats) -> Iterator[Metric]:
        yield from self._simple(stats, OWN_GAUGES, OWN_COUNTERS)
        text = "Planned memory of each device: weights, KV cache and a step's own."
        assert self._model.info is not None
        yield self._info("engine_planned_memory_bytes", text, {}, self._model.info.planned_memory)
        kinds = {"foreseen": stats.compiles_foreseen, "unforeseen": stats.compiles_unforeseen}
        text = "Executables compiled, foreseen by the planner or not."
        yield self._family(CounterMetricFamily, "compiles", text, "kind", kinds)
        buckets = sorted(stats.scheduled_tokens.keys() | stats.padded_tokens.keys())
        real = {bucket: stats.scheduled_tokens.get(bucket, 0) for bucket in buckets}
        padding = {bucket: stats.padded_tokens.get(bucket, 0) for bucket in buckets}
        waste = {bucket: padding[bucket] / max(real[bucket] + padding[bucket], 1) for bucket in buckets}
        text = "Real tokens run, by bucket."
        yield self._family(CounterMetricFamily, "bucket_scheduled_tokens", text, "bucket", real)
        text = "Padding rows run, by bucket."
        yield self._family(CounterMetricFamily, "bucket_padded_tokens", text, "bucket", padding)
        text = "Padding rows among all rows run, by bucket."
        yield self._family(GaugeMetricFamily, "padding_waste_ratio", text, "bucket", waste)

    def _simple(self, stats: EngineStats, gauges: dict, counters: dict) -> Iterator[Metric]:
        for family, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, read) in table.items():
                metric = family(name, text, labels=["model_name"])
                metric.add_metric([self._model.name], getattr(stats, read) if isinstance(read, str) else read(stats))
                yield metric

    def _family(self, family: Family, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        metric = family(name, text, labels=["model_name", label])
        for value, count in values.items():
            metric.add_metric([self._model.name, value], count)
        return metric

    def _info(self, name: str, text: str, labels: Mapping[str, object], value: float) -> Metric:
        metric = GaugeMetricFamily(name, text, labels=["model_name", *labels])
        metric.add_metric([self._model.name, *map(str, labels.values())], value)
        return metric

    def _steps(self, stats: EngineStats) -> Metric:
        text = "Tokens that one step ran, prompts' and generated ones."
        metric = HistogramMetricFamily("iteration_tokens_total", text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
        buckets = list(zip(bounds, accumulate(stats.steps_by_tokens), strict=True))
        metric.add_metric([self._model.name], buckets, stats.step_tokens)
        return metric

    def _cache_config(self) -> Metric:
        info, config = self._model.info, self._model.config
        assert info is not None
        labels = {
            "block_size": info.page_size,
            "num_gpu_blocks": info.num_pages,
            "kv_cache_size_tokens": info.num_pages * info.page_size,
            "kv_cache_max_concurrency": round(info.num_pages / ceil(info.max_model_len / max(info.page_size, 1)), 2),
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_cache_memory_bytes": config.kv_cache_memory,
        }
        return self._info("cache_config_info", "Always 1; the labels say how the KV cache is laid out.", labels, 1)


def merged(texts: Mapping[str, str]) -> bytes:
    """The /metrics of several servers, by their names, in one text: each sample has its server as `replica`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for metric in text_string_to_metric_families(text):
            known = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            known.samples += [sample._replace(labels={**sample.labels, "replica": name}) for sample in metric.samples]
    return generate_latest(Collected(families.values()))


def _prefixed(metric: Metric, prefix: str, **labels: str) -> Metric:
    renamed = Metric(prefix + metric.name, metric.documentation, metric.type)
    renamed.samples = [
        Sample(prefix + s.name, {**s.labels, **labels}, s.value, s.timestamp, s.exemplar)
        for s in metric.samples
        if not s.name.endswith("_created")
    ]
    return renamed
