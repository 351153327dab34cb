"""Traces and metrics of requests for OpenTelemetry, by its conventions for generative AI.

https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.request_log import Record
from jaxllm.serving.request_metrics import ModelCall

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

PROVIDER = "jaxllm"
EXPORT_SECONDS = 5  # the longest that a collector may take to accept data
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4.0**power for power in range(14))
HISTOGRAMS: Mapping[str, tuple[str, str, Sequence[float]]] = {
    "gen_ai.server.request.duration": ("s", "From a request's arrival to its last token.", _SECONDS),
    "gen_ai.server.time_to_first_token": ("s", "From a request's arrival to its first token.", _FIRST_SECONDS),
    "gen_ai.server.time_per_output_token": ("s", "Decoding, for each token after the first.", _TOKEN_SECONDS),
    "gen_ai.client.token.usage": ("{token}", "Tokens of prompts and of answers.", _TOKENS),
}
"""Name -> unit, description and the bounds of its buckets, as the conventions have them."""


def check_telemetry(config: ServerConfig) -> None:
    """Raises ConfigError where the settings ask for telemetry that cannot be sent."""
    for name in ("otlp_traces_endpoint", "otlp_metrics_endpoint"):
        endpoint = getattr(config, name)
        if endpoint is None:
            continue
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            path = name.split("_")[1]
            raise ConfigError(
                f"{name} is {endpoint!r}; it must be the URL of OTLP over HTTP, as http://localhost:4318/v1/{path}"
            )
        if not all(map(_is_installed, _PACKAGES)):
            raise ConfigError(f"{name} is set, which needs further packages: pip install 'jaxllm[otel]'")


class Telemetry:
    """An observer of records that sends their spans and measurements to a collector, from threads of its own.

    A request is a span of its caller's trace, if `traceparent` names one. Each call of the model is a span in it, and
    each phase of a call one in that. Raises as `check_telemetry`.
    """

    def __init__(self, config: ServerConfig):
        check_telemetry(config)
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.metrics import Histogram
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": PROVIDER}
        resource = Resource.create({"service.version": version("jaxllm"), **named})
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        if config.otlp_traces_endpoint is not None:
            exporter = OTLPSpanExporter(config.otlp_traces_endpoint, timeout=EXPORT_SECONDS)
            self._tracers.add_span_processor(BatchSpanProcessor(exporter))
        readers = []
        if config.otlp_metrics_endpoint is not None:
            sent = OTLPMetricExporter(config.otlp_metrics_endpoint, timeout=EXPORT_SECONDS)
            readers.append(PeriodicExportingMetricReader(sent))
        self._meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self._tracer = self._tracers.get_tracer("jaxllm", version("jaxllm"))
        meter = self._meters.get_meter("jaxllm", version("jaxllm"))
        self._histograms: dict[str, Histogram] = {
            name: meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=bounds)
            for name, (unit, text, bounds) in HISTOGRAMS.items()
        }

    def __call__(self, record: Record) -> None:
        """Only what was asked of a model, and what was refused, has a trace."""
        if record.calls or (record.method == "POST" and record.status >= 400):
            self._trace(record)
        for call in record.calls:
            self._measure(record, call)

    def close(self) -> None:
        self._tracers.shutdown()
        self._meters.shutdown()

    def _trace(self, record: Record) -> None:
        from opentelemetry.trace import SpanKind, format_trace_id, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        caller = TraceContextTextMapPropagator().extract(dict(record.headers))
        attributes = http_attributes(record)
        name = record.method if record.route is None else f"{record.method} {record.route}"
        began = _nanoseconds(record.began)
        span = self._tracer.start_span(name, caller, SpanKind.SERVER, attributes, start_time=began)
        record.trace_id = format_trace_id(span.get_span_context().trace_id)
        if record.status >= 400 or record.client_gone:
            _mark_failed(span, error_type(record))
        within = set_span_in_context(span)
        for call in record.calls:
            self._trace_call(record, call, within)
        span.end(_nanoseconds(record.ended))

    def _trace_call(self, record: Record, call: ModelCall, within: Context) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        clock, attributes = call.clock, call_attributes(record, call)
        name = f"{attributes['gen_ai.operation.name']} {call.model}"
        began = _nanoseconds(clock.arrival)
        span = self._tracer.start_span(name, within, SpanKind.INTERNAL, attributes, start_time=began)
        if "error.type" in attributes:
            _mark_failed(span, attributes["error.type"])
        phases = (
            ("queue", clock.arrival, clock.scheduled),
            ("prefill", clock.scheduled, clock.first),
            ("decode", clock.first, clock.last),
        )
        inside = set_span_in_context(span)
        for phase, start, end in phases:
            if start is not None and end is not None:
                part = self._tracer.start_span(phase, inside, start_time=_nanoseconds(start))
                part.end(_nanoseconds(max(start, end)))
        span.end(_nanoseconds(call.ended))

    def _measure(self, record: Record, call: ModelCall) -> None:
        labels = {name: value for name, value in call_attributes(record, call).items() if name in _MEASURED_BY}
        clock, histograms = call.clock, self._histograms
        histograms["gen_ai.server.request.duration"].record(max(call.ended - clock.arrival, 0.0), labels)
        for kind, tokens in (("input", call.prompt_tokens), ("output", call.completion_tokens)):
            if kind == "input" or call.operation == "generate":
                histograms["gen_ai.client.token.usage"].record(tokens, labels | {"gen_ai.token.type": kind})
        if clock.first is None or clock.last is None:
            return
        histograms["gen_ai.server.time_to_first_token"].record(max(clock.first - clock.arrival, 0.0), labels)
        timed = call.completion_tokens - call.num_answers
        if timed > 0:
            each = max(clock.last - clock.first, 0.0) * call.num_answers / timed
            histograms["gen_ai.server.time_per_output_token"].record(each, labels)


_MEASURED_BY = frozenset({
    "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model", "error.type",
    "server.address", "server.port",
})  # fmt: skip
"""The attributes of a span that its measurements have too: those that take few values."""


def http_attributes(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
    }
    if record.route is not None:
        found["http.route"] = record.route
    if record.status >= 400 or record.client_gone:
        found["error.type"] = error_type(record)
    return found | _server(record)


def call_attributes(record: Record, call: ModelCall) -> dict[str, Any]:
    """The attributes of a call's span, without those that were not asked for or are not known."""
    operation = "text_completion" if record.path.rstrip("/") in ("/v1/completions", "/completions") else "chat"
    found: dict[str, Any] = {
        "gen_ai.operation.name": "embeddings" if call.operation == "embed" else operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
    }
    if call.operation == "generate":
        found["gen_ai.usage.output_tokens"] = call.completion_tokens
        found["gen_ai.response.finish_reasons"] = call.finish_reasons
        found["gen_ai.output.type"] = "text"
    params = call.params
    if params is not None:
        found |= {
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.stop_sequences": list(params.stop) or None,
        }
    if call.prompts or call.answers:
        found["gen_ai.input.messages"] = _messages("user", call.prompts)
        found["gen_ai.output.messages"] = _messages("assistant", call.answers, call.finish_reasons)
    if failed := next((reason for reason in call.finish_reasons if reason in ("abort", "error")), None):
        found["error.type"] = error_type(record) if record.client_gone or record.status >= 400 else failed
    return {name: value for name, value in (found | _server(record)).items() if value is not None}


def error_type(record: Record) -> str:
    return "client_gone" if record.client_gone else str(record.status)


def _server(record: Record) -> dict[str, Any]:
    if record.server is None:
        return {}
    host, port = record.server
    return {"server.address": host} if port is None else {"server.address": host, "server.port": port}


def _messages(role: str, texts: Sequence[str], finish_reasons: Sequence[str] = ()) -> str:
    said: list[dict[str, Any]] = [{"role": role, "parts": [{"type": "text", "content": text}]} for text in texts]
    for message, reason in zip(said, finish_reasons, strict=False):
        message["finish_reason"] = reason
    return json.dumps(said, ensure_ascii=False)


def _mark_failed(span: Span, why: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, why)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # one that it would be a part of
        return False


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
