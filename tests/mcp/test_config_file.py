"""mcp.json in its three shapes, and what is said where it is wrong."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ConfigError
from jaxllm.mcp.settings import ServerSettings, find_settings, read_settings

Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(document: Any) -> Path:
        path = tmp_path / "mcp.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


FILES = {"command": "files", "args": ["--root", "/tmp"], "env": {"A": "b"}, "cwd": "/srv"}
WEATHER = {"url": "https://weather.example/mcp", "auth": "Bearer k", "timeout_secs": 5, "instructions": "Forecasts."}
EXPECTED = [
    ServerSettings("files", "stdio", command="files", args=("--root", "/tmp"), env={"A": "b"}, cwd="/srv"),
    ServerSettings(
        "weather",
        "http",
        url="https://weather.example/mcp",
        headers={"Authorization": "Bearer k"},
        timeout=5,
        description="Forecasts.",
    ),
]


@pytest.mark.parametrize(
    "document",
    [
        {"mcpServers": {"files": FILES, "weather": WEATHER}},
        {"servers": [{"name": "files", **FILES}, {"name": "weather", **WEATHER}]},
        [{"name": "files", **FILES}, {"name": "weather", **WEATHER}],
        {"servers": {"files": FILES, "weather": WEATHER}},
    ],
    ids=["mcpServers", "servers", "array", "servers-by-name"],
)
def test_every_shape_says_the_same(write: Write, document: Any) -> None:
    assert read_settings(write(document)) == EXPECTED


@pytest.mark.parametrize(
    ("given", "transport"),
    [
        ({"type": "stdio", "command": "x"}, "stdio"),
        ({"command": "x"}, "stdio"),
        ({"url": "http://x/mcp"}, "http"),
        ({"type": "http", "url": "http://x/mcp"}, "http"),
        ({"type": "streamable-http", "url": "http://x/mcp"}, "http"),
        ({"type": "streamableHttp", "url": "http://x/mcp"}, "http"),
        ({"type": "sse", "url": "http://x/sse"}, "sse"),
    ],
)
def test_transports(write: Write, given: dict[str, Any], transport: str) -> None:
    assert read_settings(write([{"name": "a", **given}]))[0].transport == transport


def test_variables_come_from_the_environment(write: Write) -> None:
    document = {
        "a": {"command": "${HOME}/bin/a", "args": ["${X:-y}"], "env": {"TOKEN": "${TOKEN}"}},
        "b": {"url": "https://x/${PART}", "auth": "Bearer ${TOKEN}", "headers": {"X-Other": "${OTHER:-none}"}},
    }
    environ = {"HOME": "/home/me", "TOKEN": "s3cret", "PART": "mcp"}
    a, b = read_settings(write({"mcpServers": document}), environ)
    assert (a.command, a.args, a.env) == ("/home/me/bin/a", ("y",), {"TOKEN": "s3cret"})
    assert (b.url, b.headers) == ("https://x/mcp", {"Authorization": "Bearer s3cret", "X-Other": "none"})
    assert "s3cret" not in repr(a) + repr(b) and b.shown("got s3cret back") == "got *** back"


def test_a_disabled_server_is_left_out(write: Write) -> None:
    document = {"mcpServers": {"files": FILES | {"disabled": True}, "weather": WEATHER}}
    assert [one.label for one in read_settings(write(document))] == ["weather"]


def only(**fields: Any) -> Any:
    return {"mcpServers": {"a": fields}}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"mcpServers": {"a": {}, "a": {}}}', "'a' is there twice"),
        ({}, "has neither; it must have one of mcpServers and servers, and nothing else"),
        ({"mcpServer": {}}, "has 'mcpServer'; it must have one of mcpServers and servers, and nothing else"),
        ({"mcpServers": {}, "servers": []}, "has mcpServers and servers; it must have one of"),
        ({"mcpServers": 1}, "the servers are 1; they must be a list or an object"),
        ([{"command": "x"}], "servers[0] has no name; it must be an object with a name"),
        ([{"name": "a", "command": "x"}] * 2, "server 'a': there are two servers named 'a'"),
        ({"mcpServers": {"a b": {}}}, "server 'a b': the name is 'a b'; it must be 1 to 48 letters, digits, _ and -"),
        ({"mcpServers": {"a": []}}, "server 'a': is []; it must be an object"),
        (only(command="x", name="b"), "server 'a': name is 'b', but its key is 'a'; leave name out"),
        (only(), "server 'a': has neither command nor url; it must have one of them"),
        (only(command="x", url="http://x"), "server 'a': has both command and url; it must have one of them"),
        (only(type="sse", command="x"), "server 'a': type is 'sse', which needs a url"),
        (only(command="x", comand="y"), "server 'a': unknown field 'comand'; did you mean 'command'?"),
        (only(command="x", args="y"), "server 'a': args is \"y\": it must be a list"),
        (only(command="x", timeout_secs=0), "server 'a': timeout_secs is 0: it must be above 0"),
        (only(command="x", headers={"a": "b"}), "server 'a': headers belongs to servers with a url"),
        (only(url="http://x", env={"a": "b"}), "server 'a': env belongs to servers with a command"),
        (only(url="ftp://x"), "server 'a': url must begin with http:// or https://"),
        (only(url="http://x", type="websocket"), "server 'a': type is \"websocket\": it must be 'stdio', 'http'"),
        (
            only(url="http://x", auth="a", headers={"authorization": "b"}),
            "auth and headers.Authorization are one setting",
        ),
        (only(url="http://x", headers={"a": "b\nc"}), "server 'a': headers.a must be printable ASCII"),
        (only(command="x", env={"A": "${NOT_SET}"}), "env.A needs the environment variable NOT_SET, which is not set"),
        (
            {"mcpServers": {"git": {"command": "x"}, "git_hub": {"command": "x"}}},
            "tools of servers 'git' and 'git_hub' could have the same name; rename the second, as 'git-hub'",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(write: Write, document: Any, problem: str) -> None:
    path = write(document)
    with pytest.raises(ConfigError) as raised:
        read_settings(path, {})
    message = str(raised.value)
    assert message.startswith(f"{path}: ") and problem in message and "\n" not in message, message


def test_no_value_that_may_be_secret_is_said(write: Write) -> None:
    for fields in ({"env": {"A": 12345678}}, {"auth": 12345678}, {"headers": {"a": 12345678}}, {"url": "x12345678"}):
        with pytest.raises(ConfigError) as raised:
            read_settings(write(only(**fields)))
        assert "12345678" not in str(raised.value)


def test_a_file_that_nobody_has_named_starts_nothing(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_settings(None) == (None, [])
    with pytest.raises(ConfigError, match=r"mcp_config is 'other\.json': no such file or directory"):
        find_settings(Path("other.json"))
    here = write(only(command="x"))
    with caplog.at_level(logging.WARNING):
        assert find_settings(None) == (None, [])
    assert "mcp.json in this folder is not used; start its tool servers with --mcp-config mcp.json" in caplog.text
    expected = ServerSettings("a", "stdio", command="x", cwd=str(tmp_path))
    assert find_settings(Path("mcp.json")) == (Path("mcp.json"), [expected])
    assert find_settings(Path("off")) == (None, [])
    elsewhere = here.rename(tmp_path / "other.json")
    assert find_settings(elsewhere)[0] == elsewhere


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python", sys.executable),
        ("python3", sys.executable),
        ("npx", "npx"),
        ("./run.sh", "{folder}/run.sh"),
        ("bin/../run.sh", "{folder}/run.sh"),
        ("/usr/bin/python", "/usr/bin/python"),
        ("~/run.sh", "{home}/run.sh"),
        ("${TOOLS}/run.sh", "{folder}/tools/run.sh"),
    ],
)
def test_a_program_is_ours_in_the_path_or_in_the_files_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, program: str
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    (server,) = read_settings(write(only(command=command)), {"TOOLS": "tools"})
    assert server.command == program.format(folder=tmp_path, home="/home/somebody")


@pytest.mark.parametrize(("cwd", "folder"), [(None, "."), ("data", "data"), ("..", ".."), ("/srv", "/srv")])
def test_a_program_runs_in_the_files_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cwd: str | None, folder: str
) -> None:
    monkeypatch.chdir("/")
    fields = {"command": "x"} if cwd is None else {"command": "x", "cwd": cwd}
    (server,) = read_settings(write(only(**fields)))
    assert server.cwd == str((tmp_path / folder).resolve())
