"""Tool servers in processes of their own, over every transport, well and otherwise."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from jaxllm.mcp.servers import ToolServer, ToolServers
from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.tools import ToolResult
from tests.mcp.conftest import (
    BAD_SERVER,
    OLD_SERVER,
    TOOL_SERVER,
    Listening,
    Loop,
    free_port,
    python,
    settle,
    wait_for,
)

LIMIT = 1000
KEY = "Bearer sk-the-key-of-a-tool-server"
TRANSPORTS = ("stdio", "http", "sse")


@pytest.fixture(scope="module")
def listening() -> Iterator[dict[str, Listening]]:
    started = {"http": Listening("http", KEY), "sse": Listening("sse", KEY)}
    for one in started.values():
        wait_for(one.listens, 30)
    yield started
    for one in started.values():
        one.end()


@pytest.fixture(scope="module")
def servers(loop: Loop, listening: dict[str, Listening]) -> Iterator[ToolServers]:
    os.environ["JAXLLM_API_KEY"] = "sk-nobodys-business"
    key = {"Authorization": KEY}
    everyone = ToolServers(
        [
            python("stdio", TOOL_SERVER, "stdio", env={"TOKEN": "s3cret-token"}, description="Tests."),
            ServerSettings("http", "http", url=listening["http"].url, headers=key),
            ServerSettings("sse", "sse", url=listening["sse"].url, headers=key),
            python("old", OLD_SERVER),
            python("evil", BAD_SERVER, "evil"),
            python("endless", BAD_SERVER, "endless"),
            python("silent", "-c", "import time; time.sleep(60)", timeout=1),
            python("chatty", "-c", "while True: print('x' * 10**6, end='')", timeout=10),
            python(
                "broken",
                "-c",
                "import sys, os; sys.exit(f'cannot start: {os.environ[\"TOKEN\"]}')",
                env={"TOKEN": "s3cret-token"},
            ),
            ServerSettings("missing", "stdio", command="/nowhere/to/be/found"),
            ServerSettings("refused", "http", url=f"http://127.0.0.1:{free_port()}/mcp?key=s3cret-key"),
            ServerSettings("unwelcome", "http", url=listening["http"].url),
            ServerSettings("unheard", "sse", url=listening["sse"].url),
        ],
        result_limit=LIMIT,
    )
    settle(loop, everyone)
    del os.environ["JAXLLM_API_KEY"]
    yield everyone
    loop.run(everyone.close())


@pytest.fixture
def call(loop: Loop, servers: ToolServers) -> Callable[..., ToolResult]:
    return lambda label, name, **arguments: loop.run(servers.servers[label].call(name, arguments))


def tool_names(server: ToolServer) -> set[str]:
    return {tool.name for tool in server.tools}


@pytest.mark.parametrize("label", TRANSPORTS)
def test_tools_are_listed_and_called_over_every_transport(servers, call, label: str) -> None:
    server = servers.servers[label]
    assert (server.status, server.error) == ("ready", None)
    tool = servers.find(f"{label}_add")
    assert (tool.server, tool.name, tool.description, tool.read_only) == (label, "add", "Add two numbers.", True)
    assert tool.parameters["required"] == ["a", "b"] and not servers.find(f"{label}_fail").read_only
    assert call(label, "add", a=2, b=3) == ToolResult("5")


@pytest.mark.parametrize("label", TRANSPORTS)
def test_a_tools_failure_is_told(call, label: str) -> None:
    failed = call(label, "fail", reason="the sky is falling")
    assert "the sky is falling" in failed.text and failed.text.startswith("The tool failed")
    assert failed.error["type"] == "mcp_tool_execution_error"
    assert "the sky is falling" in failed.error["content"][0]["text"]
    for wrong in (call(label, "nothing_of_that_name"), call(label, "add", a="no number")):
        assert wrong.error is not None and wrong.text


@pytest.mark.parametrize("label", TRANSPORTS)
def test_a_call_that_is_cancelled_or_takes_too_long_ends_the_tool(
    loop, servers, tmp_path, monkeypatch, label: str
) -> None:
    """Both leave the server ready for more."""
    server, note = servers.servers[label], tmp_path / "note"

    async def cancel() -> None:
        task = asyncio.create_task(server.call("slow", {"note": str(note)}))
        while not note.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop.run(cancel())
    wait_for(lambda: note.read_text() == "cancelled")
    note.unlink()
    monkeypatch.setattr(server, "settings", dataclasses.replace(server.settings, timeout=0.5))
    result = loop.run(server.call("slow", {"note": str(note)}))
    assert result.error == {"type": "mcp_protocol_error", "code": -32001, "message": "it did not answer within 0.5 s"}
    wait_for(lambda: note.read_text() == "cancelled")
    assert loop.run(server.call("add", {"a": 1, "b": 1})).text == "2"


@pytest.mark.parametrize("label", TRANSPORTS)
def test_results_are_cut_to_the_limit(call, label: str) -> None:
    cut = call(label, "huge", size=400_000)
    assert cut == ToolResult("x" * LIMIT + f"\n[cut here: {LIMIT} of 400000 characters]")
    assert call(label, "huge", size=LIMIT).text == "x" * LIMIT


@pytest.mark.parametrize("label", TRANSPORTS)
def test_a_message_that_is_too_large_is_said_and_survived(loop, servers, call, label: str) -> None:
    """Over stdio and SSE it costs the connection, which is made anew."""
    failed = call(label, "huge", size=20_000_000)
    assert failed.error["type"].endswith("_error") and ("bytes" in failed.text or "byte limit" in failed.text)
    wait_for(lambda: servers.servers[label].status == "ready")
    assert call(label, "add", a=1, b=2).text == "3"


def test_results_hold_no_control_characters(call) -> None:
    assert call("stdio", "controls").text == "a[31mbc</s>"


def test_a_server_inherits_few_variables(call) -> None:
    given = json.loads(f"[{','.join(map(json.dumps, call('stdio', 'variables').text.splitlines()))}]")
    names = {line.partition("=")[0] for line in given}
    assert "TOKEN=s3cret-token" in given and "PATH" in names
    assert "JAXLLM_API_KEY" not in names and not [name for name in names if name.startswith("PYTEST")]


def test_configured_headers_are_sent(call) -> None:
    assert f"authorization: {KEY}" in call("http", "headers").text


def test_new_tools_are_noticed(loop, servers, call) -> None:
    for label in ("http", "stdio"):
        assert call(label, "grow").text == "grown"
        wait_for(lambda label=label: "plus" in tool_names(servers.servers[label]))
        assert call(label, "plus", a=20, b=22).text == "42"


def test_a_server_of_the_older_protocol(servers, call) -> None:
    old = servers.servers["old"]
    assert tool_names(old) == {"blocks", "grow", "family", "die"}
    result = call("old", "blocks")
    assert result.text == "one\n[image of type image/png]\ntwo\n[three: file:///three]"
    assert result.images == ("aGVsbG8=",)
    assert call("old", "grow").text == "changed"
    wait_for(lambda: "later" in tool_names(old))


def test_tools_that_cannot_be_offered_are_left_out_and_named(servers) -> None:
    evil = servers.servers["evil"]
    assert [tool.full_name for tool in evil.tools] == ["evil_good", "evil_controls", "evil_deep"]
    assert all(len(tool.description or "") <= 4096 for tool in evil.tools)
    assert servers.find("evil_controls").description == "Obey[2J this"
    assert evil.refused == {
        "good": "the server has two of this name",
        "two lines": "a name must be of letters, digits, _ and -",
        "ünïcode": "a name must be of letters, digits, _ and -",
        "n" * 80: "with the server's name before it, it has 205 characters; it may have 64",
        "": "the server has a tool without a name",
        "schema": evil.refused["schema"],
    }
    assert evil.refused["schema"].endswith("it may have 65536")


@pytest.mark.parametrize(
    ("label", "error"),
    [
        ("endless", "its list of tools does not end: 100 came; a server may have 1000"),
        ("silent", "it did not answer within 1 s"),
        ("chatty", "it sent a message of more than 16777216 bytes"),
        ("broken", "the program ended with status 1: cannot start: ***"),
        ("missing", "the command '/nowhere/to/be/found' cannot be started: no such file or directory"),
        ("refused", "it cannot be reached: All connection attempts failed"),
        ("unwelcome", "it answered 401 Unauthorized"),
        ("unheard", "it answered 401 Unauthorized"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(loop, servers, label: str, error: str) -> None:
    server = servers.servers[label]
    assert (server.status, server.error, list(server.tools)) == ("failed", error, [])
    before = time.monotonic()
    result = loop.run(server.call("anything", {}))
    assert error in result.text and result.error is not None
    assert time.monotonic() - before < 1, "a call of a server that is not there waits for nothing"


def test_no_secret_is_in_a_representation(servers) -> None:
    shown = [f"{server.settings!r} {server.error}" for server in servers.servers.values()]
    assert not [text for text in shown if "s3cret" in text or "sk-the-key" in text]


class Fleeting:
    """Servers of one test alone."""

    def __init__(self, loop: Loop, *settings: ServerSettings):
        self.loop = loop
        self.servers = ToolServers(settings)

    def __enter__(self) -> ToolServers:
        settle(self.loop, self.servers)
        return self.servers

    def __exit__(self, *_: Any) -> None:
        self.loop.run(self.servers.close())


def test_a_server_that_dies_is_started_again(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, "jaxllm.mcp"),
        Fleeting(loop, python("mortal", OLD_SERVER, env={"TOKEN": "last words"})) as servers,
    ):
        server = servers.servers["mortal"]
        failed = loop.run(server.call("die", {}))
        assert failed.error["code"] == -32000
        assert failed.error["message"] == "the program ended with status 1: these are my ***"
        assert server.status == "failed" and server.error == failed.error["message"]
        wait_for(lambda: server.status == "ready")
        assert loop.run(server.call("grow", {})).text == "changed"
    assert server.status == "stopped"
    assert "these are my ***" in caplog.text and "last words" not in caplog.text


class Forgetful(BaseHTTPRequestHandler):
    """Streamable HTTP as of 2025: a session that other requests must name, and that a new process knows nothing of."""

    sessions: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.headers.get("Mcp-Session-Id")
        if asked["method"] == "initialize":
            session = f"s{len(self.sessions)}"
            self.sessions.add(session)
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "old", "version": "1"}}
            result: Any = {"protocolVersion": "2025-06-18", **about}
        elif session not in self.sessions:
            return self.answer(404 if session else 400, b"")
        elif "id" not in asked:
            return self.answer(202, b"")
        elif asked["method"] == "tools/list":
            result = {"tools": [{"name": "which", "inputSchema": {"type": "object"}}]}
        else:
            result = {"content": [{"type": "text", "text": session}]}
        self.answer(200, json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode(), session)

    def do_GET(self) -> None:
        self.answer(405, b"")

    do_DELETE = do_GET

    def answer(self, status: int, body: bytes, session: str | None = None) -> None:
        self.send_response(status)
        if session:
            self.send_header("Mcp-Session-Id", session)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_session_that_the_server_forgot_is_begun_anew(loop: Loop) -> None:
    """The call that found it out is made again: nothing was done."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Forgetful) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_address[1]}/mcp"
        with Fleeting(loop, ServerSettings("old", "http", url=url)) as servers:
            server = servers.servers["old"]
            assert loop.run(server.call("which", {})) == ToolResult("s0")
            Forgetful.sessions.remove("s0")
            Forgetful.sessions.add("another's")
            assert loop.run(server.call("which", {})) == ToolResult("s1")
        http.shutdown()


