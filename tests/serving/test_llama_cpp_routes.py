"""llama-server's other routes: vectors, slots, counts, and the control of answers under way."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from jaxllm.engine.messages import EndThinking
from jaxllm.requests.outputs import ModelTasks
from jaxllm.requests.sampling import INT32_MAX
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import CONTEXT, FakeEngine
from tests.serving.openai.test_chat import HELLO, PROMPT
from tests.support.covers import covers


@covers("POST /embedding")
@covers("NativeEmbeddingRequest", "content", "embd_normalize")
def test_vectors_in_their_form(make_client: Any) -> None:
    client = make_client(FakeEngine(tasks=ModelTasks()))
    [found] = client.post("/embedding", json={"content": "Hi"}).json()
    [theirs] = client.post("/v1/embeddings", json={"input": "Hi"}).json()["data"]
    assert found == {"index": 0, "embedding": [theirs["embedding"]]}
    plain = client.post("/embedding", json={"content": ["Hi", "a"], "embd_normalize": -1}).json()
    assert [one["index"] for one in plain] == [0, 1]
    assert np.linalg.norm(plain[0]["embedding"][0]) != pytest.approx(1)
    for wrong in ([], [1], 5):
        assert client.post("/embedding", json={"content": wrong}).status_code == 400
    assert client.post("/embedding", json={"content": "a", "embd_normalize": 1}).status_code == 400


def test_reranking_is_another_name(make_client: Any) -> None:
    client = make_client(FakeEngine(tasks=ModelTasks(labels=("good",), activation="sigmoid")))
    body = {"query": "a", "documents": ["b", "c"]}
    asked = [client.post(path, json=body).json()["results"] for path in ("/rerank", "/reranking", "/v1/reranking")]
    assert asked[0] == asked[1] == asked[2]


@covers("GET /slots")
@covers("GET /slots", "model", "fail_on_no_slot")
def test_slots_tell_how_far_running_requests_are(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine)
    idle = {"n_ctx": CONTEXT, "speculative": False, "is_processing": False}
    assert client.get("/slots").json() == [{"id": number, **idle} for number in range(8)]
    assert client.get("/slots", params={"model": "other"}).status_code == 404
    engine.delay = 0.02
    body = {"prompt": "Hi", "n_predict": 25, "n_cmpl": 8}
    asking = threading.Thread(target=client.post, args=("/completion",), kwargs={"json": body})
    asking.start()
    wait_for(lambda: client.get("/slots").json()[0].get("next_token", [{"n_decoded": 0}])[0]["n_decoded"] > 2)
    slots = client.get("/slots").json()
    full = client.get("/slots", params={"fail_on_no_slot": 1})
    asking.join()
    assert [slot["is_processing"] for slot in slots] == [True] * 8
    assert slots[0]["n_prompt_tokens"] == 3
    [token] = slots[0]["next_token"]
    assert token["n_decoded"] + token["n_remain"] == 25
    assert full.status_code == 503 and full.json()["error"]["code"] == "no_slot"
    assert client.get("/slots", params={"fail_on_no_slot": 1}).status_code == 200


def test_what_slots_cannot_do_is_said(client: TestClient) -> None:
    for action, says in (("save", "kv_offload_dir"), ("restore", "kv_offload_dir"), ("erase", "reset_prefix_cache")):
        response = client.post("/slots/0", params={"action": action})
        assert response.status_code == 501 and says in response.json()["error"]["message"]
    response = client.post("/props", json={})
    assert response.status_code == 405 and "this path takes GET" in response.json()["error"]["message"]


def test_health_has_their_second_address(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/v1/health").json() == client.get("/health").json() == {"status": "ok"}
    engine.die()
    assert client.get("/v1/health").status_code == 503


@covers("POST /v1/chat/completions/input_tokens")
def test_tokens_of_a_chat_are_counted(client: TestClient, engine: FakeEngine) -> None:
    found = client.post("/v1/chat/completions/input_tokens", json={"messages": HELLO}).json()
    assert found == {"input_tokens": len(PROMPT), "object": "response.input_tokens"}
    assert client.post("/chat/completions/input_tokens", json={"messages": []}).status_code == 400
    assert not engine.seen


@covers("TokenizeRequest", "with_pieces", "parse_special")
def test_tokens_with_their_pieces(client: TestClient) -> None:
    body = {"content": "é!", "with_pieces": True, "parse_special": True}
    pieces = [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}, {"id": 33, "piece": "!"}]
    assert client.post("/tokenize", json=body).json()["tokens"] == pieces
    assert client.post("/tokenize", json=body | {"parse_special": False}).status_code == 400


@covers("POST /v1/chat/completions/control")
@covers("ControlRequest", "id", "action")
@covers("ChatRequest", "reasoning_control")
def test_reasoning_is_ended_while_it_is_written(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, reasoning_parser="think")
    ask = {"messages": HELLO, "stream": True}

    def told(**fields: Any) -> Any:
        """The answer to a request for control while a chat is streamed, whose id is "chatcmpl-x"."""
        engine.delay = 0.02
        client_side = threading.Thread(
            target=client.post, args=("/v1/chat/completions",), kwargs={"json": ask | {"request_id": "x"} | fields}
        )
        client_side.start()
        wait_for(lambda: bool(engine.active))
        found = client.post("/v1/chat/completions/control", json={"id": "chatcmpl-x", "action": "reasoning_end"}).json()
        client_side.join()
        return found

    assert told(reasoning_control=True) == {"success": True}
    assert engine.seen[-1][1].max_thinking_tokens == INT32_MAX
    [order] = engine.client.orders
    assert isinstance(order, EndThinking) and order.request_ids[0].startswith("chatcmpl-x-")
    assert told() == {"success": False, "message": "it was not sent with reasoning_control"}
    gone = client.post("/v1/chat/completions/control", json={"id": "chatcmpl-x", "action": "reasoning_end"})
    assert gone.json() == {"success": False, "message": "no active completion for this id"}
    wrong = client.post("/v1/chat/completions/control", json={"id": "x", "action": "stop"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "action"
    unmarked = make_client(FakeEngine(), reasoning_parser="none")
    assert unmarked.post("/v1/chat/completions", json={"messages": HELLO, "reasoning_control": True}).status_code == 200
