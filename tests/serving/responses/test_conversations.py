"""/v1/conversations through the openai package, on a canned engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from openai import OpenAI
from openai.types.conversations import Conversation, ConversationItem, ConversationItemList
from pydantic import TypeAdapter

from tests.serving.fake_engine import REPLY, FakeEngine
from tests.support.covers import covers

ITEM = TypeAdapter(ConversationItem)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.info.max_model_len = 4096
    return engine


@pytest.fixture
def sdk(listen: Callable[..., str], engine: FakeEngine, tmp_path: Path) -> OpenAI:
    return OpenAI(base_url=f"{listen(engine, data_dir=tmp_path)}/v1", api_key="none", max_retries=0)


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


@covers("POST /v1/conversations")
@covers("GET /v1/conversations/{conversation_id}")
@covers("POST /v1/conversations/{conversation_id}")
@covers("DELETE /v1/conversations/{conversation_id}")
@covers("ConversationRequest", "items")
@covers("ConversationUpdate", "metadata")
def test_a_conversation_lives_and_ends(sdk: OpenAI) -> None:
    made = sdk.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "one"}])
    assert made.id.startswith("conv_") and made.metadata == {"a": "b"} and made.object == "conversation"
    assert sdk.conversations.retrieve(made.id) == made
    assert sdk.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert sdk.conversations.retrieve(made.id).metadata == {"c": "d"}
    assert texts(sdk.conversations.items.list(made.id)) == ["one"]
    gone = sdk.conversations.delete(made.id)
    assert gone.deleted and gone.id == made.id
    for call in (sdk.conversations.retrieve, sdk.conversations.delete, sdk.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


@covers("POST /v1/conversations/{conversation_id}/items")
@covers("GET /v1/conversations/{conversation_id}/items")
@covers("GET /v1/conversations/{conversation_id}/items/{item_id}")
@covers("DELETE /v1/conversations/{conversation_id}/items/{item_id}")
@covers("ConversationItemsRequest", "items")
def test_items_of_every_kind(client_over: TestClient) -> None:
    items = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "assistant", "content": "two"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "three"},
    ]
    made = client_over.post("/v1/conversations", json={}).json()
    Conversation.model_validate(made)
    path = f"/v1/conversations/{made['id']}/items"
    added = client_over.post(path, json={"items": items}).json()
    ConversationItemList.model_validate(added)
    kinds = ["message", "message", "reasoning", "function_call", "function_call_output"]
    assert [item["type"] for item in added["data"]] == kinds
    for item in added["data"]:
        ITEM.validate_python(item)
        assert client_over.get(f"{path}/{item['id']}").json() == item
    listed = client_over.get(path, params={"order": "asc"}).json()
    assert listed["data"] == added["data"]
    assert (listed["first_id"], listed["last_id"]) == (added["data"][0]["id"], added["data"][-1]["id"])
    shown = client_over.delete(f"{path}/{added['data'][0]['id']}").json()
    assert shown == made
    assert len(client_over.get(path).json()["data"]) == 4
    assert client_over.get(f"{path}/{added['data'][0]['id']}").status_code == 404


@covers("PromptFields", "conversation")
def test_responses_continue_it_and_add_to_it(sdk: OpenAI, engine: FakeEngine) -> None:
    conversation = sdk.conversations.create(items=[{"role": "system", "content": "S"}])
    response = sdk.responses.create(model="fake", input="one", conversation=conversation.id)
    assert response.conversation.id == conversation.id
    sdk.responses.create(model="fake", input="two", conversation={"id": conversation.id}, store=False)
    prompt = bytes(token for token in engine.seen[-1][0] if token < 256).decode()
    assert prompt == f"[system]S[user]one[assistant]{REPLY}[user]two[assistant]"
    with sdk.responses.stream(model="fake", input="three", conversation=conversation.id) as stream:
        stream.until_done()
    said = ["S", "one", REPLY, "two", REPLY, "three", REPLY]
    assert texts(sdk.conversations.items.list(conversation.id, order="asc")) == said
    page = sdk.conversations.items.list(conversation.id, limit=2)
    assert texts(page.data) == [REPLY, "three"] and page.has_more
    assert texts(page) == said[::-1]


@covers("ConversationParam", "id")
def test_an_item_added_twice_gets_an_id_of_its_own(sdk: OpenAI) -> None:
    conversation = sdk.conversations.create()
    item = {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    added = sdk.conversations.items.create(conversation.id, items=[item, item])
    assert added.data[0].id == "msg_1" and added.data[1].id.startswith("msg_") and added.data[1].id != "msg_1"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/conversations", {"metadata": {"k" * 65: "v"}}, "metadata"),
        ("/v1/conversations", {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ("/v1/conversations", {"item": []}, "item"),
        ("/v1/conversations/conv_0", {}, "metadata"),
        ("/v1/conversations/conv_0/items", {"items": []}, "items"),
    ],
)
def test_refusals_name_the_field(client_over: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = client_over.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.fixture
def client_over(make_client: Callable[..., TestClient], engine: FakeEngine, tmp_path: Path) -> TestClient:
    return make_client(engine, data_dir=tmp_path)
