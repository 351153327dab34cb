"""Batches whose server or engine ends in the middle: stopped, killed, or by a line of the batch itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.engine.messages import EngineRequest
from jaxllm.serving.batches.journal import Journal
from jaxllm.serving.batches.run import _to_its_end
from tests.serving import fake_engine
from tests.serving.batches.running import CHAT, Running, chat, questions
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine

pytestmark = pytest.mark.programs


def test_a_restart_runs_no_finished_line_twice(start: Callable[..., Running], tmp_path: Path) -> None:
    first = start(FakeEngine(delay=0.004))
    batch_id = first.submit([chat(i) for i in range(100)])
    wait_for(lambda: first.client.batches.retrieve(batch_id).request_counts.completed >= 20, 20)
    input_file = first.client.batches.retrieve(batch_id).input_file_id
    first.client.files.delete(input_file)  # which the batch no longer needs
    first.stop()
    assert first.engine.active == set()
    journal = Journal(tmp_path / "data" / "batches" / batch_id)
    with journal.output.open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_id":"line-99","respo')  # as a power cut leaves it
    recorded = {json.loads(line)["custom_id"] for line in journal.output.read_bytes().splitlines()[:-1]}
    assert 20 <= len(recorded) < 100

    second = start(FakeEngine())
    batch = second.finished(batch_id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
    assert second.results(batch.output_file_id).keys() == {f"line-{i}" for i in range(100)}
    asked = questions(second.engine)
    assert sorted(asked) == sorted(str(i) for i in range(100) if f"line-{i}" not in recorded)
    answers = second.results(batch.output_file_id).values()
    assert batch.usage.output_tokens == sum(a["response"]["body"]["usage"]["completion_tokens"] for a in answers)


def test_a_second_server_leaves_a_running_batch_alone(start: Callable[..., Running]) -> None:
    first = start(FakeEngine(delay=0.02))
    batch_id = first.submit([chat(i) for i in range(8)])
    wait_for(lambda: bool(first.engine.active))
    second = start(FakeEngine())
    assert first.finished(batch_id).request_counts.completed == 8
    assert second.engine.seen == [] and second.client.batches.retrieve(batch_id).status == "completed"


def test_only_a_server_of_the_same_model_resumes(start: Callable[..., Running]) -> None:
    first = start(FakeEngine(delay=0.5))
    batch_id = first.submit([chat(0)])
    wait_for(lambda: bool(first.engine.active))
    first.stop()
    other = start(FakeEngine(), served_model_name="another")
    time.sleep(0.2)
    assert other.client.batches.retrieve(batch_id).status == "in_progress" and other.engine.seen == []
    other.stop()
    again = start(FakeEngine(), served_model_name="another,fake")
    assert again.finished(batch_id).request_counts.completed == 1


def test_an_engine_that_dies_leaves_the_batch_for_the_next(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.004))
    batch_id = server.submit([chat(i) for i in range(40)])
    wait_for(lambda: server.client.batches.retrieve(batch_id).request_counts.completed >= 5)
    server.engine.die()
    time.sleep(0.8)
    assert server.client.batches.retrieve(batch_id).status == "in_progress"
    server.stop()
    batch = start(FakeEngine()).finished(batch_id)
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}


def test_a_signal_in_the_middle_records_no_answer_cut_short(start: Callable[..., Running], tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from jaxllm.config import ServeConfig\n"
        "from jaxllm.serving.http.listening import bind\n"
        "from tests.serving.fake_engine import FakeEngine, serve_engine\n"
        "config = ServeConfig(model='fake', port=0, data_dir=Path(sys.argv[1]), shutdown_timeout=0)\n"
        "serve_engine(config, FakeEngine(delay=0.02), bind(config.host, 0))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "data")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(fake_engine.__file__).parents[2])
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" on ")[1].split("/v1")[0]
        lines = b"".join(json.dumps(chat(i)).encode() + b"\n" for i in range(20))
        file = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": lines}).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch_id = httpx.post(f"{url}/v1/batches", json=body).json()["id"]
        get = f"{url}/v1/batches/{batch_id}"
        wait_for(lambda: httpx.get(get).json()["request_counts"]["completed"] >= 7, 10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()
    server = start(FakeEngine())
    batch = server.finished(batch_id)
    answers = [result["response"]["body"] for result in server.results(batch.output_file_id).values()]
    assert len(answers) == 20
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}


def test_a_line_that_is_cancelled_while_it_is_noted_ends_after_the_note() -> None:
    """Else the note that releases it could come to nothing, or before it."""
    writing, may_end, noted = threading.Event(), threading.Event(), []

    def write(custom_id: str) -> None:
        writing.set()
        may_end.wait()
        noted.append(custom_id)

    async def scenario() -> None:
        line = asyncio.create_task(_to_its_end(write, "line-0"))
        await asyncio.to_thread(writing.wait)
        line.cancel()
        done, _ = await asyncio.wait({line}, timeout=0.05)
        may_end.set()
        assert not done
        with pytest.raises(asyncio.CancelledError):
            await line
        assert noted == ["line-0"]

    asyncio.run(scenario())


class Poisoned(FakeEngine):
    """Ends when it is asked question 13, which it never answers, however long its end takes."""

    def until_next(self, request: EngineRequest, step: int) -> float:
        asked = bytes(token for token in request.prompt_token_ids if token < 256)
        return 1000.0 if b"Question 13[" in asked else super().until_next(request, step)

    def run(self, requests: Any, **arguments: Any) -> Any:
        stream = super().run(requests, **arguments)
        if questions(self)[-1] == "13":
            self.end()
        return stream

    def end(self) -> None:
        threading.Thread(target=self.die).start()


class PoisonedProcess(Poisoned):
    """Takes the server with it."""

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def assert_only_the_culprit_failed(server: Running, batch_id: str) -> None:
    batch = server.finished(batch_id)
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 19, "failed": 1}
    assert "13" not in questions(server.engine)
    failed = server.results(batch.error_file_id)["line-13"]
    assert failed["response"] is None and failed["error"]["code"] == "server_crashed"


def test_a_line_that_kills_the_server_is_tried_twice(start: Callable[..., Running], tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from jaxllm.config import ServeConfig\n"
        "from jaxllm.serving.http.listening import bind\n"
        "from tests.serving.batches.test_resumption import PoisonedProcess\n"
        "from tests.serving.fake_engine import serve_engine\n"
        "config = ServeConfig(model='fake', port=0, data_dir=Path(sys.argv[1]))\n"
        "serve_engine(config, PoisonedProcess(delay=0.001), bind(config.host, 0))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "data")]
    batch_id = ""
    for _ in range(2):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(fake_engine.__file__).parents[2]
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" on ")[1].split("/v1")[0]
            if not batch_id:
                lines = b"".join(json.dumps(chat(i)).encode() + b"\n" for i in range(20))
                file = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": lines}).json()
                body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
                batch_id = httpx.post(f"{url}/v1/batches", json=body).json()["id"]
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()
            process.communicate()
    assert_only_the_culprit_failed(start(FakeEngine()), batch_id)


def test_a_line_that_kills_the_engine_is_tried_twice(start: Callable[..., Running]) -> None:
    batch_id = ""
    for _ in range(2):
        server = start(Poisoned(delay=0.001))
        batch_id = batch_id or server.submit([chat(i) for i in range(20)])
        wait_for(lambda: server.engine.is_dead)  # noqa: B023
        server.stop()
    assert_only_the_culprit_failed(start(FakeEngine()), batch_id)


def test_orderly_restarts_are_held_against_no_line(start: Callable[..., Running]) -> None:
    batch_id = ""
    for _ in range(3):
        server = start(FakeEngine(delay=0.5))
        batch_id = batch_id or server.submit([chat(i) for i in range(10)])
        wait_for(lambda: len(server.engine.active) == 7)  # noqa: B023  side by side: none is suspected
        server.stop()
    batch = start(FakeEngine()).finished(batch_id)
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 10, "failed": 0}
