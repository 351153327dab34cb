"""/v1/mcp: the servers, their tools, and calls of these."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi.testclient import TestClient

import jaxllm
from jaxllm.errors import ConfigError
from tests.mcp.conftest import OLD_SERVER
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine
from tests.serving.mcp.conftest import KEY, servers
from tests.serving.openai.test_chat import post
from tests.support.covers import covers

pytestmark = pytest.mark.programs

ROOT = Path(jaxllm.__file__).parents[1]


@covers("GET /v1/mcp/tools")
def test_tools_are_as_a_chat_takes_them(client: TestClient, engine: FakeEngine) -> None:
    tools = client.get("/v1/mcp/tools").json()["data"]
    add = next(tool for tool in tools if tool["function"]["name"] == "maths_add")
    assert add["type"] == "function" and add["function"]["description"] == "Add two numbers."
    assert add["function"]["parameters"]["required"] == ["a", "b"]
    assert post(client, tools=tools).status_code == 200


@covers("POST /v1/mcp/tools/{name}")
@covers("ToolCallRequest", "arguments")
def test_a_tool_is_run(client: TestClient) -> None:
    response = client.post("/v1/mcp/tools/maths_add", json={"arguments": {"a": 40, "b": 2}})
    assert response.json() == {
        "object": "mcp.tool_result",
        "name": "maths_add",
        "server_label": "maths",
        "output": "42",
        "error": None,
    }


def test_a_tool_that_fails_is_no_error_of_ours(client: TestClient) -> None:
    response = client.post("/v1/mcp/tools/maths_fail", json={"arguments": {"reason": "no luck"}})
    assert response.status_code == 200
    assert response.json()["error"]["type"] == "mcp_tool_execution_error" and "no luck" in response.json()["output"]


def test_an_unknown_tool(client: TestClient) -> None:
    response = client.post("/v1/mcp/tools/maths_divide", json={})
    assert response.status_code == 404 and response.json()["error"]["code"] == "tool_not_found"


@covers("GET /v1/mcp/servers")
def test_servers_are_shown_without_their_secrets(client: TestClient) -> None:
    response = client.get("/v1/mcp/servers")
    (server,) = response.json()["data"]
    tools = server.pop("tools")
    assert "maths_add" in tools and server == {
        "label": "maths",
        "description": "Sums.",
        "transport": "http",
        "status": "ready",
        "error": None,
        "refused": [],
    }
    assert KEY not in response.text and "s3cret" not in response.text


def test_servers_that_cannot_start_stop_nothing(
    make_client: Callable[..., TestClient], engine: FakeEngine, tmp_path
) -> None:
    path = tmp_path / "mcp.json"
    silent = {"command": sys.executable, "args": ["-c", "import time; time.sleep(60)"]}
    path.write_text(json.dumps({"mcpServers": {"missing": {"command": "/no/such/program"}, "silent": silent}}))
    before = time.monotonic()
    client = make_client(engine, mcp_config=path)
    assert time.monotonic() - before < 30, "the start waits for nobody"
    assert post(client).status_code == 200
    wait_for(lambda: servers(client)[0]["status"] == "failed", 10)
    missing, silent = servers(client)
    assert f"'/no/such/program' cannot be started in {tmp_path}: no such file or directory" in missing["error"]
    assert (silent["status"], silent["error"], silent["tools"]) == ("starting", None, [])


def test_a_wrong_file_is_said_at_the_start(
    make_client: Callable[..., TestClient], engine: FakeEngine, tmp_path
) -> None:
    (tmp_path / "mcp.json").write_text('{"mcpServers": {"a": {"commnd": "x"}}}')
    with pytest.raises(ConfigError, match="server 'a': unknown field 'commnd'; did you mean 'command'"):
        make_client(engine, mcp_config=tmp_path / "mcp.json")


def test_the_key_is_needed(make_client: Callable[..., TestClient], engine: FakeEngine) -> None:
    client = make_client(engine, api_key="k")
    for method, path in (("get", "tools"), ("get", "servers"), ("post", "tools/x")):
        assert getattr(client, method)(f"/v1/mcp/{path}").status_code == 401


def test_a_callers_key_is_not_passed_on(make_ready: Callable[..., TestClient], engine: FakeEngine) -> None:
    client = make_ready(engine)
    headers = {"Authorization": "Bearer sk-the-callers-own"}
    seen = client.post("/v1/mcp/tools/maths_headers", json={}, headers=headers).json()["output"]
    assert f"authorization: {KEY}" in seen and "callers" not in seen


def test_a_client_that_goes_away_ends_the_tool(
    listen: Callable[..., str], engine: FakeEngine, mcp_config: Path, tmp_path: Path
) -> None:
    url, note = listen(engine, mcp_config=mcp_config), tmp_path / "note"
    wait_for(lambda: httpx.get(f"{url}/v1/mcp/servers").json()["data"][0]["status"] == "ready", 20)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/mcp/tools/maths_slow", json={"arguments": {"note": str(note)}}, timeout=1)
    wait_for(lambda: note.read_text() == "cancelled")


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], str]]]:
    """The whole server in a process of its own, in whose directory the mcp.json lies."""
    processes = []

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.fake_engine", "0", "0", "1", "mcp.json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        )
        processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        line = process.stdout.readline()
        assert line.startswith("Serving fake on http://"), line
        return process, line.split(" on ")[1].split("/v1")[0]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_sighup_reads_the_file_again_and_the_end_leaves_nobody(program, tmp_path: Path) -> None:
    def write(*labels: str) -> None:
        old = {"command": sys.executable, "args": [OLD_SERVER]}
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": dict.fromkeys(labels, old)}))

    def statuses() -> dict[str, str]:
        return {one["label"]: one["status"] for one in httpx.get(f"{url}/v1/mcp/servers").json()["data"]}

    def family(label: str) -> list[int]:
        output = httpx.post(f"{url}/v1/mcp/tools/{label}_family", json={}).json()["output"]
        return list(map(int, output.split()))

    write("a")
    process, url = program()
    wait_for(lambda: statuses() == {"a": "ready"}, 20)
    pids = family("a")
    write("a", "b")
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: statuses() == {"a": "ready", "b": "ready"}, 20)
    assert family("a")[0] == pids[0], "what is unchanged goes on"
    (tmp_path / "mcp.json").write_text("{")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert statuses() == {"a": "ready", "b": "ready"}, "a wrong file changes nothing"
    pids += family("b")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_a_server_that_is_killed_leaves_nobody_who_reads_its_stdin(program, tmp_path: Path) -> None:
    old = {"command": sys.executable, "args": [OLD_SERVER]}
    (tmp_path / "mcp.json").write_text(json.dumps([{"name": "a", **old}]))
    process, url = program()
    wait_for(lambda: httpx.get(f"{url}/v1/mcp/tools").json()["data"], 20)
    pid = int(httpx.post(f"{url}/v1/mcp/tools/a_family", json={}).json()["output"].split()[0])
    process.kill()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
