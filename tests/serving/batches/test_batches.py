"""/v1/batches with the openai SDK over a socket, across restarts of the server."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxllm.engine.doors.sequences import check_request
from jaxllm.requests.sampling import SamplingParams
from jaxllm.serving.batches.caller import BATCH_PRIORITY, Line, Places
from tests.serving.batches.running import CHAT, Running, chat, questions
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, FakeEngine
from tests.support.covers import covers


@covers("POST /v1/batches")
@covers("GET /v1/batches/{batch_id}")
@covers("BatchRequest", "completion_window")
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


@covers("BatchRequest", "endpoint")
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

    def crash(info: Any, tokenizer: Any, ids: list[int], params: SamplingParams) -> None:
        if params.seed == 13:
            raise ZeroDivisionError("unforeseen")
        check_request(info, tokenizer, ids, params)

    monkeypatch.setattr("jaxllm.chat.prompt.check_request", crash)
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


@covers("POST /v1/batches/{batch_id}/cancel")
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
    engine = FakeEngine(delay=0.05)
    server = start(engine)
    batch_id = server.submit([chat(i) for i in range(30)])
    wait_for(lambda: len(engine.active) == engine.info.max_num_seqs - 1)
    for _ in range(100):
        assert len(engine.active) < engine.info.max_num_seqs
        time.sleep(0.005)
    answer = server.client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Question x"}])
    assert answer.choices[0].message.content == REPLY
    assert engine.seen[questions(engine).index("x")][2]["priority"] == 0
    server.client.batches.cancel(batch_id)


@covers("GET /v1/batches")
@covers("GET /v1/batches", "limit", "after")
def test_pages_and_unknown_ids(start: Callable[..., Running]) -> None:
    server = start()
    ids = [server.submit([chat(i)]) for i in range(5)][::-1]
    assert [batch.id for batch in server.client.batches.list(limit=2)] == ids
    page = server.client.batches.list(limit=2, after=ids[1])
    assert page.has_more and [batch.id for batch in page.data] == ids[2:4]
    for call in (server.client.batches.retrieve, server.client.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="batch_none"):
            call("batch_none")


@covers("BatchRequest", "input_file_id")
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
        places, order = Places(lambda: 4), []

        async def work(name: str, wanted: int) -> None:
            await places.take(wanted)
            order.append(name)
            await asyncio.sleep(0.01)
            places.give(wanted)

        await asyncio.gather(work("two", 2), work("all", 99), work("one", 1), work("more", 3))
        return order

    assert asyncio.run(main()) == ["two", "all", "one", "more"]


def test_who_wants_more_than_all_places_is_alone_however_many_there_are_meanwhile() -> None:
    async def main() -> list[str]:
        total, order = [1], []
        places = Places(lambda: total[0])

        async def work(name: str, wanted: int) -> None:
            await places.take(wanted)
            order.append(f"{name} begins")
            total[0] = 7  # as when the first line has loaded its model
            await asyncio.sleep(0.01)
            order.append(f"{name} ends")
            places.give(wanted)

        await asyncio.gather(work("all", 99), work("one", 1), work("other", 1))
        return order

    said = ["all begins", "all ends", "one begins", "other begins", "one ends", "other ends"]
    assert asyncio.run(main()) == said


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
