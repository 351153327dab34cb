"""/v1/batches with the openai SDK over a socket, across restarts of the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from jaxllm.config import ServeConfig
from jaxllm.serving.app import create_app
from jaxllm.serving.batches.caller import BATCH_PRIORITY, Places
from jaxllm.serving.batches.journal import Journal
from jaxllm.serving.batches.lines import Line
from jaxllm.serving.server import bind
from tests.serving import fake_engine
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, FakeEngine

CHAT = "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")


class Running:
    """A server of an engine and a data directory, until it is stopped."""

    def __init__(self, engine: FakeEngine, data_dir: Path, **settings: Any):
        config = ServeConfig(model="fake", port=0, data_dir=data_dir, **settings)
        listener = bind(config.host, config.port)
        self.engine = engine
        self.app = create_app(config, engine)  # type: ignore[arg-type]
        self.server = uvicorn.Server(
            uvicorn.Config(self.app, http="httptools", log_config=None, timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        key = (config.api_key or "none").split(",")[0]
        self.client = openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=20)

    def submit(self, lines: list[Any], endpoint: Any = CHAT, **fields: Any) -> str:
        content = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        file = self.client.files.create(file=("in.jsonl", content), purpose="batch")
        fields = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"} | fields
        return self.client.batches.create(**fields).id

    def finished(self, batch_id: str, seconds: float = 15) -> Any:
        wait_for(lambda: self.client.batches.retrieve(batch_id).status in FINAL, seconds)
        return self.client.batches.retrieve(batch_id)

    def results(self, file_id: str | None) -> dict[str, Any]:
        assert file_id is not None
        text = self.client.files.content(file_id).text
        assert text.endswith("\n")
        results = [json.loads(line) for line in text.splitlines()]
        by_id = {result["custom_id"]: result for result in results}
        assert len(by_id) == len(results)
        return by_id

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.client.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    servers: list[Running] = []

    def make(engine: FakeEngine | None = None, **settings: Any) -> Running:
        servers.append(Running(engine or FakeEngine(), tmp_path / "data", **settings))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def chat(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": f"Question {number}"}]} | fields
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def questions(engine: FakeEngine) -> list[str]:
    """What the engine was asked, by the number in each prompt."""
    prompts = [bytes(token for token in seen[0] if token < 256).decode() for seen in engine.seen]
    return [prompt.split("Question ")[1].split("[")[0] for prompt in prompts]


@pytest.mark.covers("POST /v1/batches")
@pytest.mark.covers("GET /v1/batches/{batch_id}")
@pytest.mark.covers("BatchRequest", "completion_window")
def test_hundred_chats(start: Callable[..., Running], tmp_path: Path) -> None:
    server = start(api_key="sesame,other")
    made = server.client.batches.retrieve(
        server.submit([chat(i) for i in range(100)], metadata={"job": "nightly"}, output_expires_after=None)
    )
    assert (made.object, made.endpoint, made.completion_window) == ("batch", CHAT, "24h")
    assert made.expires_at == made.created_at + 24 * 3600 and made.metadata == {"job": "nightly"}
    batch = server.finished(made.id)
    assert batch.status == "completed" and batch.errors is None and batch.error_file_id is None
    assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
    assert batch.model == "fake"
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    results = server.results(batch.output_file_id)
    assert results.keys() == {f"line-{i}" for i in range(100)}
    usage = [0, 0]
    for result in results.values():
        assert result["error"] is None and result["id"].startswith("batch_req_")
        answer = result["response"]
        assert answer["status_code"] == 200 and answer["request_id"] == answer["body"]["id"]
        assert answer["body"]["choices"][0]["message"]["content"] == REPLY
        usage[0] += answer["body"]["usage"]["prompt_tokens"]
        usage[1] += answer["body"]["usage"]["completion_tokens"]
    assert [batch.usage.input_tokens, batch.usage.output_tokens] == usage and all(usage)
    assert batch.usage.total_tokens == sum(usage)
    assert batch.usage.input_tokens_details.cached_tokens == 300  # the fake finds 3 a prompt
    output = server.client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output" and output.filename == f"{batch.id}_output.jsonl"
    assert [seen[2]["priority"] for seen in server.engine.seen] == [BATCH_PRIORITY] * 100
    assert list((tmp_path / "data" / "batches").iterdir()) == []


@pytest.mark.covers("BatchRequest", "endpoint")
@pytest.mark.parametrize(
    ("endpoint", "body", "path"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4}, ("choices", 1, "text")),
        ("/v1/embeddings", {"input": "a"}, ("data", 0, "embedding")),
        ("/v1/responses", {"input": "Hi", "store": False}, ("output", 0, "content", 0, "text")),
    ],
)
def test_other_endpoints(start: Callable[..., Running], endpoint: str, body: Any, path: Any) -> None:
    server = start()
    batch = server.finished(
        server.submit([{"custom_id": "x", "method": "POST", "url": endpoint, "body": body}], endpoint)
    )
    assert batch.request_counts.completed == 1, server.results(batch.error_file_id)
    value = server.results(batch.output_file_id)["x"]["response"]["body"]
    for part in path:
        value = value[part]
    assert value
    assert batch.usage.input_tokens > 0


def test_a_lines_own_failure_is_not_the_batchs(start: Callable[..., Running], monkeypatch: Any) -> None:
    server = start()
    check = server.engine.check

    def crash(ids: list[int], params: Any) -> None:
        if params.seed == 13:
            raise ZeroDivisionError("unforeseen")
        check(ids, params)

    monkeypatch.setattr(server.engine, "check", crash)
    lines = [chat(0), chat(1, temperature=-5), chat(2, model="other"), chat(3, seed=13), chat(4, unheard_of=1)]
    batch = server.finished(server.submit(lines))
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 5, "completed": 1, "failed": 4}
    assert server.results(batch.output_file_id).keys() == {"line-0"}
    errors = server.results(batch.error_file_id)
    codes = {name: result["response"]["status_code"] for name, result in errors.items()}
    assert codes == {"line-1": 400, "line-2": 404, "line-3": 500, "line-4": 400}
    assert errors["line-1"]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.model is None


WRONG = [
    (b"{broken\n", "invalid_json_line", None),
    (b"[1]\n", "invalid_json_line", None),
    (chat(1) | {"custom_id": None}, "missing_required_parameter", "custom_id"),
    (chat(1) | {"custom_id": 7}, "invalid_custom_id", "custom_id"),
    (chat(0), "duplicate_custom_id", "custom_id"),
    (chat(1) | {"method": "GET"}, "invalid_method", "method"),
    (chat(1) | {"url": "/v1/completions"}, "invalid_url", "url"),
    (chat(1) | {"body": "text"}, "invalid_body", "body"),
    (chat(1, stream=True), "invalid_body", "body.stream"),
    (chat(1) | {"bodi": {}}, "unknown_parameter", "bodi"),
]


def test_wrong_lines_fail_the_batch_before_any_runs(start: Callable[..., Running]) -> None:
    server = start()
    batch = server.finished(server.submit([chat(0), b"\n", *(line for line, _, _ in WRONG)]))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors.object == "list"
    found = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert found == [(3 + i, code, param) for i, (_, code, param) in enumerate(WRONG)]
    assert all("\n" not in error.message for error in batch.errors.data)
    assert server.engine.seen == []
    empty = server.finished(server.submit([b"\n \n"]))
    assert [error.code for error in empty.errors.data] == ["empty_file"]


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


@pytest.mark.covers("POST /v1/batches/{batch_id}/cancel")
def test_cancel_stops_running_lines(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.01))
    batch_id = server.submit([chat(i, **({} if i < 3 else {"n": 3})) for i in range(60)])
    wait_for(lambda: server.client.batches.retrieve(batch_id).request_counts.completed >= 3)
    assert server.client.batches.cancel(batch_id).status == "cancelling"
    batch = server.finished(batch_id, 3)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    assert server.engine.active == set()
    done = batch.request_counts.completed
    assert 3 <= done < 60 and batch.request_counts.total == 60
    assert len(server.results(batch.output_file_id)) == done
    asked = len(server.engine.seen)
    time.sleep(0.3)
    assert len(server.engine.seen) == asked
    assert server.client.batches.cancel(batch_id).status == "cancelled"
    finished = server.finished(server.submit([chat(0)]))
    with pytest.raises(openai.BadRequestError, match="'completed'"):
        server.client.batches.cancel(finished.id)


def test_expiry_ends_a_batch_with_what_it_has(start: Callable[..., Running], tmp_path: Path) -> None:
    server = start(FakeEngine(delay=0.01))
    batch_id = server.submit([chat(i) for i in range(100)])
    wait_for(lambda: server.client.batches.retrieve(batch_id).request_counts.completed >= 7)
    server.stop()
    with sqlite3.connect(tmp_path / "data" / "jaxllm.db") as connection:
        connection.execute("update batches set expires_at = created_at")
    batch = start(FakeEngine()).finished(batch_id)
    server = start(FakeEngine())
    assert batch.status == "expired" and batch.expired_at
    counts = batch.request_counts
    assert counts.completed >= 7 and counts.failed == 100 - counts.completed
    errors = server.results(batch.error_file_id)
    assert {result["error"]["code"] for result in errors.values()} == {"batch_expired"}
    both = errors.keys() | server.results(batch.output_file_id).keys()
    assert both == {f"line-{i}" for i in range(100)}


def test_lines_wait_while_the_queue_is_full(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.002, queue_limit=2))
    batch = server.finished(server.submit([chat(i) for i in range(12)]))
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}


def test_some_of_the_engine_is_left_to_others(start: Callable[..., Running]) -> None:
    engine = FakeEngine(delay=0.02)
    server = start(engine)
    batch_id = server.submit([chat(i) for i in range(30)])
    most = 0
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        most = max(most, len(engine.active))
        time.sleep(0.005)
    assert most == engine.info.max_num_seqs - 1
    answer = server.client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Question x"}])
    assert answer.choices[0].message.content == REPLY
    assert engine.seen[questions(engine).index("x")][2]["priority"] == 0
    server.client.batches.cancel(batch_id)


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
        "from jaxllm.serving.server import bind, run_server\n"
        "from tests.serving.fake_engine import FakeEngine\n"
        "config = ServeConfig(model='fake', port=0, data_dir=Path(sys.argv[1]), shutdown_timeout=0)\n"
        "run_server(config, FakeEngine(delay=0.02), bind(config.host, 0))\n"
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


class Poisoned(FakeEngine):
    """Ends when it is asked question 13."""

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
        "from jaxllm.serving.server import bind, run_server\n"
        "from tests.serving.batches.test_batches import PoisonedProcess\n"
        "config = ServeConfig(model='fake', port=0, data_dir=Path(sys.argv[1]))\n"
        "run_server(config, PoisonedProcess(delay=0.001), bind(config.host, 0))\n"
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


@pytest.mark.covers("GET /v1/batches")
@pytest.mark.covers("GET /v1/batches", "limit", "after")
def test_pages_and_unknown_ids(start: Callable[..., Running]) -> None:
    server = start()
    ids = [server.submit([chat(i)]) for i in range(5)][::-1]
    assert [batch.id for batch in server.client.batches.list(limit=2)] == ids
    page = server.client.batches.list(limit=2, after=ids[1])
    assert page.has_more and [batch.id for batch in page.data] == ids[2:4]
    for call in (server.client.batches.retrieve, server.client.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="batch_none"):
            call("batch_none")


@pytest.mark.covers("BatchRequest", "input_file_id")
def test_wrong_batches_are_refused(start: Callable[..., Running]) -> None:
    server = start()
    file = server.client.files.create(file=("x", b"{}"), purpose="user_data")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for change, message in (
        ({}, "purpose 'user_data'; it must be 'batch'"),
        ({"input_file_id": "file-none"}, "no file has the id 'file-none'"),
        ({"endpoint": "/v1/images"}, "endpoint is '/v1/images'"),
        ({"completion_window": "1h"}, "completion_window is '1h'"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ):
        answer = httpx.post(f"{server.url}/batches", json=good | change)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    assert server.client.batches.list().data == []


def test_slots_go_round_in_order() -> None:
    async def main() -> list[str]:
        places, order = Places(4), []

        async def work(name: str, wanted: int) -> None:
            taken = await places.take(wanted)
            order.append(name)
            await asyncio.sleep(0.01)
            places.give(taken)

        await asyncio.gather(work("two", 2), work("all", 99), work("one", 1), work("more", 3))
        return order

    assert asyncio.run(main()) == ["two", "all", "one", "more"]


@pytest.mark.parametrize(
    ("endpoint", "body", "count"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 4}, 4),
        (CHAT, {"n": "x"}, 1),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "best_of": 3}, 6),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1),
        ("/v1/embeddings", {"input": ["a"] * 7}, 7),
        ("/v1/responses", {"input": [{}, {}]}, 1),
    ],
)
def test_sequences_of_a_line(endpoint: str, body: Any, count: int) -> None:
    assert Line("x", body).num_sequences(endpoint) == count
