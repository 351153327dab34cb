"""Keys from a file: who is let in, until when, and what for."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import yaml
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from jaxllm.config import ServeConfig
from jaxllm.config.sources import read_settings
from jaxllm.errors import ConfigError
from jaxllm.serving import status
from jaxllm.serving.access import keys as keys_module
from jaxllm.serving.access.keys import hash_of, read_keys
from tests.serving.access.conftest import CHAT, Keyed, key, write_keys
from tests.serving.batches.running import Running, chat
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine, app_of
from tests.serving.on_demand import Serve, serve, starts

__all__ = ["serve", "starts"]

HASH = "sha256:" + "0" * 64
EXAMPLE = Path(__file__).parents[3] / "examples" / "keys.yaml"


def test_a_key_is_let_in_by_its_hash_and_a_wrong_one_is_not(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {}, "bob": {}})
    assert hash_of("key-of-alice") == "sha256:" + hashlib.sha256(b"key-of-alice").hexdigest()
    for name in ("alice", "bob"):
        assert server.post(name, "/v1/chat/completions", CHAT).status_code == 200
    for headers in ({}, key("carol"), {"Authorization": f"Bearer {hash_of('key-of-alice')}"}):
        refused = server.client.get("/v1/models", headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"


def test_sdks_bring_their_keys(listen: Callable[..., str], engine: FakeEngine, tmp_path: Path) -> None:
    url = listen(engine, api_key_file=write_keys(tmp_path / "keys.yaml", alice={}))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key-of-alice", max_retries=0) as client:
        assert [model.id for model in client.models.list().data] == ["fake"]
        client.api_key = "key-of-bob"
        with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
            client.models.list()
    with anthropic.Anthropic(base_url=url, api_key="key-of-alice", max_retries=0) as claude:
        assert claude.messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": "Hi"}]).content


def test_every_route_but_probes_asks_for_a_key(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {}})
    probes = {route.path for route in status.router.routes if isinstance(route, APIRoute)}
    described = server.client.get("/openapi.json").json()["paths"]
    asked = [
        (method, path.replace("{", "").replace("}", ""))
        for path, methods in described.items()
        for method in methods
        if path not in probes
    ]
    assert len(asked) > 50 and "/metrics" in probes
    for method, path in asked:
        for place in (path, path.removeprefix("/v1")):
            assert server.client.request(method, place).status_code == 401, (method, place)
    assert server.client.get("/health").status_code == server.client.get("/metrics").status_code == 200


def test_keys_of_the_command_line_go_on_beside_the_file(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {"models": ["nothing"]}}, api_key="one,two")
    for shared in ("one", "two"):
        headers = {"Authorization": f"Bearer {shared}"}
        assert server.client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


def test_a_file_without_keys_lets_nobody_in(make_client: Callable[..., TestClient], tmp_path: Path) -> None:
    empty = tmp_path / "keys.yaml"
    empty.write_text("# none yet\n")
    client = make_client(FakeEngine(), api_key_file=empty)
    assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("text", ["2031-01-01", "2031-01-01T00:00:00Z", "2031-01-01 01:00:00+01:00", "'2031-01-01'"])
def test_a_key_expires(keyed: Callable[..., Keyed], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = keyed({"alice": {}})
    server.path.write_text(f"alice: {{hash: {hash_of('key-of-alice')}, expires: {text}}}\n")
    server.state.keys.reload()
    moment = datetime(2031, 1, 1, tzinfo=UTC)

    class Clock(datetime):
        now_is = moment - timedelta(seconds=1)

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return cls.now_is

    monkeypatch.setattr(keys_module, "datetime", Clock)
    assert server.get("alice", "/v1/models").status_code == 200
    Clock.now_is = moment
    refused = server.get("alice", "/v1/models")
    assert refused.status_code == 401 and "key 'alice' has expired" in refused.json()["error"]["message"]


def test_the_file_is_read_again_and_a_bad_one_changes_nothing(
    keyed: Callable[..., Keyed], caplog: pytest.LogCaptureFixture
) -> None:
    server = keyed({"alice": {}})
    write_keys(server.path, bob={})
    server.state.keys.reload()
    assert (server.get("alice", "/v1/models").status_code, server.get("bob", "/v1/models").status_code) == (401, 200)
    server.path.write_text("carol: {hash: abc}\n")
    with caplog.at_level(logging.ERROR):
        server.state.keys.reload()
    assert server.get("bob", "/v1/models").status_code == 200
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("the API keys stay as they are: ") and "key 'carol': hash must be" in line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "holds a list; it must be a mapping of names to keys"),
        (f"a b: {{hash: '{HASH}'}}", "key 'a b': a name must have"),
        ("alice: secret", "key 'alice' must be a mapping of setting: value"),
        ("alice: {}", "key 'alice': hash must be sha256: and 64 hexadecimal digits"),
        (f"alice: {{hash: '{HASH}', model: [x]}}", "unknown setting 'model'; did you mean 'models'?"),
        (f"alice: {{hash: '{HASH}', name: x}}", "unknown setting 'name'"),
        (f"alice: {{hash: '{HASH}', models: 5}}", "models is 5: it must be a list"),
        (f"alice: {{hash: '{HASH}', expires: soon}}", "expires is 'soon': it must be a day or a time"),
        (f"alice: {{hash: '{HASH}', priority_ceiling: high}}", "priority_ceiling is 'high': it must be an integer"),
        (f"alice: {{hash: '{HASH}'}}\nalice: {{}}", "'alice' is set in line 1 and again in line 2"),
        (f"alice: {{hash: '{HASH}'}}\nbob: {{hash: '{HASH}'}}", "key 'bob': its hash is that of key 'alice'"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        app_of(ServeConfig(model="fake", api_key_file=path, data_dir=tmp_path), FakeEngine())
    message = str(error.value)
    assert message.startswith(str(path)) and problem in message and "\n" not in message


def test_a_key_in_the_place_of_its_hash_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("alice: {hash: jaxllm-secret}\n")
    with pytest.raises(ConfigError) as error:
        read_keys(path)
    assert "jaxllm-secret" not in str(error.value)


def test_a_file_that_is_not_there_ends_the_start(cli_serve: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, said = cli_serve("--api-key-file", str(tmp_path / "none.yaml"))
    assert code == 2 and "--api-key-file is" in said and "no such file" in said


@pytest.fixture
def cli_serve(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    from jaxllm.cli.main import main

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(["serve", "--port", "0", *arguments])
        return int(end.value.code or 0), capsys.readouterr().err

    return run


def test_other_models_are_not_there(keyed: Callable[..., Keyed], make_client: Callable[..., TestClient]) -> None:
    server = keyed({"alice": {"models": ["second"]}, "bob": {}}, others={"second": FakeEngine(reply="Me.")})
    assert [model["id"] for model in server.get("alice", "/v1/models").json()["data"]] == ["second"]
    assert [model["id"] for model in server.get("bob", "/v1/models").json()["data"]] == ["fake", "second"]
    for refused in (
        server.post("alice", "/v1/chat/completions", CHAT | {"model": "fake"}),
        server.post("alice", "/v1/chat/completions", CHAT | {"model": "fake", "stream": True}),
        server.post("alice", "/v1/embeddings", {"input": "a", "model": "fake"}),
        server.get("alice", "/v1/models/fake"),
        server.get("alice", "/props?model=fake"),
        server.get("alice", "/is_sleeping?model=fake"),
    ):
        error = refused.json()["error"]
        assert refused.status_code == 404 and error["code"] == "model_not_found"
        assert error["message"].endswith("this server has second")
    unnamed = server.post("alice", "/v1/completions", {"prompt": "Hi"}).json()
    assert (unnamed["model"], unnamed["choices"][0]["text"]) == ("second", "Me.")
    assert server.get("alice", "/server_info").json()["models"] == ["second"]


def test_a_key_without_a_model_is_told_so(keyed: Callable[..., Keyed], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        server = keyed({"alice": {"models": "fakd"}})
    assert "API key alice may use fakd, which is not served here" in caplog.text
    assert server.get("alice", "/v1/models").json()["data"] == []
    refused = server.post("alice", "/v1/completions", {"prompt": "Hi"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        404,
        "this API key may use no model of this server",
    )


def test_priorities_are_bounded(keyed: Callable[..., Keyed]) -> None:
    engine = FakeEngine()
    server = keyed({"alice": {}, "late": {"priority_ceiling": 10}, "any": {"priority_ceiling": None}}, engine)

    def ask(name: str, **fields: Any) -> Any:
        return server.post(name, "/v1/completions", {"prompt": "Hi"} | fields)

    for name, fields, expected in (
        ("alice", {}, 0),
        ("alice", {"priority": 3}, 3),
        ("late", {}, 10),
        ("late", {"priority": 11}, 11),
        ("any", {"priority": -5}, -5),
    ):
        assert ask(name, **fields).status_code == 200
        assert engine.seen[-1][2]["priority"] == expected, (name, fields)
    for name, asked, ceiling in (("alice", -1, 0), ("late", 9, 10)):
        for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/embeddings", {"input": "a"})):
            refused = server.post(name, path, body | {"priority": asked})
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "priority"
            assert error["message"] == f"priority is {asked}; with this API key it must be {ceiling} or more"
    assert server.post("late", "/v1/embeddings", {"input": "a"}).status_code == 200
    assert engine.pooled[-1][2]["priority"] == 10


def test_the_engine_tells_keys_apart(keyed: Callable[..., Keyed]) -> None:
    """So that none keeps another waiting: see tests/engine/core/test_fair_queue.py."""
    engine = FakeEngine()
    server = keyed({"alice": {}, "bob": {}}, engine, api_key="shared")
    server.post("alice", "/v1/completions", {"prompt": ["a", "b"]})
    server.post("bob", "/v1/embeddings", {"input": "a"})
    server.client.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer shared"})
    assert engine.groups == ["alice", "alice", "bob", ""]


def test_only_some_keys_unload_models_and_put_them_to_sleep(serve: Serve, tmp_path: Path) -> None:
    server = serve("first", "second", api_key_file=write_keys(tmp_path / "keys.yaml", alice={}, boss={"admin": True}))
    for name, refused in (("alice", True), ("boss", False)):
        for path, own in (("/models/load", True), ("/models/unload", False), ("/sleep", False), ("/wake_up", True)):
            body = {"json": {"model": "first"}} if "models" in path else {"params": {"model": "first"}}
            answer = httpx.post(server.url + path, **body, headers=key(name), timeout=20)  # type: ignore[arg-type]
            assert (answer.status_code == 403) == (refused and not own), (name, path)


def test_a_batch_runs_in_the_name_of_who_made_it(tmp_path: Path, start_keyed: Callable[..., Running]) -> None:
    keys = tmp_path / "keys.yaml"
    server = start_keyed(write_keys(keys, alice={"models": ["fake"]}, bob={"models": ["other"]}), "alice")
    done = server.finished(server.submit([chat(0), chat(1)]))
    assert done.request_counts.completed == 2
    server.client.api_key = "key-of-bob"
    refused = server.finished(server.submit([chat(0)]))
    assert refused.request_counts.failed == 1


def test_lines_of_a_key_that_is_gone_fail(tmp_path: Path, start_keyed: Callable[..., Running]) -> None:
    keys = write_keys(tmp_path / "keys.yaml", alice={}, bob={})
    server = start_keyed(keys, "alice", engine=FakeEngine(delay=0.05), max_batch_concurrency=1)
    batch_id = server.submit([chat(number) for number in range(4)])
    write_keys(keys, bob={})
    server.app.state.server.keys.reload()
    wait_for(lambda: not server.app.state.batches._tasks)
    write_keys(keys, alice={}, bob={})
    server.app.state.server.keys.reload()
    done = server.finished(batch_id)
    assert done.request_counts.failed >= 3
    errors = server.results(done.error_file_id)
    assert {result["response"]["status_code"] for result in errors.values()} == {401}


@pytest.fixture
def start_keyed(tmp_path: Path) -> Any:
    servers: list[Running] = []

    def make(keys: Path, name: str, engine: FakeEngine | None = None, **settings: Any) -> Running:
        server = Running(engine or FakeEngine(), tmp_path / "data", api_key_file=keys, **settings)
        server.client.api_key = f"key-of-{name}"
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


def test_the_example_of_a_teams_server_can_be_read() -> None:
    path = EXAMPLE.with_name("team.yaml")
    config = read_settings(ServeConfig, {}, path, environ={})
    assert set(yaml.safe_load(path.read_text())) == config.model_fields_set and config.asks_for_key


def test_the_example_can_be_read() -> None:
    found = {one.name: one for one in read_keys(EXAMPLE)}
    assert list(found) == list(yaml.safe_load(EXAMPLE.read_text()))
    assert found["alice"].expires == datetime(2031, 1, 1, tzinfo=UTC)
    assert found["operator"].admin and found["operator"].priority_ceiling is None
