"""One server computes a prompt and another goes on with it, by the openai SDK and through the proxy of the examples."""

from __future__ import annotations

import importlib.util
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from jaxllm import AsyncLLM
from jaxllm.config import ServeConfig
from jaxllm.engine.messages import EngineRequest, TransferInfo
from jaxllm.serving.http.listening import bind
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine, app_of
from tests.serving.mixed_requests import write_model
from tests.serving.real_server import assert_idle, engine_process, gauges, served, server_process
from tests.support.covers import covers

pytestmark = pytest.mark.programs

EXAMPLE = Path(__file__).parents[2] / "examples" / "scale" / "prefill_decode.py"
ENGINE: dict[str, Any] = {
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": "4MiB", "block_size": 8,
    "decode_buckets": (4,), "prefill_buckets": (64,), "dtype": "float32", "enforce_eager": True,
}  # fmt: skip
TRANSFER: dict[str, Any] = {"kv_offload_memory": "64MiB", "cluster_secret": "s"}
TEXT = "A page is a number of tokens, and a prompt has as many pages as it takes to hold all of its tokens. "
CHAT = [{"role": "system", "content": TEXT}, {"role": "user", "content": "How many pages has it?"}]
ASKED = {"temperature": 0.8, "seed": 5, "max_tokens": 12}
FIRST = {"do_remote_decode": True}
"""What a proxy asks of the server that computes the prompt."""
OF_VLLM = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""The same, as vLLM's proxies and llm-d's sidecar write it."""


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The base URL of an application on a real socket."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive() and not server.lifespan.shutdown_failed


@contextmanager
def serving(model: Path, data: Path, role: str | None) -> Iterator[str]:
    """A server whose engine is in this process; none of its pages is held in the end."""
    own = TRANSFER | {"kv_transfer_config": {"kv_role": role, "kv_port": 0}} if role else {}
    engine = AsyncLLM(model=str(model), engine_process=False, **ENGINE, **own)
    try:
        with listening(app_of(ServeConfig(model="tiny", data_dir=data), engine)) as url:
            yield url
            assert_idle(url)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def urls(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a server that computes prompts, of one that goes on with them, and of one that does all by itself."""
    roles = {"prefill": "kv_producer", "decode": "kv_consumer", "alone": None}
    with ExitStack() as running:
        yield {
            name: running.enter_context(serving(model, tmp_path_factory.mktemp(name), role))
            for name, role in roles.items()
        }


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@covers("GenerationRequest", "kv_transfer_params")
@covers(
    "KVTransferParams", "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_host",
    "remote_port", "remote_block_ids",
)  # fmt: skip
@pytest.mark.parametrize("asked", [FIRST, OF_VLLM], ids=["short", "as vLLM writes it"])
def test_a_prompt_goes_from_one_server_to_another(urls: dict[str, str], asked: dict[str, Any]) -> None:
    prompt = str(len(asked)) + TEXT
    settings: dict[str, Any] = {"model": "tiny", "prompt": prompt, **ASKED}
    computed = client(urls["prefill"]).completions.create(
        **settings | {"max_tokens": 1}, extra_body={"kv_transfer_params": asked}
    )
    answer = computed.model_dump()["kv_transfer_params"]
    pages = computed.usage.prompt_tokens // 8
    assert answer["do_remote_prefill"] is True and answer["do_remote_decode"] is False
    assert answer["remote_block_ids"] == list(range(pages)) and pages > 3
    assert answer["remote_host"] == "127.0.0.1" and answer["remote_port"] > 0
    assert answer["remote_engine_id"] and answer["remote_request_id"] == computed.id
    before = gauges(urls["decode"])
    found = client(urls["decode"]).completions.create(**settings, extra_body={"kv_transfer_params": answer})
    after = gauges(urls["decode"])
    alone = client(urls["alone"]).completions.create(**settings)
    assert found.choices[0].text == alone.choices[0].text
    fetched = after["kv_transfer_pages_fetched_total"] - before["kv_transfer_pages_fetched_total"]
    cached = found.usage.prompt_tokens_details.cached_tokens
    assert cached == (found.usage.prompt_tokens - 1) // 8 * 8 and 0 < fetched <= cached / 8
    assert after["kv_transfer_pulls_total"] == before["kv_transfer_pulls_total"] + 1
    assert after["kv_transfer_failures_total"] == before["kv_transfer_failures_total"]
    assert after["kv_transfer_seconds_total"] > before["kv_transfer_seconds_total"]
    assert gauges(urls["prefill"])["kv_transfer_pages_given_total"] >= fetched
    assert "kv_transfer_params" not in found.model_dump(), "only the server of prompts has something to say"


