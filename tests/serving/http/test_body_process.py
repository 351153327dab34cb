"""Large bodies, read in another process: what comes back is what was sent, in short calls, whatever becomes of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import TypeAdapter, ValidationError

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.json_body import SLICE, SMALL_BODY, BodyProcess, Integers, pack, unpack
from jaxllm.serving.openai.tokenize import DetokenizeRequest

MANY = list(range(SLICE))
LONG = "a 世\n" * SLICE


@pytest.fixture(scope="module")
def bodies() -> Iterator[BodyProcess]:
    process = BodyProcess(largest=16 * 2**20)
    yield process
    process.close()


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        None, 1.5, "a", [], {}, LONG, MANY, [1.5, *MANY], [None, *MANY, {"a": [1, LONG, *MANY]}], ["a", LONG] * 9,
        {"a": MANY, LONG: [[*MANY, "x"], [*MANY, *MANY]]}, {str(number): [number, {}] for number in MANY[:30_000]},
        [-1e-7, *([10**17] * SLICE), 2**64 - 1, -(2**63)], nested(LONG, 150),
    ],
)  # fmt: skip
def test_what_is_packed_comes_back(value: Any, bodies: BodyProcess) -> None:
    assert unpack(pack(value)) == value
    for text in (json.dumps({"a": value}), json.dumps({"a": value}, ensure_ascii=False, indent=1)):
        raw = text.encode()
        assert bodies.read([raw[:5], raw[5:]]) == json.loads(text)


def test_the_process_starts_without_what_only_a_server_needs() -> None:
    code = "import sys, jaxllm.serving.http.json_body; assert not {'fastapi', 'starlette', 'jax'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_a_list_of_integers_is_known_as_one() -> None:
    for other in ([1.5, *MANY], [*MANY, True], ["1", *MANY]):
        assert type(unpack(pack(other))) is list
        with pytest.raises(ValidationError):
            DetokenizeRequest.model_validate({"tokens": unpack(pack(other))})
    known = unpack(pack(MANY))
    assert type(known) is Integers
    assert DetokenizeRequest.model_validate({"tokens": known}).tokens is known  # and not looked through again
    with pytest.raises(ValidationError):  # it is no list of texts
        TypeAdapter(list[str]).validate_python(known)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ('{"prompt": "a', None, "EOF while parsing a string at line 1 column"),
        ('{"prompt": "a"} "a', None, "trailing characters at line 1 column"),
        ('["a"]', None, "it must be a JSON object"),
        ('{"prompt": "a", "seed": 1e400, "user": "a"}', "seed", "seed is inf; it must be a number"),
        ('{"prompt": "a", "n": "a"}', "n", "it must be an integer"),
        ('{"prompt": "a", "prompts": 1}', "prompts", "unknown field 'prompts'; did you mean 'prompt'?"),
    ],
)
def test_a_large_body_is_refused_as_a_small_one_is(client: TestClient, body: str, param: str, says: str) -> None:
    errors = []
    for size in (1, 2 * SMALL_BODY):
        content = body.replace('"a', '"' + "a" * size, 1)
        answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        errors.append(answer.json()["error"])
    for error in errors:
        assert error["param"] == param and says in error["message"], error
    assert errors[0]["code"] == errors[1]["code"]


def test_fields_that_are_ignored_are_noted(make_client: Callable[..., TestClient], engine: Any) -> None:
    client = make_client(engine, unknown_fields="warn")
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "frob": "a" * 2 * SMALL_BODY})
    assert answer.json()["warnings"] == ["CompletionRequest: unknown field 'frob'; ignored"]


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
def test_a_large_body_is_answered(client: TestClient, path: str) -> None:
    answer = client.post(path, json={"prompt": "a", "max_tokens": 2, "user": "a" * 2 * SMALL_BODY})
    assert answer.status_code == 200, answer.text


def test_a_process_that_died_is_replaced(bodies: BodyProcess) -> None:
    bodies.read([b"{}"])
    [first] = bodies.processes.processes
    first.kill()
    first.wait()
    assert bodies.read([b'{"a": 1}']) == {"a": 1}


def test_a_body_of_which_it_dies_is_refused_and_the_next_one_read() -> None:
    small = BodyProcess(largest=0, memory_bytes=160 * 2**20)
    with pytest.raises(APIError, match="bytes to read"):
        small.read([json.dumps({"a": [[]] * 90_000, "b": ["a"] * 900_000, "c": LONG * 40}).encode()])
    assert small.read([b'{"a": 1}']) == {"a": 1}
    small.close()


def test_closing_ends_the_process_whatever_it_does() -> None:
    process = BodyProcess(largest=2**20)
    process.read([b"{}"])
    [started] = process.processes.processes
    os.kill(started.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(process.read, [b"{}"])
        time.sleep(0.1)
        process.close()
        assert isinstance(waiting.exception(10), APIError)
    assert started.returncode is not None


def test_another_thread_goes_on_meanwhile(bodies: BodyProcess) -> None:
    """Parsed by one call here, each of these stops every thread for 30 ms and more.

    How long is told by the reader's processor time, not the clock's, and by the best of three: other processes may keep
    the waiting thread from running, and hardly ever three times just while the reader works.
    """
    for value in (list(range(1_000_000)), "\u4e16" * 3_000_000, "A" * 3_000_000, ["a"] * 1_000_000):
        raw = json.dumps({"a": value}).encode()
        assert min(longest_hold(bodies.read, [raw]) for _ in range(3)) < 0.03


def test_a_parser_that_holds_every_thread_up_is_seen() -> None:
    raw = json.dumps({"a": list(range(2_000_000))}).encode()
    assert min(longest_hold(json.loads, raw) for _ in range(3)) > 0.03


def longest_hold(read: Callable[[Any], object], argument: object) -> float:
    """The most processor seconds that `read` takes on a thread while another one cannot go on."""
    took, clocks = [0.0], queue.SimpleQueue[int]()

    def run() -> None:
        clocks.put(time.pthread_getcpuclockid(threading.get_ident()))
        read(argument)
        took.append(time.thread_time())

    reader = threading.Thread(target=run)
    reader.start()
    clock = clocks.get()
    while reader.is_alive():
        time.sleep(0.001)
        with contextlib.suppress(OSError):  # it has just ended
            took.append(time.clock_gettime(clock))
    took.sort()
    return max(after - before for before, after in itertools.pairwise(took))
