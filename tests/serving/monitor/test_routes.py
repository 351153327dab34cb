"""The monitor port: what it answers, and that it answers while the server's own event loop is busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxllm.serving.http.listening import bind
from jaxllm.serving.status import Monitor, monitoring
from tests.looking.decode import decode
from tests.serving.fake_engine import CannedClient, FakeEngine


class Processes:
    """Stands in the place of two engines' processes, and notes what they are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, float]] = []
        self.error: Exception | None = None

    def look_at(self, number: str) -> Callable[[str, float], bytes]:
        def look(what: str, seconds: float) -> bytes:
            self.asked.append((number, what, seconds))
            if self.error is not None:
                raise self.error
            return b"seen"

        return look


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    fake = Processes()
    monkeypatch.setattr(CannedClient, "processes", {number: fake.look_at(number) for number in ("0", "1")})
    return fake


@pytest.fixture
def monitor(client: TestClient) -> TestClient:
    return TestClient(Monitor(lambda: client.app, lambda: None).app, raise_server_exceptions=False)


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


def test_metrics_and_probes_are_the_servers(client: TestClient, monitor: TestClient) -> None:
    for path in ("/livez", "/health", "/ready", "/readyz", "/ping", "/load", "/version"):
        theirs, ours = client.get(path), monitor.get(path)
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json()), path
    names = {line.split("{")[0] for line in monitor.get("/metrics").text.splitlines()}
    assert names == {line.split("{")[0] for line in client.get("/metrics").text.splitlines()}
    assert "jaxllm:num_requests_running" in names


def test_a_dead_engine_shows(client: TestClient, monitor: TestClient, engine: FakeEngine) -> None:
    engine.die()
    assert monitor.get("/health").status_code == 503 and monitor.get("/livez").status_code == 200


def test_before_there_are_models() -> None:
    monitor = TestClient(Monitor(lambda: None, lambda: None).app)
    assert monitor.get("/livez").status_code == 200 and monitor.get("/ready").status_code == 503
    assert monitor.get("/debug/").json()["processes"] == ["api"]
    assert "in stacks" in monitor.get("/debug/stacks").text


def test_the_processes_are_listed(monitor: TestClient, processes: Processes) -> None:
    found = monitor.get("/debug/").json()
    assert found["processes"] == ["api", "engine/fake/0", "engine/fake/1"]
    assert set(found["routes"]) == {
        "/debug/", "/debug/pprof/profile", "/debug/pprof/heap", "/debug/stacks", "/debug/trace",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "asked", "media_type"),
    [
        ("/debug/pprof/profile", {"seconds": "2.5"}, ("profile", 2.5), "application/octet-stream"),
        ("/debug/pprof/profile", {}, ("profile", 30.0), "application/octet-stream"),
        ("/debug/pprof/heap", {}, ("device_heap", 0.0), "application/octet-stream"),
        ("/debug/pprof/heap", {"of": "python"}, ("python_heap", 0.0), "application/octet-stream"),
        ("/debug/stacks", {}, ("stacks", 0.0), "text/plain; charset=utf-8"),
        ("/debug/trace", {"seconds": "1"}, ("trace", 1.0), "application/zip"),
    ],
)
def test_an_engine_is_asked(
    monitor: TestClient, processes: Processes, path: str, fields: Any, asked: tuple[str, float], media_type: str
) -> None:
    response = monitor.get(path, params={"process": "engine/fake/1"} | fields)
    assert (response.status_code, response.content) == (200, b"seen")
    assert response.headers["content-type"] == media_type
    assert processes.asked == [("1", *asked)]


