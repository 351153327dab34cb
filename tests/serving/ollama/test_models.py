"""What ollama's clients are told of the models of a server, and how they load, unload, fetch and remove them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from jaxllm.errors import ModelNotFoundError
from jaxllm.serving.ollama import routes
from jaxllm.weights.source import LocalModel
from tests.serving.access.conftest import write_keys
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, FakeEngine
from tests.serving.on_demand import Serve, Starts, serve, starts
from tests.support.covers import covers
from tests.weights.models import real_model

__all__ = ["serve", "starts"]

CONFIG = {
    "model_type": "llama", "max_position_embeddings": 2048, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "tiny"
    found.mkdir()
    (found / "config.json").write_text(json.dumps(CONFIG))
    (found / "model.safetensors").write_bytes(b"0" * 1000)
    return found


@pytest.fixture
def client(make_client: Callable[..., TestClient], folder: Path) -> TestClient:
    return make_client(FakeEngine(), model=str(folder), served_model_name="tiny", tool_call_parser="hermes")


@covers("GET /api/version")
def test_the_version_is_one_that_clients_compare(client: TestClient) -> None:
    """Copilot refuses servers below 0.6.4."""
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize("web", [True, False])
def test_the_root_says_that_ollama_runs_unless_a_browser_asks(make_client: Any, web: bool) -> None:
    client = make_client(FakeEngine(), web=web)
    answer = client.get("/", headers={"Accept": "*/*"})
    assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8" and "Accept" in answer.headers["vary"]
    assert (client.head("/").status_code, client.head("/").text) == (200, "")
    page = client.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert ("<html" in page.text) == web


@covers("GET /api/tags")
def test_models_are_listed_with_what_their_files_say(client: TestClient, folder: Path) -> None:
    [listed] = client.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "tiny"
    assert listed["size"] == 1000 + len(json.dumps(CONFIG)) and len(listed["digest"]) == 64
    assert listed["details"] == {
        "parent_model": "", "format": "safetensors", "family": "llama", "families": ["llama"],
        "parameter_size": "1.00M", "quantization_level": "bfloat16",
    }  # fmt: skip
    written = datetime.fromtimestamp(folder.stat().st_mtime, UTC)
    assert abs(datetime.fromisoformat(listed["modified_at"]) - written) < timedelta(seconds=1)


@covers("POST /api/show")
@covers("NamedModel", "model", "name", "verbose")
def test_a_model_shows_what_it_can_do(client: TestClient) -> None:
    shown = client.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 256  # as long as the engine's, not as the file says
    assert shown["model_info"]["llama.block_count"] == 2
    assert "{% for m in messages %}" in shown["template"] and shown["details"]["family"] == "llama"
    assert shown["parameters"] == "temperature 0.5\ntop_k 40" and shown["modelfile"] == "FROM tiny\n"
    assert client.post("/api/show", json={"name": "tiny:latest", "verbose": False}).json() == shown
    for body, problem in (
        ({}, "model is required"),
        ({"model": "tiny", "name": "other"}, "they are one setting"),
        ({"model": "none"}, "model 'none' is not served here"),
    ):
        assert problem in client.post("/api/show", json=body).json()["error"]


def test_a_gguf_file_shows_its_metadata_while_it_is_not_loaded(serve: Serve) -> None:
    file = str(real_model("smollm2-135m"))
    server = serve(file)
    shown = httpx.post(server.url.removesuffix("/v1") + "/api/show", json={"model": file}).json()
    assert shown["details"] == {
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "134.52M",
        "quantization_level": "Q4_1",
    }  # fmt: skip
    assert shown["model_info"]["llama.context_length"] == 8192
    assert "<|im_start|>" in shown["template"] and shown["license"] == "apache-2.0"
    assert server.states() == {file: "unloaded"}


def test_names_may_have_ollamas_tag(client: TestClient) -> None:
    for path, more in (("/api/chat", {"messages": HELLO}), ("/v1/chat/completions", {"messages": HELLO})):
        answer = client.post(path, json={"model": "tiny:latest", "stream": False} | more)
        assert answer.status_code == 200 and REPLY in answer.text
    assert client.post("/api/chat", json={"model": "tiny:latest"}).json()["model"] == "tiny:latest"
    assert client.post("/api/chat", json={"model": "other:latest"}).status_code == 404


@covers("GET /api/ps")
@covers("OllamaFields", "keep_alive")
def test_requests_without_words_load_and_unload(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b", max_loaded=2)
    api = server.url.removesuffix("/v1") + "/api"

    def post(route: str, **body: Any) -> dict[str, Any]:
        return httpx.post(f"{api}/{route}", json=body, timeout=20).json()

    def loaded() -> dict[str, timedelta]:
        found = httpx.get(f"{api}/ps").json()["models"]
        return {one["name"]: datetime.fromisoformat(one["expires_at"]) - datetime.now(UTC) for one in found}

    assert loaded() == {}
    said = post("chat", model="a", keep_alive="10m")
    assert (said["done_reason"], said["done"], said["message"]["content"]) == ("load", True, "")
    assert post("generate", model="b", keep_alive="-1")["done_reason"] == "load"
    assert timedelta(minutes=9) < loaded()["a"] < timedelta(minutes=11) and loaded()["b"] > timedelta(days=1000)
    said = post("generate", model="a", keep_alive=0)
    assert (said["done_reason"], said["response"]) == ("unload", "") and starts.events[-1] == "stopped a"
    assert post("chat", model="a", keep_alive=0)["done_reason"] == "unload"  # and loads nothing for it
    assert [*loaded()] == ["b"]
    assert post("chat", model="b", messages=HELLO, stream=False, keep_alive="0s")["message"]["content"] == "I am b."
    wait_for(lambda: loaded() == {})
    assert "keep_alive is 'soon'" in post("chat", model="b", keep_alive="soon")["error"]


def test_a_model_that_always_stays_takes_any_keep_alive_but_is_not_unloaded(client: TestClient) -> None:
    for keep_alive in ("5m", 0, -1, "300"):
        body = {"model": "tiny", "messages": HELLO, "stream": False, "keep_alive": keep_alive}
        assert client.post("/api/chat", json=body).status_code == 200
    answer = client.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
    assert (answer.status_code, answer.json()) == (
        409,
        {"error": "model 'tiny' is pinned: it cannot be unloaded now"},
    )
    [shown] = client.get("/api/ps").json()["models"]
    assert shown["context_length"] == 256 and shown["details"]["family"] == "llama"


@covers("POST /api/pull")
@covers("PullRequest", "stream", "insecure")
def test_a_models_files_are_fetched_and_its_progress_told(
    make_client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def resolve(name: str, **_: Any) -> Path:
        if fetched:
            raise ModelNotFoundError("the hub cannot be reached")
        fetched.append(name)
        return folder

    monkeypatch.setattr(routes, "resolve_model", resolve)
    client = make_client(FakeEngine(), model=str(folder), served_model_name="tiny")
    told = client.post("/api/pull", json={"model": "tiny", "insecure": False})
    assert told.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["status"] for line in told.text.splitlines()] == [
        "pulling manifest",
        "success",
    ]
    assert fetched == [str(folder)]
    failed = client.post("/api/pull", json={"model": "tiny"}).text.splitlines()[-1]
    assert json.loads(failed) == {"error": "the hub cannot be reached"}
    answer = client.post("/api/pull", json={"model": "tiny", "stream": False})
    assert (answer.status_code, answer.json()) == (404, {"error": "the hub cannot be reached"})
    assert client.post("/api/pull", json={"model": "other"}).status_code == 404


@covers("DELETE /api/delete")
def test_downloaded_files_are_removed_and_no_others(
    client: TestClient, serve: Serve, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = client.request("DELETE", "/api/delete", json={"model": "tiny"})
    assert own.status_code == 404 and "is a file or folder of yours" in own.json()["error"]
    removed: list[str] = []
    monkeypatch.setattr(routes, "find_removable", lambda name, _: LocalModel(name, 1, Path(), ""))
    monkeypatch.setattr(routes, "remove_local", lambda found: removed.append(found.name))
    server = serve("a")
    server.ask("a")
    api = server.url.removesuffix("/v1") + "/api"
    assert httpx.request("DELETE", f"{api}/delete", json={"model": "a"}, timeout=20).json() == {}
    assert removed == ["a"] and starts.events[-1] == "stopped a"


@pytest.mark.parametrize("path", routes.REFUSED)
def test_what_is_not_here_is_refused_by_name(client: TestClient, path: str) -> None:
    answer = client.post(path.replace("{digest}", "sha256:00"), json={"model": "a"})
    assert answer.status_code == 501
    assert answer.json()["error"] == f"{path} is not supported by this server: {routes.REFUSED[path]}"


def test_keys_are_asked_for_and_have_their_limits_here_too(make_client: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", user={"requests_per_minute": 1})
    client = make_client(FakeEngine(), api_key_file=keys)
    answer = client.get("/api/tags")
    assert (answer.status_code, [*answer.json()]) == (401, ["error"])
    client.headers["Authorization"] = "Bearer key-of-user"
    assert client.get("/api/tags").json()["models"][0]["name"] == "fake"
    body = {"model": "fake", "messages": HELLO, "stream": False}
    assert [client.post("/api/chat", json=body).status_code for _ in range(2)] == [200, 429]
    assert "may send 1 requests a minute" in client.post("/api/chat", json=body).json()["error"]
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        assert client.request(method, path, json={"model": "fake"}).status_code == 403
    assert 'user"' in client.get("/metrics").text and client.get("/v1/usage").status_code == 200


def test_no_line_but_json_comes_while_a_model_loads(serve: Serve, starts: Starts) -> None:
    """Streams of the other routes are told in comments how far it is."""
    starts.held["a"] = threading.Event()
    server = serve("a")
    threading.Timer(1.5, starts.held["a"].set).start()
    body = {"model": "a", "messages": HELLO}
    answer = httpx.post(server.url.removesuffix("/v1") + "/api/chat", json=body, timeout=20)
    texts = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(text["message"]["content"] for text in texts) == "I am a."
    assert texts[-1]["load_duration"] > 1e9