def test_a_chat_goes_on_as_a_stream(urls: dict[str, str]) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": CHAT, **ASKED}
    computed = client(urls["prefill"]).chat.completions.create(
        **settings | {"max_tokens": 1}, extra_body={"kv_transfer_params": FIRST}
    )
    answer = computed.model_dump()["kv_transfer_params"]
    stream = client(urls["decode"]).chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}, extra_body={"kv_transfer_params": answer}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    alone = client(urls["alone"]).chat.completions.create(**settings)
    assert text == alone.choices[0].message.content and chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("decode", "completions", {"kv_transfer_params": FIRST}, "kv_role is kv_consumer; accepted with kv_producer,"),
    (
        "prefill", "completions",
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9}},
        "kv_role is kv_producer; accepted with kv_consumer, kv_both",
    ),
    ("alone", "completions", {"kv_transfer_params": FIRST}, "this server was started without kv_transfer_config"),
    ("alone", "chat/completions", {"kv_transfer_params": FIRST}, "this server was started without kv_transfer_config"),
    ("prefill", "completions", {"kv_transfer_params": FIRST, "max_tokens": 2}, "max_tokens is 2; with .* it must be 1"),
    (
        "prefill", "chat/completions", {"kv_transfer_params": FIRST, "max_completion_tokens": 2, "max_tokens": None},
        "max_completion_tokens is 2; with .* it must be 1",
    ),
    ("prefill", "completions", {"kv_transfer_params": FIRST, "stream": True}, "stream is true; .* it must be false"),
    ("prefill", "completions", {"kv_transfer_params": FIRST, "n": 2}, "n is 2; with .* it must be 1"),
    ("prefill", "completions", {"kv_transfer_params": FIRST, "best_of": 2}, "best_of is 2; with .* it must be 1"),
    (
        "prefill", "completions", {"kv_transfer_params": FIRST, "use_beam_search": True},
        "kv_transfer_params is not available with use_beam_search",
    ),
    ("prefill", "completions", {"kv_transfer_params": FIRST, "prompt": ["a", "b"]}, "with 2 prompts; accepted is 1"),
    (
        "prefill", "completions", {"kv_transfer_params": FIRST | {"do_remote_prefill": True}},
        "do_remote_decode and do_remote_prefill are both true",
    ),
    ("decode", "completions", {"kv_transfer_params": {"do_remote_prefill": True}}, "remote_host is missing"),
    (
        "decode", "completions",
        {"kv_transfer_params": {
            "do_remote_prefill": True, "remote_host": "h", "remote_port": 1, "remote_block_ids": [0, 2]
        }},
        "remote_block_ids must be 0, 1, 2",
    ),
    ("decode", "completions", {"kv_transfer_params": {"remote_port": 0}}, "remote_port"),
    ("decode", "completions", {"kv_transfer_params": {"remote_hosts": "h"}}, "unknown field .*remote_host"),
    ("decode", "completions", {"kv_transfer_params": True}, "kv_transfer_params"),
    ("decode", "responses", {"kv_transfer_params": FIRST}, "kv_transfer_params"),
    ("decode", "messages", {"kv_transfer_params": FIRST}, "kv_transfer_params"),
    ("decode", "embeddings", {"kv_transfer_params": FIRST}, "kv_transfer_params"),
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": TEXT, "max_tokens": 1}, "chat/completions": {"messages": CHAT, "max_tokens": 1},
    "responses": {"input": "Hi"}, "messages": {"messages": CHAT[1:], "max_tokens": 1}, "embeddings": {"input": "Hi"},
}  # fmt: skip


