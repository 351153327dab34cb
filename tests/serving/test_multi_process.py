"""A server that starts a process for each of its devices answers as one process does, and none of them outlives it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import EngineDeadError
from tests.reference.tiny import write_checkpoint
from tests.serving.conftest import wait_for
from tests.serving.real_server import engine_process
from tests.serving.test_processes import END_SECONDS, PROMPT, START_SECONDS, answers_around, command, wait_until_ready
from tests.sharding.ports import free_port
from tests.support.several_processes import FIELDS, PROMPTS, running, variables

pytestmark = pytest.mark.programs

ANSWERED = 24
"""Tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama_gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """What one process answers."""
    with LLM(str(model), skip_tokenizer_init=True, **FIELDS) as alone:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=ANSWERED)
        (output,) = alone.generate([PROMPT["prompt"]], params, use_tqdm=False)
    return str(list(output.outputs[0].token_ids))


def answer(port: int) -> str:
    body = PROMPT | {"max_tokens": ANSWERED, "logprobs": 0}
    answered = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert answered.status_code == 200, answered.text
    tokens = answered.json()["choices"][0]["logprobs"]["tokens"]
    return str([int(token.removeprefix("token_id:")) for token in tokens])


@contextmanager
def multi_process_server(model: Path, tmp_path: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """The server, ready; JAX_NUM_CPU_DEVICES is of no account, for each process has one device."""
    whole = [*command(model, tmp_path, port), "--multi-process"]
    with running((whole, variables() | {"JAX_NUM_CPU_DEVICES": "4"})) as (server,):
        wait_until_ready(port, [server])
        yield server


def members(server: subprocess.Popen[str]) -> tuple[psutil.Process, psutil.Process]:
    """The process of the engine, and the one that follows it."""
    engine = engine_process(psutil.Process(server.pid))
    return engine, engine_process(engine)


def own_processes(recursive: bool = False) -> list[psutil.Process]:
    """Those that this one has started, and with `recursive` those that they have; one that has ended may be there."""
    found = []
    for child in psutil.Process().children(recursive=recursive):
        with suppress(psutil.NoSuchProcess):  # a zombie too
            if "own_process import enter" in str(child.cmdline()):
                found.append(child)
    return found


def test_it_answers_as_one_process_and_starts_the_group_again(model: Path, tmp_path: Path, expected: str) -> None:
    port = free_port()
    with multi_process_server(model, tmp_path, port) as server:
        assert answer(port) == expected
        assert httpx.post(f"http://127.0.0.1:{port}/sleep").status_code == 400
        for victim in (1, 0):
            both = members(server)
            told = answers_around(port, both[victim].kill)
            failed = [one.json()["error"] for one in told if one.status_code != 200]
            assert failed and {error["code"] for error in failed} == {"engine_dead"}
            if victim == 1:
                assert {"process 1 on" in error["message"] for error in failed} == {True}, failed
            _, left = psutil.wait_procs(both, END_SECONDS)
            assert not left, "the group ends as a whole"
            wait_until_ready(port, [server])
            assert answer(port) == expected
        both = members(server)
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=END_SECONDS)
        assert server.returncode == 0, said
        _, left = psutil.wait_procs(both, END_SECONDS)
        assert not left


def test_no_process_outlives_a_server_that_is_killed(model: Path, tmp_path: Path) -> None:
    with multi_process_server(model, tmp_path, free_port()) as server:
        both = members(server)
        server.kill()
        _, left = psutil.wait_procs(both, END_SECONDS)
        assert not left


def test_a_server_that_is_told_to_stop_while_it_starts_leaves_no_process(model: Path, tmp_path: Path) -> None:
    whole = [*command(model, tmp_path, free_port()), "--multi-process"]
    with running((whole, variables())) as (server,):
        owner = psutil.Process(server.pid)
        wait_for(lambda: any(child.children() for child in owner.children()), START_SECONDS)
        started = owner.children(recursive=True)
        server.send_signal(signal.SIGTERM)
        server.wait(END_SECONDS)
        _, left = psutil.wait_procs(started, END_SECONDS)
        assert not left


def test_an_engine_in_python_says_what_one_process_says(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    params = SamplingParams(temperature=0.8, seed=3, ignore_eos=True, max_tokens=12)
    said = []
    parts = ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
    for more in ({}, *({"multi_process": True, **part} for part in parts)):
        with LLM(str(model), skip_tokenizer_init=True, **FIELDS, **more) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            said.append([list(output.outputs[0].token_ids) for output in outputs])
    assert said == [said[0]] * 3
    assert not own_processes(recursive=True)


@pytest.mark.timeout(120)
def test_a_process_that_ends_before_all_have_come_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 would wait for it for minutes."""
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    fields = FIELDS | {"skip_tokenizer_init": True, "multi_process": True, "tensor_parallel_size": 2}
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(LLM, str(model), **fields)
        wait_for(lambda: len(own_processes(recursive=True)) == 2, START_SECONDS)
        (follower,) = set(own_processes(recursive=True)) - set(own_processes())
        follower.kill()
        with pytest.raises(EngineDeadError, match=r"^process 1 is gone \(exit code -9\)$"):
            starting.result()
    assert not own_processes(recursive=True)
