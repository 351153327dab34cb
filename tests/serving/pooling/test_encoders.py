"""Encoders behind the server: pairs of texts with token types, prompts by name, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.config import ServeConfig
from jaxllm.engine.doors.async_llm import AsyncLLM
from jaxllm.requests.outputs import ModelTasks
from tests.models.encoder_harness import EncoderHarness
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights, write_checkpoint
from tests.serving.fake_engine import BOS, FakeEngine, app_of
from tests.serving.pooling.test_embeddings import vector
from tests.support.covers import covers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CLS, SEP = 2, 3
MESSAGE = "this model is an encoder, which generates no text"
PROMPTS = ModelTasks(prompts={"query": "q: ", "document": "d: "}, default_prompt="d: ")


def write_tokenizer(directory: Path) -> None:
    """A token a letter, within words of BERT's; [CLS] and [SEP] around texts."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    backend.save(str(directory / "tokenizer.json"))


def ids(text: str) -> list[int]:
    return [4 + LETTERS.index(c) + (26 if i else 0) for word in text.split() for i, c in enumerate(word)]


@contextmanager
def served(path: Path) -> Iterator[TestClient]:
    """A server of the checkpoint, which gets a tokenizer."""
    write_tokenizer(path)
    settings = dict(
        model=str(path), dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, prefill_buckets=(),
        enforce_eager=True, engine_process=False,
    )  # fmt: skip
    engine = AsyncLLM(**settings)
    try:
        with TestClient(app_of(ServeConfig(**settings), engine), base_url="http://localhost") as client:
            yield client
    finally:
        engine.shutdown()


def post(client: TestClient, path: str, **fields: Any) -> Any:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_vectors_and_refusals_of_an_encoder(tmp_path: Path) -> None:
    with served(write_checkpoint("bert", tmp_path)) as client:
        texts = ["paris is nice", "a", "tea"]
        found = post(client, "/v1/embeddings", input=texts)
        hidden = EncoderHarness(tmp_path).run([[CLS, *ids(text), SEP] for text in texts])
        for entry, states in zip(found["data"], hidden, strict=True):
            mean = states.astype(np.float64).mean(0)
            np.testing.assert_allclose(entry["embedding"], mean / np.linalg.norm(mean), atol=1e-5)
        assert found["usage"]["prompt_tokens"] == sum(map(len, hidden))

        units = [np.array(entry["embedding"]) for entry in found["data"]]
        (score,) = post(client, "/score", text_1=texts[0], text_2=texts[2])["data"]
        assert score["score"] == pytest.approx(float(units[0] @ units[2]), abs=1e-5)

        message = [{"role": "user", "content": "hi"}]
        for path, fields in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/chat/completions", {"messages": message}),
            ("/v1/messages", {"messages": message, "max_tokens": 5}),
            ("/v1/responses", {"input": "hi"}),
        ):
            response = client.post(path, json=fields)
            assert response.status_code == 400 and MESSAGE in response.json()["error"]["message"], response.text
            assert "use /v1/embeddings, /score and /rerank" in response.json()["error"]["message"]
        long = client.post("/v1/embeddings", json={"input": ["a", "b" * 70]})
        assert long.status_code == 400
        assert "input[1] has 72 tokens; the context holds 64" in long.json()["error"]["message"]
        assert post(client, "/v1/embeddings", input="b" * 70, truncate_prompt_tokens=-1)["usage"]["total_tokens"] == 64
        no_head = client.post("/classify", json={"input": "a"}).json()["error"]["message"]
        assert "has no classification head" in no_head


def test_classes_of_an_encoder(tmp_path: Path) -> None:
    with served(write_checkpoint("bert_classifier", tmp_path)) as client:
        found = post(client, "/classify", input=["paris", "tea is nice"], use_activation=False)
        logits = EncoderHarness(tmp_path).run([[CLS, *ids(text), SEP] for text in ("paris", "tea is nice")])
        for entry, expected in zip(found["data"], logits, strict=True):
            np.testing.assert_allclose(entry["probs"], expected[0], atol=1e-4)
        refused = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert "it classifies (as glad, sad, angry); use /classify" in refused.json()["error"]["message"]
        assert "and no vectors" in client.post("/v1/embeddings", json={"input": "a"}).json()["error"]["message"]


def test_rerank_by_a_cross_encoder(tmp_path: Path) -> None:
    """The head has one class; scores are those of pairs whose second text has the second type of tokens."""
    query, documents = "where is paris", ["tea is nice", "paris", "a b c d e"]
    weights = tiny_weights("bert_classifier")
    weights |= {f"classifier.{kind}": weights[f"classifier.{kind}"][:1] for kind in ("weight", "bias")}
    config = tiny_config("bert_classifier") | {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    with served(save_checkpoint(config, weights, tmp_path)) as client:
        ranked = post(client, "/rerank", query=query, documents=documents)["results"]
        cut = post(client, "/rerank", query=query, documents=documents, truncate_prompt_tokens=17)
    start = [CLS, *ids(query), SEP]
    pairs = [[*start, *ids(document), SEP] for document in documents]
    logits = np.array([rows[0, 0] for rows in EncoderHarness(tmp_path).run(pairs, [len(start)] * 3)])
    expected = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert [entry["index"] for entry in ranked] == np.argsort(-expected).tolist()
    np.testing.assert_allclose([entry["relevance_score"] for entry in ranked], np.sort(expected)[::-1], atol=1e-5)
    assert cut["usage"]["total_tokens"] == 3 * 17


@covers("InputFields", "prompt_name")
@covers("CohereEmbedRequest", "input_type")
def test_prompts_by_name(make_client: Any) -> None:
    client = make_client(FakeEngine(tasks=PROMPTS))
    for name, before in ((None, b"d: "), ("query", b"q: "), ("document", b"d: ")):
        given = {} if name is None else {"prompt_name": name}
        (entry,) = post(client, "/v1/embeddings", input="Hi", **given)["data"]
        np.testing.assert_allclose(entry["embedding"], vector([BOS, *before, *b"Hi"]), atol=1e-6)
    for kind, before in (("search_query", b"q: "), ("search_document", b"d: "), ("clustering", b"d: ")):
        found = post(client, "/v2/embed", texts=["Hi"], input_type=kind)["embeddings"]["float"]
        np.testing.assert_allclose(found, [vector([BOS, *before, *b"Hi"])], atol=1e-6)
    for fields, message in (
        ({"input": "Hi", "prompt_name": "passage"}, "prompt_name is 'passage'; accepted are query, document"),
        ({"input": [1, 2], "prompt_name": "query"}, "prompt_name goes with texts, not with token ids or messages"),
    ):
        response = client.post("/v1/embeddings", json=fields)
        assert response.status_code == 400 and message in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "prompt_name"


def test_a_model_without_prompts_names_none(client: TestClient) -> None:
    response = client.post("/v1/embeddings", json={"input": "Hi", "prompt_name": "query"})
    assert response.status_code == 400 and "accepted are none, for this model has no prompts" in response.text
