"""Models, tokenizer routes, probes, metrics, and the OpenAPI document."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fastapi.routing
import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.config import ServeConfig
from jaxllm.engine.messages import EngineStats
from jaxllm.errors import ConfigError
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import BOS, CONTEXT, REPLY, TEMPLATE, FakeEngine, app_of
from tests.support.covers import covers

HELLO = [{"role": "user", "content": "Hi"}]


@covers("GET /v1/models")
@covers("GET /v1/models/{model}")
def test_models(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, model="org/name", served_model_name="org/name, short")
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert all(m["has_chat_template"] for m in listed["data"])
    assert [(m["id"], m["object"], m["max_model_len"]) for m in listed["data"]] == [
        ("org/name", "model", CONTEXT),
        ("short", "model", CONTEXT),
    ]
    assert {m["num_parameters"] for m in listed["data"]} == {engine.info.num_parameters}
    assert client.get("/v1/models/org/name").json() == listed["data"][0]
    assert client.get("/models/short").json()["id"] == "short"
    assert client.post("/v1/completions", json={"model": "short", "prompt": "x"}).json()["model"] == "short"
    assert client.post("/v1/completions", json={"prompt": "x"}).json()["model"] == "org/name"


@pytest.mark.skipif(not hasattr(fastapi.routing, "_EffectiveRouteContext"), reason="FastAPI reads routes elsewhere")
def test_no_request_waits_for_routes_to_be_read(
    make_client: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    client = make_client(engine)
    found = fastapi.routing._EffectiveRouteContext.from_api_route
    monkeypatch.setattr(
        fastapi.routing._EffectiveRouteContext, "from_api_route", lambda **given: read.append(given) or found(**given)
    )
    paths = ("/v1/models", "/models", "/health", "/v1/nothing")
    assert [client.get(path).status_code for path in paths] == [200, 200, 200, 404]
    assert read == []


@covers("POST /v1/tokenize")
@covers("TokenizeRequest", "prompt", "content", "messages", "add_special_tokens", "add_special")
@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "Hi"}, [BOS, 72, 105]),
        ({"prompt": "Hi", "add_special_tokens": False}, [72, 105]),
        ({"prompt": ""}, [BOS]),
        ({"content": "Hi"}, [72, 105]),
        ({"content": "Hi", "add_special": True}, [BOS, 72, 105]),
        ({"messages": HELLO}, list(b"[user]Hi[assistant]")),
        ({"messages": HELLO, "add_generation_prompt": False}, list(b"[user]Hi")),
    ],
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokenize(client: TestClient, path: str, fields: dict[str, Any], tokens: list[int]) -> None:
    body = client.post(path, json=fields).json()
    assert body == {"count": len(tokens), "max_model_len": CONTEXT, "tokens": tokens, "token_strs": None}


@covers("TokenizeRequest", "return_token_strs")
def test_tokenize_strings(client: TestClient) -> None:
    assert client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json()["token_strs"] == [
        "<s>",
        "H",
        "i",
    ]


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "content": "b"}, {"prompt": "a", "add_special": True}])
def test_tokenize_refuses(client: TestClient, fields: dict[str, Any]) -> None:
    assert client.post("/tokenize", json=fields).status_code == 400


@covers("POST /v1/detokenize")
@covers("DetokenizeRequest", "tokens")
def test_detokenize(client: TestClient) -> None:
    assert client.post("/detokenize", json={"tokens": [BOS, 72, 105]}).json() == {"prompt": "<s>Hi", "content": "<s>Hi"}
    for wrong in (-1, 300):
        error = client.post("/detokenize", json={"tokens": [72, wrong]}).json()["error"]
        assert error["param"] == "tokens[1]" and "299" in error["message"]


@covers("GET /health")
@covers("GET /ready")
@covers("GET /version")
def test_probes(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").status_code == 200
    engine.ready = False
    response = client.get("/ready")
    assert response.status_code == 503 and response.json()["error"]["code"] == "starting"
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"][0].isdigit()


@covers("GET /load")
def test_load_counts_running_requests(listen: Any, engine: FakeEngine) -> None:
    engine.delay = 0.2
    url = listen(engine)
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
        text = response.iter_text()  # kept: a generator that is dropped closes the response
        next(text)
        assert httpx.get(f"{url}/load").json() == {"server_load": 1}
    wait_for(lambda: httpx.get(f"{url}/load").json() == {"server_load": 0})


@covers("GET /v1/tokenizer_info")
def test_tokenizer_info(make_client: Any, engine: FakeEngine) -> None:
    info = make_client(engine, reasoning_parser="think").get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["eos_token_ids"]) == ("<s>", "</s>", [257])
    assert (info["model_max_length"], info["chat_template"]) == (CONTEXT, TEMPLATE)
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("json", "think")


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parser_is_refused_at_the_start(engine: FakeEngine, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is 'latin'; it must be one of auto, none, "):
        app_of(ServeConfig(**{setting: "latin"}), engine)


def scrape(client: TestClient) -> dict[tuple[str, ...], float]:
    """(sample name, label values but the model's and the engine's …) -> value"""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (
            sample.name,
            *(value for label, value in sorted(sample.labels.items()) if label not in ("model_name", "engine")),
        ): sample.value
        for family in families
        for sample in family.samples
    }


@covers("GET /metrics")
def test_metrics(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, vllm_metrics=True)
    client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 5, "n": 2})
    client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    samples = scrape(client)
    for prefix in ("jaxllm:", "vllm:"):
        assert samples[f"{prefix}num_requests_running",] == 0
        assert samples[f"{prefix}num_requests_waiting",] == 0
        assert samples[f"{prefix}kv_cache_usage_perc",] == 0
        assert samples[f"{prefix}prefix_cache_hits_total",] == 20
        assert samples[f"{prefix}prefix_cache_queries_total",] == 50
        assert samples[f"{prefix}num_preemptions_total",] == 2
        assert samples[f"{prefix}prompt_tokens_total",] == 11
        assert samples[f"{prefix}generation_tokens_total",] == 22
        assert samples[f"{prefix}request_success_total", "length"] == 2
        assert samples[f"{prefix}request_success_total", "stop"] == 1
        assert samples[f"{prefix}inter_token_latency_seconds_count",] == 2 * 4 + len(REPLY) - 1
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
            assert samples[f"{prefix}{name}_seconds_count",] == 3
        assert samples[f"{prefix}request_decode_time_seconds_bucket", "+Inf"] == 3
    assert samples["jaxllm:padding_waste_ratio", "decode-4"] == 0.25
    assert samples["jaxllm:compiles_total", "unforeseen"] == 1
    assert samples["jaxllm:step_host_seconds_mean",] == 0.0005
    assert samples["jaxllm:compile_seconds_total",] == 7.5
    assert samples["jaxllm:kv_pages_free",] == samples["jaxllm:kv_pages",] == 100


COUNTED = EngineStats(
    num_waiting=3, num_preparing=1, prompt_tokens=11, cached_prompt_tokens=5, step_tokens=40,
    steps_by_tokens=[1, 0, 3, *[0] * 11],
)  # fmt: skip


def test_metrics_in_vllms_names(make_client: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(engine, vllm_metrics=True)
    client.post("/v1/completions", json={"prompt": ["Hi", "Hello"], "max_tokens": 5, "n": 2})
    client.post("/v1/completions", json={"prompt": [1, 2, 3, 4], "max_tokens": 20})
    engine.queue_limit = 0
    for path, fields in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
        assert client.post(path, json=fields).status_code == 429
    monkeypatch.setattr(engine, "stats", lambda: COUNTED)
    samples = scrape(client)
    for prefix in ("jaxllm:", "vllm:"):
        for name, values in {
            "request_prompt_tokens": [3, 3, 6, 6, 4],
            "request_generation_tokens": [5, 5, 5, 5, 20],
            "request_params_max_tokens": [5, 5, 5, 5, 20],
            "request_prefill_kv_computed_tokens": [0, 0, 3, 3, 1],
            "request_num_preemptions": [0, 0, 0, 0, 0],
            "request_params_n": [2, 2, 1],
            "request_max_num_generation_tokens": [5, 5, 20],
        }.items():
            assert samples[f"{prefix}{name}_count",] == len(values), name
            assert samples[f"{prefix}{name}_sum",] == sum(values), name
        assert samples[f"{prefix}request_inference_time_seconds_count",] == 5
        assert samples[f"{prefix}request_time_per_output_token_seconds_count",] == 5
        assert samples[f"{prefix}request_prompt_tokens_bucket", "5.0"] == 3
        assert samples[f"{prefix}admission_rejections_total", "max_num_queued_reqs"] == 2
        assert samples[f"{prefix}num_requests_waiting",] == 4
        assert samples[f"{prefix}num_requests_waiting_by_reason", "capacity"] == 3
        assert samples[f"{prefix}num_requests_waiting_by_reason", "deferred"] == 1
        assert samples[f"{prefix}prompt_tokens_cached_total",] == 5
        assert samples[f"{prefix}prompt_tokens_by_source_total", "local_compute"] == 6
        assert samples[f"{prefix}prompt_tokens_by_source_total", "local_cache_hit"] == 5
        assert samples[f"{prefix}iteration_tokens_total_bucket", "1.0"] == 1
        assert samples[f"{prefix}iteration_tokens_total_bucket", "16.0"] == 4
        assert samples[f"{prefix}iteration_tokens_total_bucket", "+Inf"] == 4
        assert samples[f"{prefix}iteration_tokens_total_sum",] == 40
    text = client.get("/metrics").text
    (info,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in info and 'num_gpu_blocks="100"' in info and 'engine="0"' in info
    assert 'kv_cache_size_tokens="1600"' in info and 'kv_cache_max_concurrency="6.25"' in info
    assert all('engine="0"' in line for line in text.splitlines() if line.startswith("vllm:"))


def test_adapters_in_use_are_named(make_client: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = EngineStats(running_adapters={"sql": 3, "a b": 1}, waiting_adapters={"poems": 2})
    monkeypatch.setattr(engine, "stats", lambda: now)
    client, before = make_client(engine, vllm_metrics=True, enable_lora=True, max_loras=4), time.time()
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    for label in ('max_lora="4"', 'running_lora_adapters="a b,sql"', 'waiting_lora_adapters="poems"'):
        assert label in line
    assert before - 1 <= float(line.rpartition(" ")[2]) <= time.time()
    assert "lora_requests_info" not in make_client(engine, vllm_metrics=True).get("/metrics").text


def test_every_name_is_documented_and_no_name_is_left_out_unsaid(make_client: Any, engine: FakeEngine) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    client = make_client(engine, vllm_metrics=True)
    client.post("/v1/completions", json={"prompt": "x"})
    families = text_string_to_metric_families(client.get("/metrics").text)
    shown = {family.name.removeprefix("vllm:") for family in families if family.name.startswith("vllm:")}
    assert not [name for name in shown if f"`{name}`" not in page and f"`{name}_total`" not in page]
    assert not [name for name in VLLM_NAMES if name not in shown and f"`{name}`" not in page]


VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "engine_sleep_state",
    "kv_cache_usage_perc",
    "corrupted_requests",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "mm_cache_queries",
    "mm_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "prompt_tokens_recomputed",
    "generation_tokens",
    "request_success",
    "admission_rejections",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
    "lora_requests_info",
    "cache_config_info",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "estimated_flops_per_gpu",
    "estimated_read_bytes_per_gpu",
    "estimated_write_bytes_per_gpu",
]
"""Of vLLM 0.32."""


def test_vllm_names_only_on_request(client: TestClient) -> None:
    assert not any(name.startswith("vllm:") for name, *_ in scrape(client))


def test_openapi_tells_the_truth(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) >= {
        "/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/v1/models", "/v1/models/{model}",
        "/v1/tokenize", "/v1/detokenize", "/v1/tokenizer_info", "/health", "/ready", "/version", "/load", "/metrics",
    }  # fmt: skip
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert "422" not in chat["responses"] and set(chat["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
    schemas = schema["components"]["schemas"]
    references = {part.split('"')[0] for part in client.get("/openapi.json").text.split("#/components/schemas/")[1:]}
    assert references <= schemas.keys()
    fields = schemas["ChatRequest"]
    assert fields["additionalProperties"] is False and {"top_k", "messages", "seed"} <= fields["properties"].keys()
    assert client.get("/docs").status_code == 200
