"""Responses that run without anybody waiting for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.responses import Response

from jaxllm.serving.responses.stores import ResponseStore
from jaxllm.serving.store.database import Database
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, FakeEngine
from tests.support.covers import covers


@covers("ResponseRequest", "background")
def test_runs_until_it_is_polled_as_completed(sdk: Callable[..., Any]) -> None:
    client, _ = sdk(delay=0.005)
    response = client.responses.create(model="fake", input="hi", background=True)
    assert response.status in ("queued", "in_progress") and response.output == []
    wait_for(lambda: client.responses.retrieve(response.id).status == "completed")
    assert client.responses.retrieve(response.id).output_text == REPLY
    later = client.responses.create(model="fake", input="more", previous_response_id=response.id)
    assert later.status == "completed"


@covers("POST /v1/responses/{response_id}/cancel")
def test_cancel_frees_the_engine(sdk: Callable[..., Any]) -> None:
    client, engine = sdk(delay=0.05)
    response = client.responses.create(model="fake", input="hi", background=True)
    with pytest.raises(openai.BadRequestError, match="still"):
        client.responses.create(model="fake", input="z", previous_response_id=response.id)
    wait_for(lambda: bool(engine.active))
    assert client.responses.cancel(response.id).status == "cancelled"
    wait_for(lambda: not engine.active)
    assert client.responses.retrieve(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"
    plain = client.responses.create(model="fake", input="hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(plain.id)


@covers("DELETE /v1/responses/{response_id}")
def test_delete_stops_it(sdk: Callable[..., Any]) -> None:
    client, engine = sdk(delay=0.05)
    response = client.responses.create(model="fake", input="hi", background=True)
    client.responses.delete(response.id)
    wait_for(lambda: not engine.active)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@covers("GET /v1/responses/{response_id}")
@covers("GET /v1/responses/{response_id}", "stream", "starting_after")
def test_its_stream_can_be_followed_again(sdk: Callable[..., Any]) -> None:
    client, engine = sdk(delay=0.01)
    stream = client.responses.create(model="fake", input="hi", background=True, stream=True)
    first = [next(stream) for _ in range(6)]
    assert [event.type.removeprefix("response.") for event in first[:3]] == ["created", "queued", "in_progress"]
    stream.close()
    response_id = first[0].response.id
    live = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
    again = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
    assert live == again and live[-1].type == "response.completed"
    numbers = [event.sequence_number for event in [*first, *live]]
    assert numbers == list(range(len(numbers)))
    assert live[-1].response.output_text == REPLY and not engine.active
    plain = client.responses.create(model="fake", input="hi")
    with pytest.raises(openai.BadRequestError, match="no stream"):
        client.responses.retrieve(plain.id, stream=True)


def test_a_server_that_stops_fails_what_runs(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    client = make_client(roomy(delay=0.5), data_dir=tmp_path)
    response = client.post("/v1/responses", json={"input": "hi", "background": True}).json()
    client.__exit__()
    after = make_client(roomy(), data_dir=tmp_path).get(f"/v1/responses/{response['id']}").json()
    assert after["status"] == "failed" and "stopped" in after["error"]["message"]


def test_a_lost_one_fails_when_its_lease_ends(
    post: Callable[..., Any],
    make_client: Callable[..., TestClient],
    roomy: Callable[..., FakeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a crash: the row says queued, and nobody renews it."""
    response = post(input="hi").json()
    lost = Response.model_validate(response).id.replace("resp_", "resp_0")
    monkeypatch.setattr("jaxllm.serving.responses.stores.LEASE_SECONDS", 0.0)
    asyncio.run(_begin(tmp_path, response | {"id": lost, "status": "queued", "background": True, "output": []}))
    time.sleep(0.01)
    found = post.client.get(f"/v1/responses/{lost}").json()
    assert found["status"] == "failed" and "stopped" in found["error"]["message"]
    assert post(input="on", previous_response_id=lost).status_code == 200


def test_another_server_can_cancel_it(
    make_client: Callable[..., TestClient],
    roomy: Callable[..., FakeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxllm.serving.responses.service.LEASE_SECONDS", 0.3)
    engine = roomy(delay=0.2)
    client, other = make_client(engine, data_dir=tmp_path), make_client(roomy(), data_dir=tmp_path)
    response_id = client.post("/v1/responses", json={"input": "hi", "background": True}).json()["id"]
    wait_for(lambda: bool(engine.active))
    assert other.post(f"/v1/responses/{response_id}/cancel").json()["status"] == "cancelled"
    wait_for(lambda: not engine.active)
    assert client.get(f"/v1/responses/{response_id}").json()["status"] == "cancelled"


async def _begin(data_dir: Path, response: dict[str, Any]) -> None:
    import msgspec

    from jaxllm.serving.responses.objects import Response as Stored

    database = Database(f"sqlite+aiosqlite:///{data_dir / 'jaxllm.db'}")
    await ResponseStore(database).begin(msgspec.convert(response, Stored), [], None)
    await database.close()
