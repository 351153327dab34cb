"""Listening on a file."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.http.listening import address, bind, bind_file, listening
from jaxllm.serving.server import serve

pytestmark = pytest.mark.programs

SERVER = """
import sys
from jaxllm.config import ServeConfig
from jaxllm.serving.http.listening import listening
from tests.serving.fake_engine import FakeEngine, serve_engine

config = ServeConfig(model="fake", uds=sys.argv[1], enable_request_logging=True, log_level="info")
with listening(config) as listener:
    serve_engine(config, FakeEngine(), listener)
"""


def test_a_server_answers_on_a_file_and_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    command = [sys.executable, "-c", SERVER, str(path)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert f"Serving fake on unix:{path}" in process.stdout.readline()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            body = {"prompt": "Hi", "max_tokens": 3}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "The"
    finally:
        process.terminate()
    assert process.wait(30) == 0 and not path.exists()


def test_the_file_of_a_server_that_has_ended_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    bind_file(path).close()
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    with listening(ServeConfig(uds=path)) as listener:
        assert address(listener) == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        with pytest.raises(ConfigError, match="where another server listens"):
            bind_file(path)
    assert not path.exists()


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"uds is '.*notes\.txt', which is a file of another kind"):
        bind_file(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match=r"uds is '.*/no/s\.sock': No such file or directory"):
        bind_file(tmp_path / "no" / "s.sock")


def test_a_file_and_an_address_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="uds and port exclude each other"):
        ServeConfig(uds=Path("/x.sock"), port=1)


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system keeps what it likes")
def test_the_system_keeps_little_of_what_a_client_does_not_read() -> None:
    with bind("127.0.0.1", 0) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            connection.setblocking(False)
            kept = 0
            with pytest.raises(BlockingIOError):
                while True:
                    kept += connection.send(b"a" * 65536)
    assert kept < 2**20


def test_what_is_wrong_in_the_settings_is_said_before_the_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(port=taken.getsockname()[1], tool_call_parser="gibberish", data_dir=tmp_path)
        with pytest.raises(ConfigError, match="tool_call_parser is 'gibberish'"):
            serve(config)
