"""A server of two processes answers as one, and ends as one; under mpirun where that is installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.reference.tiny import write_checkpoint
from tests.serving.conftest import wait_for
from tests.serving.real_server import engine_process, gauges, server_process
from tests.sharding.ports import free_port
from tests.support.several_processes import running, variables

pytestmark = pytest.mark.programs

START_SECONDS = 120
END_SECONDS = 25
SETTINGS = {
    "dtype": "float32", "tensor-parallel-size": 2, "max-model-len": 256, "max-num-seqs": 2,
    "max-num-batched-tokens": 16, "kv-cache-memory": "4MiB", "decode-buckets": 2, "prefill-buckets": 16,
    "cpu-kernels": "off", "shutdown-timeout": 1, "decode-steps": 1,
}  # fmt: skip
PROMPT = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}
MPIRUN = shutil.which("mpirun")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama_gqa", tmp_path_factory.mktemp("model"))


def command(model: Path, tmp_path: Path, port: int, **settings: Any) -> list[str]:
    own = {"port": port, "data-dir": tmp_path / "data", "compile-cache-dir": os.environ["TESTS_COMPILE_CACHE"]}
    flags = [f"--{name}={value}" for name, value in (SETTINGS | own | settings).items()]
    return [sys.executable, "-m", "jaxllm", "serve", str(model), "--skip-tokenizer-init", *flags]


def by_variables(number: int, job: str) -> dict[str, str]:
    """The environment that Open MPI gives one of two processes."""
    of_mpi = {
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": job,
    }  # fmt: skip
    return variables() | of_mpi


@contextmanager
def pair(model: Path, tmp_path: Path, port: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Both servers, ready."""
    job = tmp_path.as_posix()
    with running(*((command(model, tmp_path, port), by_variables(number, job)) for number in range(2))) as processes:
        wait_until_ready(port, processes)
        yield processes


def wait_until_ready(port: int, processes: list[subprocess.Popen[str]]) -> None:
    def ready() -> bool:
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(ready, START_SECONDS)


def test_a_group_answers_and_ends_in_order(model: Path, tmp_path: Path) -> None:
    port = free_port()
    whole = command(model, tmp_path, port)
    environment = variables()
    if MPIRUN is not None:
        mpirun = [MPIRUN, "-n", "2", "--bind-to", "none", "--allow-run-as-root", "--oversubscribe"]
        started = [([*mpirun, *whole], environment)]
    else:
        started = [(whole, by_variables(number, tmp_path.as_posix())) for number in range(2)]
    with running(*started) as processes:
        wait_until_ready(port, processes)
        url, follower = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        health = httpx.get(f"{follower}/health")
        assert health.status_code == 200
        assert health.json() == {"status": "ok", "process_id": 1, "num_processes": 2}
        assert httpx.post(f"{follower}/v1/completions", json=PROMPT).status_code == 404
        body = PROMPT | {"max_tokens": 40, "logprobs": 1}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=60) for _ in range(2)]
        first, again = (answer.json()["choices"][0]["logprobs"]["tokens"] for answer in answers)
        assert len(first) == 40 and first == again
        slept = httpx.post(f"{url}/sleep")
        assert slept.status_code == 400 and httpx.get(f"{url}/ready").status_code == 200
        server_process(url).send_signal(signal.SIGTERM)  # mpirun itself, told to stop, says that it was ended
        ends = [process.communicate(timeout=END_SECONDS) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), ends


def answers_around(port: int, blow: Callable[[], None]) -> list[httpx.Response]:
    """Answers to more requests than run at once, in whose middle `blow` is struck."""
    body = PROMPT | {"max_tokens": 240, "n": 2}
    url = f"http://127.0.0.1:{port}"
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(8)]
        wait_for(lambda: gauges(url)["num_requests_running"] > 0)
        blow()
        return [one.result() for one in asked]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, r"process 1 on \S+ is gone; the group has ended"),
        (signal.SIGTERM, r"process 1 on \S+ was told to stop \(SIGTERM\) and has left; the group has ended"),
    ],
)
def test_requests_are_told_that_a_process_has_left(
    model: Path, tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    port = free_port()
    with pair(model, tmp_path, port) as processes:
        if number is signal.SIGKILL:
            told = answers_around(port, lambda: processes[1].send_signal(number))
            failed = [answer for answer in told if answer.status_code != 200]
            assert failed and {answer.status_code for answer in failed} == {503}
            assert all(re.fullmatch(reason, answer.json()["error"]["message"]) for answer in failed)
        else:
            processes[1].send_signal(number)
        said = processes[0].communicate(timeout=END_SECONDS)[1]
        assert re.fullmatch(rf"jaxllm: error: {reason}", said.strip().splitlines()[-1])
        assert processes[0].returncode == 1
        assert processes[1].wait(END_SECONDS) != 0


def test_a_health_port_that_is_taken_is_one_line(model: Path, tmp_path: Path) -> None:
    port, job = free_port(), tmp_path.as_posix()
    with socket.create_server(("127.0.0.1", port + 1)):
        commands = [(command(model, tmp_path, port), by_variables(number, job)) for number in range(2)]
        with running(*commands) as processes:
            said = [process.communicate(timeout=START_SECONDS)[1] for process in processes]
            assert [process.returncode for process in processes] == [1, 2], said
    problem = f"port {port + 1} on 127.0.0.1 is in use; .*"
    assert re.fullmatch(f"jaxllm: error: {problem}", said[1].splitlines()[-1])
    assert re.fullmatch(
        rf"jaxllm: error: process 1 on \S+ has failed: {problem}; the group has ended", said[0].splitlines()[-1]
    )
    assert not any("Traceback" in text or "coordination" in text for text in said)


def test_the_others_of_a_process_0_that_is_killed_say_so_without_a_traceback(model: Path, tmp_path: Path) -> None:
    port = free_port()
    with pair(model, tmp_path, port) as processes:
        victims = [processes[0], engine_process(psutil.Process(processes[0].pid))]
        with ThreadPoolExecutor(1) as pool:
            body = PROMPT | {"max_tokens": 240}
            asked = pool.submit(httpx.post, f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
            wait_for(lambda: gauges(f"http://127.0.0.1:{port}")["num_requests_running"] > 0)
            for victim in victims:
                victim.kill()
            said = processes[1].communicate(timeout=END_SECONDS)[1]
            assert isinstance(asked.exception(), httpx.TransportError)
        assert processes[1].returncode == 1 and "Traceback" not in said
        assert said.count("jaxllm: error: ") == 1 and "jaxllm: error: process 0 is gone" in said


def test_processes_that_differ_end_at_once_with_the_difference(model: Path, tmp_path: Path) -> None:
    job = tmp_path.as_posix()
    commands = [
        (command(model, tmp_path, free_port(), **{"max-model-len": 256 - number}), by_variables(number, job))
        for number in range(2)
    ]
    with running(*commands) as processes:
        said = [process.communicate(timeout=START_SECONDS)[1].strip().splitlines()[-1] for process in processes]
        assert [process.returncode for process in processes] == [2, 2]
    assert said[0] == said[1] and re.fullmatch(
        r"jaxllm: error: max_model_len is 255 in process 1 on \S+ and 256 in process 0: all must have the same", said[0]
    )