def test_a_server_that_is_gone_for_a_while_is_found_again(loop: Loop) -> None:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Forgetful)
    address = http.server_address
    threading.Thread(target=http.serve_forever, daemon=True).start()
    settings = ServerSettings("away", "http", url=f"http://127.0.0.1:{address[1]}/mcp")
    with Fleeting(loop, settings) as servers:
        server = servers.servers["away"]
        http.shutdown()
        http.server_close()
        failed = loop.run(server.call("which", {}))
        assert failed.error["type"] == "http_error" and "it cannot be reached" in failed.text
        wait_for(lambda: server.status == "failed")
        with ThreadingHTTPServer(address, Forgetful) as again:
            threading.Thread(target=again.serve_forever, daemon=True).start()
            wait_for(lambda: server.status == "ready")
            assert loop.run(server.call("which", {})).error is None
            again.shutdown()


@pytest.mark.parametrize("detached", [False, True])
def test_nothing_that_a_server_started_outlives_it(loop: Loop, detached: bool) -> None:
    with Fleeting(loop, python("parent", OLD_SERVER)) as servers:
        pids = list(map(int, loop.run(servers.servers["parent"].call("family", {"detached": detached})).text.split()))
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_reloading_keeps_those_that_are_unchanged(loop: Loop) -> None:
    same, changed, new = python("same", OLD_SERVER), python("b", OLD_SERVER), python("c", OLD_SERVER)
    with Fleeting(loop, same, changed) as servers:
        process = loop.run(servers.servers["same"].call("family", {"detached": False})).text.split()[0]
        gone = servers.servers["b"]
        loop.run(servers.reload([same, python("b", OLD_SERVER, timeout=9), new]))
        assert gone.status == "stopped" and list(servers.servers) == ["same", "b", "c"]
        assert loop.run(servers.servers["same"].call("family", {"detached": False})).text.split()[0] == process
        for label in ("b", "c"):
            loop.run(servers.servers[label].ready(10))
            assert servers.find(f"{label}_grow") is not None
        loop.run(servers.reload([]))
        assert not servers.servers and not servers.tools() and not psutil.pid_exists(int(process))


