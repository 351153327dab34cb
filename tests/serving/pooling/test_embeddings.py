"""/v1/embeddings: vectors against NumPy, every shape of input, what is cut and what is refused."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import openai
import pytest
from fastapi.testclient import TestClient

from jaxllm.requests.outputs import ModelTasks
from jaxllm.serving.served_model import stopped
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import BOS, CONTEXT, HIDDEN, HIDDEN_SIZE, FakeEngine
from tests.support.covers import covers

POOLED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "last": lambda states: states[-1], "cls": lambda states: states[0], "mean": lambda states: states.mean(axis=0),
}  # fmt: skip


def vector(token_ids: list[int], pooling: str = "last", dimensions: int | None = None) -> np.ndarray:
    """The unit vector that the fake model stands for, in float64."""
    states = np.array([HIDDEN[token_ids[: i + 1]].sum(axis=0) for i in range(len(token_ids))])
    kept = POOLED[pooling](states)[:dimensions]
    return kept / np.sqrt((kept**2).sum())


def embed(client: TestClient, **fields: Any) -> Any:
    response = client.post("/v1/embeddings", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def vectors(body: Any) -> np.ndarray:
    return np.array([entry["embedding"] for entry in body["data"]])


@covers("POST /v1/embeddings")
@covers("InputFields", "input")
@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("Hi", [[BOS, 72, 105]]),
        (["Hi", "a", "Hi"], [[BOS, 72, 105], [BOS, 97], [BOS, 72, 105]]),
        ([72, 105], [[72, 105]]),
        ([[72, 105], [97]], [[72, 105], [97]]),
        (["Hi", [97]], [[BOS, 72, 105], [97]]),
    ],
)
def test_every_shape_of_input(client: TestClient, engine: FakeEngine, given: Any, prompts: list[list[int]]) -> None:
    body = embed(client, input=given, user="somebody")
    assert sorted(seen[0] for seen in engine.pooled) == sorted(prompts)
    np.testing.assert_allclose(vectors(body), [vector(prompt) for prompt in prompts], atol=1e-6)
    assert [entry["index"] for entry in body["data"]] == list(range(len(prompts)))
    assert (body["object"], body["model"], body["data"][0]["object"]) == ("list", "fake", "embedding")
    tokens = sum(map(len, prompts))
    assert body["usage"] == {
        "prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 3 * len(prompts)},
    }  # fmt: skip


@pytest.mark.parametrize("setting", ["auto", "last", "mean", "cls"])
@pytest.mark.parametrize("asked", ["last", "mean", "cls"])
def test_pooling_is_the_servers_or_the_checkpoints(make_client: Any, setting: str, asked: str) -> None:
    client = make_client(FakeEngine(tasks=ModelTasks(pooling=asked)), pooling=setting)  # type: ignore[arg-type]
    expected = vector([1, 2, 3], asked if setting == "auto" else setting)
    np.testing.assert_allclose(vectors(embed(client, input=[1, 2, 3]))[0], expected, atol=1e-6)


@covers("VectorFields", "dimensions")
@pytest.mark.parametrize("dimensions", [1, 5, HIDDEN_SIZE, None])
def test_vectors_are_of_unit_length_whatever_their_dimensions(client: TestClient, dimensions: int | None) -> None:
    found = vectors(embed(client, input="Hello", dimensions=dimensions))[0]
    np.testing.assert_allclose(found, vector([BOS, *b"Hello"], dimensions=dimensions), atol=1e-6)
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


@covers("VectorFields", "normalize", "use_activation")
@pytest.mark.parametrize("field", ["normalize", "use_activation"])
@pytest.mark.parametrize("by_default", [True, False])
def test_raw_vectors(make_client: Any, field: str, by_default: bool) -> None:
    client = make_client(FakeEngine(tasks=ModelTasks(normalize=by_default)))
    raw = HIDDEN[[1, 2, 3]].sum(axis=0)
    unit = raw / np.linalg.norm(raw)
    np.testing.assert_allclose(vectors(embed(client, input=[1, 2, 3]))[0], unit if by_default else raw, atol=1e-5)
    np.testing.assert_allclose(vectors(embed(client, input=[1, 2, 3], **{field: False}))[0], raw, atol=1e-5)
    np.testing.assert_allclose(vectors(embed(client, input=[1, 2, 3], **{field: True}))[0], unit, atol=1e-6)


@covers("EncodingFields", "encoding_format")
def test_base64_is_the_same_numbers_as_little_endian_float32(client: TestClient) -> None:
    numbers = vectors(embed(client, input=["Hi", "a"]))
    encoded = [e["embedding"] for e in embed(client, input=["Hi", "a"], encoding_format="base64")["data"]]
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in encoded]
    assert np.array_equal(np.array(decoded), numbers.astype(np.float32))


@covers("EncodingFields", "embed_dtype", "endianness")
@pytest.mark.parametrize(
    ("embed_dtype", "dtype", "bits"),
    [
        (None, np.float32, 23), ("float32", np.float32, 23), ("float16", np.float16, 10),
        ("bfloat16", ml_dtypes.bfloat16, 7), ("fp8_e4m3", ml_dtypes.float8_e4m3fn, 3),
        ("fp8_e5m2", ml_dtypes.float8_e5m2, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("endianness", [None, "little", "big", "native"])
def test_bytes_of_every_type_and_order(
    client: TestClient, embed_dtype: str | None, dtype: Any, bits: int, endianness: str | None
) -> None:
    fields = {"encoding_format": "base64", "embed_dtype": embed_dtype, "endianness": endianness}
    octets = base64.b64decode(embed(client, input="Hi", **fields)["data"][0]["embedding"])
    size = np.dtype(dtype).itemsize
    if endianness == "big" or (endianness == "native" and sys.byteorder == "big"):
        octets = b"".join(octets[at : at + size][::-1] for at in range(0, len(octets), size))
    read = np.frombuffer(octets, dtype).astype(np.float64)
    np.testing.assert_allclose(read, vector([BOS, *b"Hi"]), rtol=2.0**-bits, atol=2.0**-9)


@pytest.mark.parametrize("fields", [{"embed_dtype": "float16"}, {"endianness": "big"}])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/pooling"])
def test_numbers_have_neither_type_nor_order(client: TestClient, path: str, fields: dict[str, Any]) -> None:
    error = client.post(path, json={"input": "Hi"} | fields).json()["error"]
    (name,) = fields
    assert (error["param"], error["message"]) == (name, f"{name} needs encoding_format to be 'base64'")


@covers("POST /v1/pooling")
@covers("PoolingRequest", "task")
def test_pooling_gives_what_the_model_is_made_for(make_client: Any, engine: FakeEngine) -> None:
    made = make_client(engine)
    embedded = embed(made, input=["Hi", "a"], dimensions=6)
    for task in ({}, {"task": "embed"}):
        body = made.post("/pooling", json={"input": ["Hi", "a"], "dimensions": 6} | task).json()
        assert body["object"] == "list" and body["usage"] == embedded["usage"]
        assert [entry["object"] for entry in body["data"]] == ["pooling"] * 2
        assert [entry["data"] for entry in body["data"]] == [entry["embedding"] for entry in embedded["data"]]
    refused = made.post("/pooling", json={"input": "Hi", "task": "classify"})
    assert refused.status_code == 400 and "no classification head" in refused.json()["error"]["message"]
    for task in ("token_embed", "plugin"):
        refused = made.post("/pooling", json={"input": "Hi", "task": task})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "task"


def test_pooling_of_a_classifier(make_client: Any) -> None:
    client = make_client(FakeEngine(tasks=ModelTasks(labels=("glad", "sad", "angry"))))
    classes = client.post("/classify", json={"input": "Hi"}).json()["data"][0]["probs"]
    for task in ({}, {"task": "classify"}):
        assert client.post("/pooling", json={"input": "Hi"} | task).json()["data"][0]["data"] == classes
    raw = client.post("/pooling", json={"input": "Hi", "use_activation": False}).json()["data"][0]["data"]
    assert np.argmax(raw) == np.argmax(classes) and not np.isclose(sum(raw), 1)
    refused = client.post("/pooling", json={"input": "Hi", "dimensions": 2}).json()["error"]
    assert refused["param"] == "dimensions"


def test_openai_sdk(listen: Callable[..., str], engine: FakeEngine) -> None:
    """Which asks for base64 unless told otherwise, and decodes it."""
    with openai.OpenAI(base_url=f"{listen(engine)}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model="fake", input=["Hi", "a"], dimensions=6)
        plain = client.embeddings.create(model="fake", input=["Hi", "a"], dimensions=6, encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="dimensions is 13; this model has 12") as error:
            client.embeddings.create(model="fake", input="Hi", dimensions=13)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="text-embedding-3-small", input="Hi")
    assert error.value.param == "dimensions"
    expected = [vector([BOS, *text], dimensions=6) for text in (b"Hi", b"a")]
    np.testing.assert_allclose([entry.embedding for entry in made.data], expected, atol=1e-6)
    np.testing.assert_allclose([entry.embedding for entry in plain.data], expected, atol=1e-6)
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (5, 5)


@covers("InputFields", "add_special_tokens")
def test_special_tokens(client: TestClient, engine: FakeEngine) -> None:
    embed(client, input="Hi", add_special_tokens=False)
    assert engine.pooled[-1][0] == [72, 105]


@covers("InputFields", "messages", "add_generation_prompt")
def test_a_chat_is_one_text(client: TestClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    embed(client, messages=messages)
    embed(client, messages=messages, add_generation_prompt=True, add_special_tokens=True)
    embed(client, messages=messages, chat_template="{{ messages[0].content }}!")
    assert [bytes(i for i in seen[0] if i < BOS) for seen in engine.pooled] == [
        b"[user]Hi", b"[user]Hi[assistant]", b"Hi!",
    ]  # fmt: skip
    assert [BOS in seen[0] for seen in engine.pooled] == [False, True, False]


@covers("InputFields", "truncation_side")
@covers("PoolingFields", "truncate_prompt_tokens")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 4}, [BOS, *b"abc"]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [BOS, *b"def"]),
        ({"truncate_prompt_tokens": 4, "add_special_tokens": False}, [*b"abcd"]),
        ({"truncate_prompt_tokens": 7}, [BOS, *b"abcdef"]),
        ({"truncate_prompt_tokens": 10**9}, [BOS, *b"abcdef"]),
    ],
)
def test_cutting_keeps_special_tokens(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], expected: list[int]
) -> None:
    embed(client, input="abcdef", **fields)
    assert engine.pooled[-1][0] == expected


def test_cutting_to_the_context(client: TestClient, engine: FakeEngine) -> None:
    embed(client, input=["x" * 1000, "y", [5] * 1000], truncate_prompt_tokens=-1)
    assert sorted(len(seen[0]) for seen in engine.pooled) == [2, CONTEXT, CONTEXT]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "give input or messages; neither is given"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "input", "both are given"),
        ({"input": []}, "input", "input is an empty list"),
        ({"input": [[]]}, "input[0]", "input[0] is empty"),
        ({"input": ["a", []]}, "input[1]", "input[1] is empty"),
        ({"input": [1, "a"]}, "input", "must be a string, a list of strings"),
        ({"input": [1.5]}, "input", "must be a string, a list of strings"),
        ({"input": 5}, "input", "input is 5"),
        ({"input": [[1, 300]]}, "input[0]", "input[0] has token id 300; ids go from 0 to 299"),
        ({"input": [-1]}, "input", "input has token id -1"),
        ({"input": ["a"] * 2049}, "input", "input has 2049 entries; at most 2048"),
        ({"input": ["a", "x" * 300]}, "input[1]", f"input[1] has 301 tokens; the context holds {CONTEXT}."),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1, or 1 or more"),
        ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "1 special tokens leave no room"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "embed_dtype": "int4", "encoding_format": "base64"}, "embed_dtype", "'bfloat16'"),
        ({"input": "a", "padding": True}, "padding", "not supported by this server"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field 'temperature'"),
        ({"input": "a", "normalize": True, "use_activation": True}, "use_activation", "give one of them"),
    ],
)
def test_refusals(client: TestClient, engine: FakeEngine, fields: dict[str, Any], param: str, message: str) -> None:
    response = client.post("/v1/embeddings", json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert engine.pooled == []


@covers("PoolingFields", "request_id")
@covers("ScheduledFields", "priority", "cache_salt")
def test_priority_and_salt_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    response = client.post("/embeddings", json={"input": "a", "priority": 3, "cache_salt": "s", "request_id": "mine"})
    assert engine.pooled[0][2] == {"priority": 3, "cache_salt": "s"}
    assert response.headers["x-request-id"] == response.json()["id"] == "embd-mine"


def test_a_large_request_runs_together_but_leaves_room_for_others(make_client: Any) -> None:
    engine = FakeEngine(delay=0.001, queue_limit=20)
    body = embed(make_client(engine), input=[[i % 256] for i in range(200)])
    assert len(body["data"]) == 200
    assert engine.most_active == 2 * engine.info.max_num_seqs
    np.testing.assert_allclose(vectors(body)[7], vector([7]), atol=1e-6)


def test_a_full_queue_and_a_dead_engine(make_client: Any) -> None:
    response = make_client(FakeEngine(queue_limit=0)).post("/v1/embeddings", json={"input": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    engine = FakeEngine()
    engine.die()
    assert make_client(engine).post("/v1/embeddings", json={"input": "a"}).status_code == 503


def test_without_a_tokenizer_ids_still_work(make_client: Any) -> None:
    client = make_client(FakeEngine(tokenizer=False))
    np.testing.assert_allclose(vectors(embed(client, input=[1, 2]))[0], vector([1, 2]), atol=1e-6)
    assert "without a tokenizer" in client.post("/v1/embeddings", json={"input": "a"}).json()["error"]["message"]


def test_a_client_that_leaves_stops_its_prompts(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 60
    url = listen(engine)
    with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{url}/v1/embeddings", json={"input": ["a", "b"]}, timeout=0.3)
    wait_for(lambda: not engine.active)


def test_a_server_that_stops_answers_503(make_client: Any) -> None:
    engine = FakeEngine(delay=60)
    client = make_client(engine)
    state = client.app.state.server

    async def stop_when_running() -> None:
        while len(engine.active) < 2:
            await asyncio.sleep(0.01)
        assert len(state.running) == 1
        next(iter(state.running)).abort(stopped())

    client.portal.start_task_soon(stop_when_running)
    response = client.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert not engine.active and not state.running
