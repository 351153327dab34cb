"""The metrics of several servers as one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merged(texts: Mapping[str, str]) -> bytes:
    """What several servers say at /metrics, by their names, in one text: each sample has its server as `replica`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for metric in text_string_to_metric_families(text):
            known = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            known.samples += [sample._replace(labels={**sample.labels, "replica": name}) for sample in metric.samples]
    return generate_latest(_Families(families.values()))


class _Families(Collector):
    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
