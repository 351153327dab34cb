"""Usage by key, as /metrics shows it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxllm.serving.access.tenant import Tenant
from jaxllm.serving.access.usage import Ledger

NO_KEY = "-"
"""What requests without a key of the file are counted under: no key is called that."""

COUNTERS = {
    "key_requests": ("Requests for a model, by API key.", lambda used: used.requests),
    "key_prompt_tokens": ("Prompt tokens, by API key.", lambda used: used.prompt_tokens),
    "key_prompt_tokens_cached": ("Those of them that the prefix cache held.", lambda used: used.cached_tokens),
    "key_generation_tokens": ("Tokens generated, by API key.", lambda used: used.completion_tokens),
}


def usage_by_key(ledger: Ledger, reader: Tenant) -> bytes:
    """In Prometheus' format, what keys have used since the start: all of them for an admin, for another its own."""
    shown = CollectorRegistry()
    shown.register(_Usage(ledger, reader))
    return generate_latest(shown)


class _Usage(Collector):
    def __init__(self, ledger: Ledger, reader: Tenant):
        self._ledger, self._reader = ledger, reader

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in COUNTERS.items():
            metric = CounterMetricFamily(f"jaxllm:{name}", text, labels=["api_key", "model_name"])
            for (owner, model), used in sorted(self._ledger.totals.items()):
                if self._reader.admin or owner == self._reader.group:
                    metric.add_metric([owner or NO_KEY, model], read(used))
            yield metric