@pytest.mark.parametrize("pause", [0, 0.003, 0.03])
def test_a_server_may_be_ended_while_it_starts(loop: Loop, pause: float) -> None:
    servers = ToolServers([python("silent", "-c", "import sys; sys.stdin.read()", cwd="/")])
    loop.run(servers.start())
    time.sleep(pause)
    loop.run(servers.close())
    assert servers.servers["silent"].status == "stopped"
    assert not [one for one in psutil.Process().children() if one.status() != "zombie" and one.cwd() == "/"]


def test_a_server_for_one_request_is_in_no_list(loop: Loop, servers: ToolServers, listening: Any) -> None:
    settings = ServerSettings("brief", "http", url=listening["http"].url, headers={"Authorization": KEY})
    server = loop.run(servers.connect(settings))
    loop.run(server.ready(10))
    assert loop.run(server.call("add", {"a": 4, "b": 5})).text == "9"
    assert "brief" not in servers.servers and servers.find("brief_add") is None
    loop.run(server.close())
    assert server.status == "stopped"


def test_urls_of_requests_reach_public_addresses_only(loop: Loop, servers: ToolServers) -> None:
    for url, error in {
        "https://127.0.0.1:1/mcp": "it cannot be reached: 127.0.0.1 is 127.0.0.1, which is no public address",
        "https://localhost/mcp": "which is no public address",
        "https://169.254.169.254/latest": "which is no public address",
        "https://[::ffff:10.0.0.1]/mcp": "which is no public address",
        "http://1.1.1.1/mcp": "the url must be https",
    }.items():
        server = loop.run(servers.connect(ServerSettings("private", "http", url=url, public_only=True)))
        loop.run(server.ready(10))
        assert server.status == "failed" and error in str(server.error)
        loop.run(server.close())


def test_a_cancelled_close_still_ends_the_process(loop: Loop, tmp_path: Path) -> None:
    """As when the server's own end is cut short."""
    with Fleeting(loop, python("parent", OLD_SERVER)) as servers:
        pid = int(loop.run(servers.servers["parent"].call("family", {"detached": False})).text.split()[0])

        async def cut_short() -> None:
            closing = asyncio.create_task(servers.close())
            await asyncio.sleep(0)
            closing.cancel()

        loop.run(cut_short())
        wait_for(lambda: not psutil.pid_exists(pid))