@pytest.mark.parametrize(("server", "path", "fields", "line"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line(
    urls: dict[str, str], server: str, path: str, fields: dict[str, Any], line: str
) -> None:
    answer = httpx.post(f"{urls[server]}/v1/{path}", json=BODIES[path] | fields, timeout=60)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "\n" not in message
    assert re.search(line, message), message


@pytest.mark.parametrize("nothing", [None, {}, {"do_remote_decode": False}, OF_VLLM | {"do_remote_decode": False}])
def test_where_nothing_is_asked_for_nothing_is_refused(urls: dict[str, str], nothing: dict[str, Any] | None) -> None:
    body = BODIES["completions"] | {"kv_transfer_params": nothing}
    answer = httpx.post(f"{urls['alone']}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200 and "kv_transfer_params" not in answer.json()


def test_pages_are_fetched_from_peers_alone_where_those_are_named(
    make_client: Callable[..., TestClient], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = TransferInfo(engine_id="e", role="kv_both", host="h", port=1, peers=("prefill-1", "10.0.0.0/8", "fd00::/8"))
    monkeypatch.setattr(engine.info, "transfer", info)
    asked: list[EngineRequest] = []
    run = engine.run

    def noted(requests: Sequence[EngineRequest], **arguments: Any) -> Any:
        asked.extend(requests)
        return run(requests, **arguments)

    monkeypatch.setattr(engine, "run", noted)
    server = make_client(engine)
    for host, is_accepted in {
        "prefill-1": True, "10.9.8.7": True, "fd00::1": True, "prefill-2": False, "11.0.0.1": False, "::1": False,
    }.items():  # fmt: skip
        transfer = {"do_remote_prefill": True, "remote_host": host, "remote_port": 7}
        answer = server.post("/v1/completions", json={"prompt": "Hi", "kv_transfer_params": transfer})
        assert answer.status_code == (200 if is_accepted else 400), host
        if not is_accepted:
            assert (
                f"kv_transfer_params.remote_host is '{host}'; this server fetches pages from prefill-1, 10.0.0.0/8"
                in (answer.json()["error"]["message"])
            )
    assert [one.pages_at.host for one in asked] == ["prefill-1", "10.9.8.7", "fd00::1"]


def test_a_request_with_an_adapter_is_refused(
    make_client: Callable[..., TestClient], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.info, "transfer", TransferInfo(engine_id="e", role="kv_both", host="h", port=1))
    from jaxllm.requests.steering import AdapterUse
    from jaxllm.serving.call import ClientCall

    monkeypatch.setattr(ClientCall, "adapter_uses", lambda *_: (AdapterUse(id=1, name="a", path="/a", scale=1.0),))
    body = {"prompt": "Hi", "max_tokens": 1, "kv_transfer_params": FIRST}
    answer = make_client(engine).post("/v1/completions", json=body)
    assert (
        answer.status_code == 400 and "kv_transfer_params is set with an adapter" in answer.json()["error"]["message"]
    )


def proxy_of(prefill: list[str], decode: list[str]) -> Any:
    spec = importlib.util.spec_from_file_location("prefill_decode", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Proxy(prefill, decode).app


def test_the_proxy_of_the_examples(urls: dict[str, str]) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": TEXT * 2}], **ASKED}
    alone = client(urls["alone"]).chat.completions.create(**settings)
    before = [gauges(urls[name]) for name in ("prefill", "decode")]
    with listening(proxy_of([urls["prefill"]], [urls["decode"]])) as url:
        assert client(url).models.list().data[0].id == "tiny"
        whole = client(url).chat.completions.create(**settings)
        stream = client(url).chat.completions.create(**settings, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        text = client(url).completions.create(model="tiny", prompt=TEXT, **ASKED, n=2)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client(url).completions.create(model="tiny", prompt=TEXT, temperature=-1)
    after = [gauges(urls[name]) for name in ("prefill", "decode")]
    assert whole.choices[0].message.content == streamed == alone.choices[0].message.content
    assert len(text.choices) == 2
    assert after[0]["request_success_total"] > before[0]["request_success_total"]
    assert after[1]["kv_transfer_pages_fetched_total"] > before[1]["kv_transfer_pages_fetched_total"]
    assert after[1]["kv_transfer_failures_total"] == before[1]["kv_transfer_failures_total"]


def test_the_proxy_does_without_a_server_of_prompts(urls: dict[str, str]) -> None:
    settings: dict[str, Any] = {"model": "tiny", "prompt": TEXT[::-1], **ASKED}
    alone = client(urls["alone"]).completions.create(**settings)
    with listening(proxy_of(["http://127.0.0.1:9", urls["prefill"]], [urls["decode"]])) as url:
        for _ in range(2):
            assert client(url).completions.create(**settings).choices[0].text == alone.choices[0].text


def test_servers_of_their_own_one_of_which_is_killed(model: Path, urls: dict[str, str]) -> None:
    """Engines in processes, as servers have them; a server of prompts that is gone leaves the other to itself."""
    own: dict[str, Any] = ENGINE | TRANSFER | {"served_model_name": "tiny"}
    role = [{"kv_transfer_config": {"kv_role": role, "kv_port": 0}} for role in ("kv_producer", "kv_consumer")]
    settings: dict[str, Any] = {"model": "tiny", "prompt": TEXT, **ASKED}
    alone = client(urls["alone"]).completions.create(**settings).choices[0].text
    with served(str(model), **own, **role[1]) as decode, served(str(model), **own, **role[0]) as prefill:
        answers = [
            client(prefill).completions.create(
                **settings | {"prompt": prompt, "max_tokens": 1}, extra_body={"kv_transfer_params": FIRST}
            )
            for prompt in (TEXT, TEXT[::-1])
        ]
        transfers = [answer.model_dump()["kv_transfer_params"] for answer in answers]
        found = client(decode).completions.create(**settings, extra_body={"kv_transfer_params": transfers[0]})
        assert found.choices[0].text == alone and found.usage.prompt_tokens_details.cached_tokens > 0
        engine_process(server_process(prefill)).send_signal(signal.SIGKILL)
        later = client(decode).completions.create(
            **settings | {"prompt": TEXT[::-1]}, extra_body={"kv_transfer_params": transfers[1]}
        )
        assert later.usage.prompt_tokens_details.cached_tokens == 0 and later.usage.completion_tokens > 0
        seen = gauges(decode)
        assert (seen["kv_transfer_pulls_total"], seen["kv_transfer_failures_total"]) == (2, 1)
        assert_idle(decode)
