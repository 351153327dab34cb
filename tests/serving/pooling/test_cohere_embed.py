"""/v2/embed, as Cohere's clients use it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import BOS, CONTEXT, HIDDEN_SIZE, FakeEngine
from tests.serving.pooling.test_embeddings import vector
from tests.support.covers import covers


def embed(client: TestClient, **fields: Any) -> Any:
    response = client.post("/v2/embed", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


@covers("POST /v2/embed")
@covers("CohereEmbedRequest", "texts", "request_id", "priority")
def test_vectors_of_texts(client: TestClient) -> None:
    body = embed(client, model="fake", texts=["Hi", "a"], input_type="search_document", request_id="mine", priority=2)
    vectors = body.pop("embeddings")
    assert body == {
        "id": "embd-mine",
        "texts": ["Hi", "a"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 5}},
        "response_type": "embeddings_by_type",
    }
    np.testing.assert_allclose(vectors["float"], [vector([BOS, 72, 105]), vector([BOS, 97])], atol=1e-6)
    assert list(vectors) == ["float"]


@covers("CohereEmbedRequest", "inputs")
@covers("CohereInput", "content")
def test_inputs_are_lists_of_parts(client: TestClient) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    body = embed(client, inputs=[{"content": parts}])
    assert body["texts"] == ["H\ni"]
    np.testing.assert_allclose(body["embeddings"]["float"], [vector([BOS, *b"H\ni"])], atol=1e-6)


@covers("CohereEmbedRequest", "embedding_types", "output_dimension")
def test_every_way_to_write_vectors(client: TestClient) -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    vectors = embed(client, texts=["Hi"], embedding_types=kinds, output_dimension=8)["embeddings"]
    expected = vector([BOS, 72, 105], dimensions=8)
    np.testing.assert_allclose(vectors["float"][0], expected, atol=1e-6)
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(vectors["base64"][0]), "<f4"), expected, atol=1e-6)
    octet = int("".join("1" if value > 0 else "0" for value in expected), 2)
    assert vectors["ubinary"] == [[octet]] and vectors["binary"] == [[octet - 128]]


@covers("CohereEmbedRequest", "truncate", "max_tokens")
def test_long_texts_are_cut_at_the_end_asked_for(client: TestClient, engine: FakeEngine) -> None:
    for fields, prompt in (
        ({"max_tokens": 3}, [BOS, *b"ab"]),
        ({"max_tokens": 3, "truncate": "START"}, [BOS, *b"cd"]),
        ({"truncate": "NONE"}, [BOS, *b"abcd"]),
    ):
        embed(client, texts=["abcd"], **fields)
        assert engine.pooled[-1][0] == prompt
    embed(client, texts=["x" * 2 * CONTEXT])
    assert len(engine.pooled[-1][0]) == CONTEXT


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "texts", "neither is given"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts", "both are given"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]", "'ubinary'"),
        ({"texts": ["a"], "output_dimension": 99}, "output_dimension", f"this model has {HIDDEN_SIZE}"),
        ({"texts": ["a"], "images": ["x"]}, "images", "not supported"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 4}, "max_tokens", "forbids"),
        ({"texts": ["a", "x" * 999], "truncate": "NONE"}, "texts[1]", "the context holds 256"),
    ],
)
def test_refusals_name_coheres_fields(client: TestClient, fields: dict[str, Any], param: str, says: str) -> None:
    response = client.post("/v2/embed", json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and says in error["message"]
