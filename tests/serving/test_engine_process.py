"""A server whose engine's process stops or must be ended, with signals, from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serving import fake_engine
from tests.serving.conftest import wait_for
from tests.serving.real_server import engine_process

pytestmark = pytest.mark.programs

ROOT = Path(fake_engine.__file__).parents[2]
PROGRAM = """
import sys
from unittest import mock

from jaxllm.config import ServeConfig
from jaxllm.engine.doors import process_client
from jaxllm.serving import server
from tests.engine.doors import stand_in
from tests.serving.fake_engine import ByteTokenizer

def start(config, given_up=None, *rest):
    return process_client.ProcessClient(config, main=getattr(stand_in, sys.argv[3]), given_up=given_up)

if __name__ == "__main__":
    process_client.SILENT_SECONDS = float(sys.argv[1])
    there = "jaxllm.engine.doors.async_llm"
    with (
        mock.patch(f"{there}.start_engine", lambda config, given_up, *rest: (start(config, given_up), ByteTokenizer())),
        mock.patch(f"{there}.start_client", start),
    ):
        server.serve(ServeConfig(model="org/fake", port=0, shutdown_timeout=0.5, data_dir=sys.argv[2]))
    print("stopped", flush=True)
"""
ENDLESS = {"prompt": "a" * 4000, "max_tokens": 100_000, "stream": True}
Server = tuple[psutil.Process, str]
Start = Callable[..., Server]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    started = []

    def start(silent_seconds: float, main: str = "paced") -> Server:
        command = [sys.executable, "-c", PROGRAM, str(silent_seconds), str(tmp_path), main]
        process = psutil.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        started.append(process)
        if main == "never_ready":
            wait_for(lambda: [one for one in children(process) if one.cmdline() != process.cmdline()] != [], 30)
            return process, ""
        line = process.stdout.readline()
        assert line.startswith("Serving "), line
        return process, line.split(" on ")[1].split("/v1")[0]

    yield start
    for process in started:
        for one in (*children(process), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()


def children(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True) if is_there(process) else []


def is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_an_engine_that_stands_still_is_replaced(run: Start) -> None:
    process, url = run(2.0)
    stopped = engine_process(process)
    with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=30) as answer:
        events = answer.iter_lines()
        assert next(events).startswith("data: {")
        stopped.suspend()
        last = [line for line in events if line][-2:]
    assert "engine_dead" in last[0] and "said nothing" in last[0] and last[1] == "data: [DONE]"
    assert [httpx.get(f"{url}/{probe}").status_code for probe in ("ready", "health")] == [503, 503]
    assert not is_there(stopped)
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 30)
    done = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=30)
    assert done.json()["choices"][0]["text"] == "!!!"


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_whose_engine_reads_nothing(run: Start, sig: int) -> None:
    process, url = run(600.0)
    family = children(process)
    engine_process(process).suspend()

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            client.post(f"{url}/v1/completions", json=ENDLESS | {"prompt": [[33] * 20_000] * 4})

    with ThreadPoolExecutor(16) as pool:
        for _ in range(16):  # far more than a pipe holds
            pool.submit(ask)
        wait_for(lambda: httpx.get(f"{url}/load").json()["server_load"] == 16, 20)
        process.send_signal(sig)
        assert process.wait(25) == 0
    wait_for(lambda: not any(map(is_there, family)))


def test_a_signal_to_all_processes_is_the_servers_to_act_on(tmp_path: Path) -> None:
    """As a service manager or `docker stop` of a shell sends it: the engine lives until its requests have ended."""
    command = [sys.executable, "-c", PROGRAM, "600.0", str(tmp_path), "paced"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("Serving "))
        url = line.split(" on ")[1].split("/v1")[0]
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=30) as answer:
            events = answer.iter_lines()
            next(events)
            os.killpg(process.pid, signal.SIGTERM)
            last = [line for line in events if line][-2:]
        assert '"code":"shutting_down"' in last[0] and last[1] == "data: [DONE]"
        rest = process.stdout.read()
        assert process.wait(20) == 0 and "stopped" in rest and "died" not in rest
    finally:
        process.kill()
        process.wait()


def test_a_second_signal_takes_a_stopped_engine_along(run: Start) -> None:
    process, _ = run(600.0)
    family = children(process)
    engine_process(process).suspend()
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Stopping" in process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) != 0
    wait_for(lambda: not any(map(is_there, family)))


def test_a_signal_ends_a_server_that_loads(run: Start) -> None:
    process, _ = run(600.0, "never_ready")
    family = children(process)
    engine_process(process).suspend()
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    wait_for(lambda: not any(map(is_there, family)))
