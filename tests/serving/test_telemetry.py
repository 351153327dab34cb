"""Traces and metrics as a collector gets them, over OTLP and HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.serving import telemetry
from jaxllm.serving.telemetry import HISTOGRAMS, Telemetry, check_telemetry
from tests.serving.api_surface import BODIES
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import CACHED, REPLY, FakeEngine
from tests.serving.openai.test_chat import HELLO

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector:
    """Takes what is exported, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        took = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    took.traces.append(ExportTraceServiceRequest.FromString(body))
                else:
                    took.metrics.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def points(self, name: str) -> list[tuple[dict[str, Any], int, float]]:
        """(attributes, count, sum) of a histogram, as it was sent last."""
        found = [
            metric
            for resource in self.metrics[-1].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        return [
            (attributes(point), point.count, point.sum) for metric in found for point in metric.histogram.data_points
        ]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.01,))
    thread.start()
    yield collector
    collector.server.shutdown()
    thread.join()
    collector.server.server_close()


@pytest.fixture
def traced(make_client: Callable[..., TestClient], engine: FakeEngine, collector: Collector) -> TestClient:
    return make_client(engine, otlp_traces_endpoint=f"{collector.url}/v1/traces")


def attributes(holder: Any) -> dict[str, Any]:
    """{"a": 1, "b": ["x"]}"""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in holder.attributes}


def trace_of(collector: Collector, count: int) -> list[Span]:
    """So many spans, a parent before its children, which are in the order of time."""
    wait_for(lambda: len(collector.spans) >= count)
    spans = collector.spans
    assert len(spans) == count
    ids = {span.span_id for span in spans}
    found = [span for span in spans if span.parent_span_id not in ids]
    for parent in found:
        mine = [span for span in spans if span.parent_span_id == parent.span_id]
        found += sorted(mine, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
    return found


def test_a_request_goes_on_in_its_callers_trace(traced: TestClient, engine: FakeEngine, collector: Collector) -> None:
    engine.delay = 0.01
    body = {"messages": HELLO, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["zzz"]}
    answer = traced.post("/v1/chat/completions", json=body, headers=CALLER).json()
    request, call, queue, prefill, decode = trace_of(collector, 5)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert request.parent_span_id.hex() == PARENT and request.kind == Span.SPAN_KIND_SERVER
    assert request.name == "POST /v1/chat/completions"
    told = attributes(request)
    assert (told["http.request.method"], told["http.route"]) == ("POST", "/v1/chat/completions")
    assert told["http.response.status_code"] == 200 and "error.type" not in told
    assert call.name == "chat fake" and call.parent_span_id == request.span_id
    told = attributes(call)
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxllm",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.output.type": "text",
        "gen_ai.usage.input_tokens": len(engine.seen[-1][0]),
        "gen_ai.usage.cache_read.input_tokens": CACHED,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": told["gen_ai.request.top_k"],
        "gen_ai.request.seed": 3,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.stop_sequences": ["zzz"],
        "server.address": "localhost",
        "server.port": 80,
    }
    phases = [queue, prefill, decode]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert all(span.parent_span_id == call.span_id for span in phases)
    edges = [time for span in phases for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert edges == sorted(edges) and edges[1] == edges[2] and edges[3] == edges[4]
    assert call.start_time_unix_nano == edges[0] and edges[-1] <= call.end_time_unix_nano
    assert request.start_time_unix_nano <= edges[0] and call.end_time_unix_nano <= request.end_time_unix_nano
    assert REPLY[:5] not in str(collector.traces) and "[user]" not in str(collector.traces)


def test_a_request_without_one_begins_a_trace(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
    request, call, *_ = trace_of(collector, 5)
    assert request.parent_span_id == b"" and len(request.trace_id) == 16
    assert call.name == "text_completion fake"
    [resource] = {str(sent.resource_spans[0].resource) for sent in collector.traces}
    assert "jaxllm" in resource and "service.name" in resource


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_api_is_traced(traced: TestClient, collector: Collector, path: str, stream: bool) -> None:
    traced.post(path, json=BODIES[path] | {"stream": stream})
    request, call, *_ = trace_of(collector, 5)
    assert request.name == f"POST {path}" and call.name == "chat fake"


def test_vectors_have_no_phases(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/embeddings", json={"input": "Hi"})
    _, call = trace_of(collector, 2)
    told = attributes(call)
    assert call.name == "embeddings fake" and told["gen_ai.usage.input_tokens"] > 0
    assert "gen_ai.usage.output_tokens" not in told


def test_texts_are_sent_where_that_is_asked_for(
    make_client: Callable[..., TestClient], engine: FakeEngine, collector: Collector
) -> None:
    client = make_client(engine, otlp_traces_endpoint=f"{collector.url}/v1/traces", log_prompts=True)
    client.post("/v1/chat/completions", json={"messages": HELLO})
    told = attributes(trace_of(collector, 5)[1])
    part = {"type": "text", "content": "[user]Hi[assistant]"}
    assert json.loads(told["gen_ai.input.messages"]) == [{"role": "user", "parts": [part]}]
    [said] = json.loads(told["gen_ai.output.messages"])
    assert said == {"role": "assistant", "parts": [{"type": "text", "content": REPLY}], "finish_reason": "stop"}


def test_what_is_refused_is_an_error(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/chat/completions", json={"messages": 3}, headers=CALLER)
    [request] = trace_of(collector, 1)
    assert request.status.code == Status.STATUS_CODE_ERROR and request.parent_span_id.hex() == PARENT
    assert attributes(request)["error.type"] == "400"


def test_a_client_that_goes_away_is_an_error(listen: Callable[..., str], collector: Collector) -> None:
    url = listen(FakeEngine(delay=0.05, reply="x" * 200), otlp_traces_endpoint=f"{collector.url}/v1/traces")
    asked = {"prompt": "Hi", "stream": True, "max_tokens": 200}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked) as answer:
        next(answer.iter_lines())
    request, call, *_ = trace_of(collector, 5)
    for span in (request, call):
        assert span.status.code == Status.STATUS_CODE_ERROR and attributes(span)["error.type"] == "client_gone"
    assert attributes(call)["gen_ai.response.finish_reasons"] == ["abort"]


def test_what_is_not_sampled_and_what_asks_no_model_has_no_trace(traced: TestClient, collector: Collector) -> None:
    for path in ("/v1/models", "/health", "/metrics", "/v1/nowhere"):
        traced.get(path)
    unsampled = {"traceparent": CALLER["traceparent"][:-1] + "0"}
    traced.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, headers=unsampled)
    traced.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
    trace_of(collector, 5)


def test_measurements(make_client: Callable[..., TestClient], engine: FakeEngine, collector: Collector) -> None:
    client = make_client(engine, otlp_metrics_endpoint=f"{collector.url}/v1/metrics")
    engine.delay = 0.01
    prompt = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 5}).json()["usage"]["prompt_tokens"]
    client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3, "n": 2})
    client.post("/v1/embeddings", json={"input": "Hi"})
    wait_for(lambda: bool(collector.metrics) and sum(c for _, c, _ in collector.points(DURATION)) == 3)
    labels = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "jaxllm", "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake", "server.address": "localhost", "server.port": 80,
    }  # fmt: skip
    tokens = {
        (told["gen_ai.operation.name"], told["gen_ai.token.type"]): (count, total)
        for told, count, total in collector.points("gen_ai.client.token.usage")
    }
    assert tokens["text_completion", "output"] == (2, 5 + 6) and tokens["text_completion", "input"][0] == 2
    assert tokens["text_completion", "input"][1] == 2 * prompt and ("embeddings", "output") not in tokens
    [[told, count, seconds]] = collector.points("gen_ai.server.time_to_first_token")
    assert (told, count) == (labels, 2) and seconds > 0
    [[_, count, each]] = collector.points("gen_ai.server.time_per_output_token")
    whole = sum(total for told, _, total in collector.points(DURATION) if told == labels)
    assert count == 2 and 0 < each < whole


