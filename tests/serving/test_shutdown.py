"""Taking the port, and stopping on signals, in a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError, ModelNotFoundError
from jaxllm.serving.http.listening import bind
from jaxllm.serving.server import serve
from tests.serving import fake_engine
from tests.serving.conftest import wait_for

pytestmark = pytest.mark.programs

HELLO = [{"role": "user", "content": "Hi"}]
ROOT = Path(fake_engine.__file__).parents[2]


@pytest.fixture
def run() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    processes = []

    def start(delay: float, shutdown_timeout: float) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", fake_engine.__name__, "0", str(delay), str(shutdown_timeout)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving fake on http://127.0.0.1:"), line
        return process, line.split(" on ")[1].split("/v1")[0]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


class Stream(threading.Thread):
    """Reads one chat stream to its end."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.url = url
        self.text = ""
        self.start()
        wait_for(lambda: '"content":"T"' in self.text)

    def run(self) -> None:
        body = {"messages": HELLO, "stream": True}
        try:
            with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=20) as response:
                for part in response.iter_text():
                    self.text += part
        except httpx.RemoteProtocolError:
            self.text += "(broken off)"

    def last(self) -> Any:
        """What was sent before [DONE]."""
        self.join(10)
        *_, last, done, end = self.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return json.loads(last.removeprefix("data: "))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_idle_server_stops_at_once(run: Any, sig: int) -> None:
    process, url = run(0.0, 30.0)
    assert httpx.get(f"{url}/ready").status_code == 200
    process.send_signal(sig)
    assert process.wait(5) == 0
    assert process.stdout.read() == "Stopping\nstopped\n"


def test_running_requests_finish_and_new_ones_are_refused(run: Any) -> None:
    process, url = run(0.03, 30.0)
    stream = Stream(url)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
    assert httpx.get(f"{url}/health").status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    assert stream.last()["choices"][0]["finish_reason"] == "stop"
    assert process.wait(5) == 0


def test_requests_beyond_the_timeout_end_with_an_error(run: Any) -> None:
    process, url = run(0.4, 0.3)
    stream = Stream(url)
    waiting: list[httpx.Response] = []
    post = threading.Thread(
        target=lambda: waiting.append(httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=20))
    )
    post.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    told = {
        "message": "the server stopped before the answer was complete",
        "type": "server_error",
        "param": None,
        "code": "shutting_down",
    }
    assert stream.last() == {"error": told} and 'finish_reason":"' not in stream.text
    post.join(5)
    assert waiting[0].status_code == 503 and waiting[0].json() == {"error": told}
    assert process.wait(5) == 0


def test_second_signal_exits_at_once(run: Any) -> None:
    process, url = run(0.4, 60.0)
    stream = Stream(url)
    process.send_signal(signal.SIGINT)
    assert (
        process.stdout.readline() == "Stopping: 1 running requests have 60 s to finish (Ctrl-C again to exit at once)\n"
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(2) == 128 + signal.SIGINT
    stream.join(5)
    assert stream.text.endswith("(broken off)")


def test_a_port_in_use_is_said_before_the_model_loads_and_a_name_of_no_model_before_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port {port} on 127\.0\.0\.1 is in use; .*--port") as error:
            serve(ServeConfig(model="no/such-model", port=port))
        with pytest.raises(ModelNotFoundError, match="model 'no-such-model' is no built-in name"):  # and not the port
            serve(ServeConfig(model="no-such-model", port=port))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_before_the_model_loads(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 'hermse'"):
        serve(ServeConfig(model="no/such-model", port=0, **{field: "hermse"}))


def test_the_second_of_two_servers_is_refused_while_the_first_loads() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port {port} on 127\.0\.0\.1 is in use"):
            bind("127.0.0.1", port)
        waiting = socket.create_connection(("127.0.0.1", port), timeout=1)  # not refused, though nobody answers yet
        waiting.close()


def test_one_line_a_request_at_any_log_level() -> None:
    script = (
        "from jaxllm.config import ServeConfig\n"
        "from jaxllm.serving.http.listening import bind\nfrom jaxllm.serving.server import configure_logging\n"
        "from tests.serving.fake_engine import FakeEngine, serve_engine\n"
        "config = ServeConfig(port=0, log_level='error', enable_request_logging=True)\n"
        "configure_logging(config)\n"
        "serve_engine(config, FakeEngine(), bind(config.host, 0))\n"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    url = process.stdout.readline().split(" on ")[1].split("/v1")[0]
    httpx.get(f"{url}/version")
    process.terminate()
    _, log = process.communicate(timeout=10)
    assert log.count("\n") == 1 and '"GET /version" 200, request ' in log


def test_unreachable_host() -> None:
    for host in ("203.0.113.7", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=f"host is '{host}'"):
            bind(host, 0)
