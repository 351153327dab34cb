"""Responses that continue others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import REPLY, FakeEngine
from tests.serving.responses.shared import prompt_text
from tests.support.covers import covers


@covers("PromptFields", "instructions", "previous_response_id")
def test_continues_what_was_said_without_its_instructions(sdk: Callable[..., Any]) -> None:
    client, engine = sdk()
    first = client.responses.create(model="fake", input="one", instructions="first only")
    second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
    third = client.responses.create(model="fake", input="three", previous_response_id=second.id, instructions="now")
    assert prompt_text(engine) == (
        f"[system]now[user]one[assistant]{REPLY}[user]two[assistant]{REPLY}[user]three[assistant]"
    )
    assert third.previous_response_id == second.id


@covers("GET /v1/responses/{response_id}/input_items")
@covers("GET /v1/responses/{response_id}/input_items", "after", "limit", "order")
@covers("GET /v1/conversations/{conversation_id}/items", "after", "limit", "order")
def test_input_items_in_pages(sdk: Callable[..., Any]) -> None:
    client, _ = sdk()
    response = client.responses.create(model="fake", input=[{"role": "user", "content": str(i)} for i in range(5)])
    listed = [item.content[0].text for item in client.responses.input_items.list(response.id, limit=2)]
    assert listed == ["4", "3", "2", "1", "0"]
    page = client.responses.input_items.list(response.id, limit=3, order="asc")
    assert [item.content[0].text for item in page.data] == ["0", "1", "2"] and page.has_more
    rest = client.responses.input_items.list(response.id, order="asc", after=page.data[-1].id)
    assert [item.content[0].text for item in rest.data] == ["3", "4"] and not rest.has_more
    later = client.responses.create(model="fake", input="more", previous_response_id=response.id)
    whole = [item.content[0].text for item in client.responses.input_items.list(later.id, order="asc")]
    assert whole == ["0", "1", "2", "3", "4", REPLY, "more"]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(response.id, after="msg_nobody")


@covers("ItemReference", "id")
def test_an_item_is_referred_to(sdk: Callable[..., Any]) -> None:
    client, engine = sdk()
    first = client.responses.create(model="fake", input="one")
    reference = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model="fake", input=[reference, {"role": "user", "content": "and?"}])
    assert prompt_text(engine) == f"[assistant]{REPLY}[user]and?[assistant]"


@covers("ResponseRequest", "store")
def test_what_is_not_stored_cannot_be_continued(sdk: Callable[..., Any]) -> None:
    client, _ = sdk()
    kept = client.responses.create(model="fake", input="x")
    later = client.responses.create(model="fake", input="y", previous_response_id=kept.id)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    assert client.responses.retrieve(later.id).id == later.id
    unstored = client.responses.create(model="fake", input="x", store=False)
    for response_id in (unstored.id, kept.id, later.id):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="fake", input="z", previous_response_id=response_id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"


def test_survives_a_restart(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    before = make_client(roomy(), data_dir=tmp_path).post("/v1/responses", json={"input": "one"}).json()
    engine = roomy()
    after = make_client(engine, data_dir=tmp_path)
    assert after.get(f"/v1/responses/{before['id']}").json() == before
    after.post("/v1/responses", json={"input": "two", "previous_response_id": before["id"]})
    assert prompt_text(engine) == f"[user]one[assistant]{REPLY}[user]two[assistant]"


@covers("PromptFields", "truncation")
def test_truncation_auto_drops_the_oldest_turns(sdk: Callable[..., Any]) -> None:
    client, engine = sdk()
    engine.info.max_model_len = 256
    turns = [{"role": "system", "content": "S"}]
    for i in range(8):
        turns += [{"role": "user", "content": f"{i}" * 30}, {"role": "assistant", "content": "ok"}]
    turns.append({"role": "user", "content": "last"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input=turns)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    client.responses.create(model="fake", input=turns, truncation="auto", max_output_tokens=20)
    prompt = prompt_text(engine)
    assert prompt.startswith("[system]S[user]") and prompt.endswith("[user]last[assistant]")
    assert 256 - 20 - len("[user]" + "0" * 30 + "[assistant]ok") < len(prompt) <= 256 - 20