DURATION = "gen_ai.server.request.duration"


def test_names_are_those_of_the_conventions(collector: Collector, traced: TestClient) -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    traced.post("/v1/chat/completions", json={"messages": HELLO, "seed": 1, "stop": "z", "max_tokens": 5})
    told = {name for name in attributes(trace_of(collector, 5)[1]) if name.startswith("gen_ai.")}
    assert told <= known, told - known
    metrics = {value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI_")}
    assert set(HISTOGRAMS) <= metrics


def test_a_collector_that_is_not_there_stops_nothing(
    make_client: Callable[..., TestClient], engine: FakeEngine, collector: Collector
) -> None:
    client = make_client(engine, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4318", "http://"])
@pytest.mark.parametrize("name", ["traces", "metrics"])
def test_an_endpoint_that_is_none(name: str, endpoint: str) -> None:
    told = f"^otlp_{name}_endpoint is '{endpoint}'; it must be the URL of OTLP over HTTP, as http://localhost:4318/v1/{name}$"
    with pytest.raises(ConfigError, match=told):
        check_telemetry(ServerConfig(**{f"otlp_{name}_endpoint": endpoint}))


def test_without_the_packages_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(telemetry, "find_spec", find)
    config = ServerConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match=r"^otlp_traces_endpoint is set, .*: pip install 'jaxllm\[otel\]'$"):
        Telemetry(config)