def test_the_server_itself_is_the_default(monitor: TestClient) -> None:
    found = decode(monitor.get("/debug/pprof/profile", params={"seconds": 0.05}).content)
    assert found.samples and found.seconds >= 0.05


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/debug/stacks?process=engine/fake", 404, "process is 'engine/fake', which does not run; did you mean"),
        ("/debug/stacks?process=zzz", 404, "process is 'zzz', which does not run; there are api, engine/fake/0, engin"),
        ("/debug/pprof/profile?seconds=0", 400, "seconds is '0'; it must be a number above 0, 300 at most"),
        ("/debug/pprof/profile?seconds=301", 400, "seconds is '301'; "),
        ("/debug/trace?seconds=soon", 400, "seconds is 'soon'; "),
        ("/debug/trace?seconds=nan", 400, "seconds is 'nan'; "),
        ("/debug/pprof/heap?of=me", 400, "of is 'me'; it must be python or device"),
        ("/debug/stacks?seconds=1", 400, "unknown parameter 'seconds'; /debug/stacks takes process"),
        ("/debug/pprof/heap?of=device", 400, "this process does not use JAX"),
        ("/debug/nothing", 404, "Not Found"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    monitor: TestClient, processes: Processes, monkeypatch: pytest.MonkeyPatch, path: str, status: int, told: str
) -> None:
    if "of=device" in path:  # the tests' process has JAX, which a server's has not
        monkeypatch.delitem(__import__("sys").modules, "jax", raising=False)
    response = monitor.get(path)
    assert response.status_code == status and message(response).startswith(told), message(response)
    assert processes.asked == []


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequestError("not here"), 400), (EngineDeadError("it has ended"), 503)]
)
def test_what_a_process_refuses_is_said(
    monitor: TestClient, processes: Processes, error: Exception, status: int
) -> None:
    processes.error = error
    response = monitor.get("/debug/stacks?process=engine/fake/0")
    assert (response.status_code, message(response)) == (status, str(error))


def test_it_answers_while_the_servers_event_loop_is_busy() -> None:
    held, inside, loops = threading.Event(), threading.Event(), []

    async def hold_the_loop() -> None:
        loops.append(asyncio.get_running_loop())
        inside.set()
        held.wait()

    busy = threading.Thread(target=lambda: asyncio.run(hold_the_loop()), daemon=True)
    busy.start()
    inside.wait()
    try:
        with monitoring(ServerConfig(monitor_port=0), lambda: None, lambda: loops[0]) as url:
            text = httpx.get(f"{url}/debug/stacks", timeout=60).text
    finally:
        held.set()
        busy.join()
    assert "in hold_the_loop" in text


def test_a_long_profile_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, held = threading.Event(), threading.Event()

    def profile_for_long(what: str, seconds: float) -> bytes:
        begun.set()
        held.wait()
        return b""

    monkeypatch.setattr("jaxllm.serving.status.look", profile_for_long)
    answers: list[int] = []

    def ask(url: str) -> None:
        try:
            answers.append(httpx.get(f"{url}/debug/pprof/profile?seconds=300", timeout=600).status_code)
        except httpx.HTTPError:
            answers.append(0)

    with monitoring(ServerConfig(monitor_port=0), lambda: None, lambda: None) as url:
        asking = threading.Thread(target=ask, args=(url,), daemon=True)
        asking.start()
        begun.wait()
    asking.join(60)  # while the profile goes on
    assert answers in ([0], [500])
    held.set()


def test_without_the_setting_there_is_none() -> None:
    with monitoring(ServerConfig(), lambda: None, lambda: None) as url:
        assert url is None


def test_a_port_that_is_taken_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        config = ServerConfig(monitor_port=port)
        told = rf"^port {port} on 127.0.0.1 is in use; choose another with --monitor-port"
        with pytest.raises(ConfigError, match=told), monitoring(config, lambda: None, lambda: None):
            pass


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, 421),
        ({"allowed_hosts": "other.example"}, 421),
        ({"allowed_hosts": "metrics.example"}, 200),
        ({"monitor_host": "0.0.0.0"}, 200),
    ],
)
def test_names_that_are_not_its_own(settings: dict[str, Any], status: int) -> None:
    config = ServerConfig(monitor_port=0, **settings)
    with monitoring(config, lambda: None, lambda: None) as url:
        assert url is not None
        port = url.rpartition(":")[2]
        response = httpx.get(f"http://127.0.0.1:{port}/livez", headers={"Host": f"metrics.example:{port}"})
    assert response.status_code == status
