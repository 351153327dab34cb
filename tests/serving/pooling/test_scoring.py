"""/score, /rerank and /classify against NumPy: by cosine, by yes and no, and by a classification head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from jaxllm.config import ServeConfig
from jaxllm.engine.doors.async_llm import AsyncLLM
from jaxllm.errors import ConfigError
from jaxllm.requests.outputs import ModelTasks
from tests.reference import load_golden
from tests.reference.tiny import write_checkpoint
from tests.serving.fake_engine import BOS, CONTEXT, HEAD, HIDDEN, ByteTokenizer, FakeEngine, app_of
from tests.support.covers import covers
from tests.support.sizes import FIELDS

ONE_CLASS = ModelTasks(labels=("relevant",), activation="sigmoid")
THREE_CLASSES = ModelTasks(labels=("glad", "sad", "angry"))
YES_AND_NO = ModelTasks(labels=("yes", "no"), judges_pairs=True)  # a GGUF reranker
JUDGE = ModelTasks(judges_pairs=True)
TEXTS = ["Paris", "Rome is in Italy", "x"]
PROMPT = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {}
<Query>: {}
<Document>: {}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


class JudgingTokenizer(ByteTokenizer):
    """In which yes and no are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.backend.add_tokens(["yes", "no"])
        self.yes, self.no = (self.backend.token_to_id(word) for word in ("yes", "no"))


class JudgingEngine(FakeEngine):
    """With room for the judge's prompt."""

    def __init__(self, tasks: ModelTasks = JUDGE):
        super().__init__(tasks=tasks)
        self.tokenizer = JudgingTokenizer()
        self.info.max_model_len = 1024


def post(client: TestClient, path: str, **fields: Any) -> Any:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def scores(client: TestClient, **fields: Any) -> list[float]:
    return [entry["score"] for entry in post(client, "/score", **fields)["data"]]


def unit(text: str) -> np.ndarray:
    total = HIDDEN[[BOS, *text.encode()]].sum(axis=0)
    return total / np.sqrt((total**2).sum())


def logits(token_ids: list[int], rows: list[int]) -> np.ndarray:
    return HEAD[rows] @ HIDDEN[token_ids].sum(axis=0)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


@covers("POST /v1/score")
@covers("ScoreRequest", "text_1", "text_2")
def test_cosine_of_one_text_and_many(client: TestClient, engine: FakeEngine) -> None:
    body = post(client, "/v1/score", text_1="France", text_2=[*TEXTS, "Paris"])
    expected = [float(unit("France") @ unit(text)) for text in [*TEXTS, "Paris"]]
    np.testing.assert_allclose([entry["score"] for entry in body["data"]], expected, atol=1e-6)
    assert len(engine.pooled) == 4  # each text once
    tokens = sum(len(seen[0]) for seen in engine.pooled)
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (tokens, tokens)
    assert (body["object"], body["data"][0]["object"], body["model"]) == ("list", "score", "fake")
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2, 3]


def test_cosine_of_pairs_and_of_one_with_itself(client: TestClient) -> None:
    expected = [float(unit(a) @ unit(b)) for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
    np.testing.assert_allclose(scores(client, text_1=TEXTS, text_2=TEXTS[::-1]), expected, atol=1e-6)
    assert scores(client, text_1="same", text_2="same") == [pytest.approx(1, abs=1e-6)]


def test_no_cosine_is_beyond_one(client: TestClient) -> None:
    """Rounding makes some units' product with themselves 1.0000000000000002."""
    texts = [chr(code) * count for code in range(97, 123) for count in (1, 2, 5)]
    units = [unit(text) for text in texts]
    found = scores(client, text_1=texts, text_2=texts)
    assert max(float(one @ one) for one in units) > 1 >= max(found) and min(found) > 1 - 1e-6


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_vllms_other_names(client: TestClient, names: tuple[str, str]) -> None:
    given = dict(zip(names, ("France", TEXTS), strict=True))
    assert scores(client, **given) == scores(client, text_1="France", text_2=TEXTS)


@covers("ComparisonFields", "instruction")
@pytest.mark.parametrize("tasks", [JUDGE, YES_AND_NO], ids=["language model", "head of two rows"])
@pytest.mark.parametrize("instruction", [None, "Find capitals"])
def test_a_reranker_is_asked_for_yes_or_no(make_client: Any, tasks: ModelTasks, instruction: str | None) -> None:
    engine = JudgingEngine(tasks)
    client = make_client(engine)
    given = {} if instruction is None else {"instruction": instruction}
    found = scores(client, text_1="capital of France?", text_2=TEXTS, **given)
    tokenizer = JudgingTokenizer()
    prompts = [PROMPT.format(instruction or WEB_SEARCH, "capital of France?", text) for text in TEXTS]
    ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    assert [seen[0] for seen in engine.pooled] == ids
    rows = [0, 1] if tasks.labels else [tokenizer.yes, tokenizer.no]
    odds = [np.subtract(*logits(prompt, rows)) for prompt in ids]
    np.testing.assert_allclose(found, sigmoid(np.array(odds)), atol=1e-5)
    raw = scores(client, text_1="capital of France?", text_2=TEXTS, use_activation=False, **given)
    np.testing.assert_allclose(raw, odds, atol=1e-4)


@covers("ComparisonFields", "use_activation")
def test_one_class_scores_a_pair(make_client: Any) -> None:
    engine = FakeEngine(tasks=ONE_CLASS)
    client = make_client(engine)
    pair = [*b"FranceParis"]  # this tokenizer says nothing of pairs, so that they are joined
    (logit,) = logits(pair, [0])
    assert scores(client, text_1="France", text_2="Paris") == [pytest.approx(sigmoid(logit), abs=1e-6)]
    assert scores(client, text_1="France", text_2="Paris", use_activation=False) == [pytest.approx(logit, abs=1e-5)]
    assert engine.pooled[0][0] == pair


@covers("POST /v1/rerank")
@covers("TextDocument", "text")
@covers("DocumentRerankRequest", "query", "documents", "top_n")
def test_jina_ranks_best_first(client: TestClient) -> None:
    body = post(client, "/v1/rerank", model="fake", query="France", documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]])
    expected = {text: float(unit("France") @ unit(text)) for text in TEXTS}
    order = sorted(TEXTS, key=lambda text: -expected[text])
    assert [result["document"]["text"] for result in body["results"]] == order
    assert [result["index"] for result in body["results"]] == [TEXTS.index(text) for text in order]
    found = [result["relevance_score"] for result in body["results"]]
    np.testing.assert_allclose(found, [expected[text] for text in order], atol=1e-6)
    assert body["model"] == "fake" and body["usage"]["total_tokens"] > 0
    best = post(client, "/rerank", query="France", documents=TEXTS, top_n=1, return_documents=False)
    assert best["results"] == [{"index": TEXTS.index(order[0]), "relevance_score": pytest.approx(expected[order[0]])}]


@covers("POST /v2/rerank")
@covers("RerankRequest", "texts", "return_text", "raw_scores", "truncate", "truncation_direction")
def test_teis_texts(make_client: Any) -> None:
    client = make_client(FakeEngine(tasks=ONE_CLASS))
    asked = {"query": "Where?", "texts": TEXTS}
    ranking = client.post("/rerank", json={"query": "Where?", "documents": TEXTS}).json()["results"]
    listed = client.post("/rerank", json=asked).json()
    assert listed == [{"index": entry["index"], "score": entry["relevance_score"]} for entry in ranking]
    with_text = client.post("/rerank", json=asked | {"return_text": True}).json()
    assert [entry["text"] for entry in with_text] == [TEXTS[entry["index"]] for entry in listed]
    raw = client.post("/rerank", json=asked | {"raw_scores": True}).json()
    np.testing.assert_allclose([1 / (1 + np.exp(-e["score"])) for e in raw], [e["score"] for e in listed])
    long = {"query": "Where?", "texts": ["x" * 2 * CONTEXT]}
    assert client.post("/rerank", json=long).status_code == 400
    cut = client.post("/rerank", json=long | {"truncate": True, "truncation_direction": "Right"})
    assert cut.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "documents"),
        ({"texts": TEXTS, "documents": TEXTS}, "documents"),
        ({"texts": TEXTS, "top_n": 1}, "top_n"),
        ({"texts": []}, "texts"),
        ({"documents": TEXTS, "raw_scores": True}, "raw_scores"),
        ({"documents": TEXTS, "truncate": True}, "truncate"),
        ({"texts": TEXTS, "truncation_direction": "Left"}, "truncation_direction"),
        ({"texts": TEXTS, "truncate": True, "truncate_prompt_tokens": 5}, "truncate"),
    ],
)
def test_what_teis_texts_do_not_go_with(make_client: Any, fields: dict[str, Any], param: str) -> None:
    response = make_client(FakeEngine(tasks=ONE_CLASS)).post("/rerank", json={"query": "Where?"} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_warnings_of_a_list_are_in_a_header(make_client: Any) -> None:
    client = make_client(FakeEngine(tasks=ONE_CLASS), unknown_fields="warn")
    response = client.post("/rerank", json={"query": "Where?", "texts": TEXTS, "odd": 1})
    assert response.json()[0].keys() == {"index", "score"} and "odd" in response.headers["X-Warnings"]


@covers("DocumentRerankRequest", "return_documents")
def test_cohere_shapes(client: TestClient) -> None:
    first = post(client, "/v1/rerank", query="France", documents=TEXTS, top_n=10)
    second = post(client, "/v2/rerank", query="France", documents=TEXTS, max_tokens_per_doc=4096)
    assert [r["index"] for r in first["results"]] == [r["index"] for r in second["results"]]
    assert set(second["results"][0]) == {"index", "relevance_score"}
    assert [body["meta"]["api_version"]["version"] for body in (first, second)] == ["1", "2"]
    documents = post(client, "/v2/rerank", query="France", documents=TEXTS, return_documents=True)
    assert documents["results"][0]["document"]["text"] in TEXTS


def test_equal_documents_keep_their_order(client: TestClient) -> None:
    body = post(client, "/rerank", query="France", documents=["same", "same", "same"])
    assert [result["index"] for result in body["results"]] == [0, 1, 2]


@covers("ComparisonFields", "max_tokens_per_doc", "max_tokens_per_query")
def test_documents_and_queries_are_cut(client: TestClient, engine: FakeEngine) -> None:
    post(client, "/rerank", query="abcdef", documents=["uvwxyz", "uv"], max_tokens_per_doc=3, max_tokens_per_query=2)
    assert [seen[0] for seen in engine.pooled] == [[BOS, *b"ab"], [BOS, *b"uvw"], [BOS, *b"uv"]]


def test_only_the_document_is_cut_out_of_the_judges_prompt(make_client: Any) -> None:
    engine = JudgingEngine()
    client = make_client(engine)
    tokenizer = JudgingTokenizer()
    around = len(tokenizer.encode(PROMPT.format(WEB_SEARCH, "q", ""), add_special_tokens=False))
    post(client, "/score", text_1="q", text_2="abcdefgh", truncate_prompt_tokens=around + 3)
    assert engine.pooled[0][0] == tokenizer.encode(PROMPT.format(WEB_SEARCH, "q", "abc"), add_special_tokens=False)
    post(client, "/score", text_1="q", text_2="x" * 5000, truncate_prompt_tokens=-1)
    assert len(engine.pooled[1][0]) == 1024
    short = {"text_1": "q", "text_2": "abc", "truncate_prompt_tokens": around}
    error = client.post("/score", json=short).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "leaves no room for a document" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/score", {"text_1": "a"}, "text_2", "text_2 is required"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "text_1 has 2 entries and text_2 3"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "text_1 has 2 entries and text_2 1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "text_2 has 0 entries; it must have from 1 to 2048"),
        ("/score", {"text_1": "a", "text_2": 5}, "text_2", "text_2 is 5"),
        (
            "/score",
            {"text_1": "a", "text_2": "b" * 300},
            "text_2",
            f"text_2 has 301 tokens; the context holds {CONTEXT}",
        ),
        ("/score", {"text_1": ["b" * 300] * 2, "text_2": ["a"] * 2}, "text_1[0]", "text_1[0] has 301 tokens"),
        ("/rerank", {"query": "b" * 300, "documents": ["a"]}, "query", "query has 301 tokens"),
        ("/rerank", {"query": "a", "documents": ["b", "c" * 300]}, "documents[1]", "documents[1] has 301 tokens"),
        ("/rerank", {"query": "a", "texts": ["b", "c" * 300]}, "texts[1]", "texts[1] has 301 tokens"),
        (
            "/rerank",
            {"query": "a", "documents": ["b", "c" * 300], "max_tokens_per_doc": 299},
            "documents[1]",
            "documents[1] has 300 tokens",
        ),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "no place in how this model"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation", "a cosine has no"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents is []"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents[0].image", "unknown field 'image'"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n is -1"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["t"]}, "rank_fields", "not supported"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "model": "c"}, "model", "'c' is not served here"),
        ("/classify", {"input": "a"}, "model", "model 'fake' has no classification head"),
        ("/classify", {}, "input", "give input or messages"),
    ],
)
def test_refusals(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str | None, message: str
) -> None:
    response = client.post(path, json=fields)
    error = response.json()["error"]
    assert response.status_code == (404 if "not served" in message else 400)
    assert message in error["message"], error
    assert param is None or error["param"] == param
    assert engine.pooled == []


def test_many_classes_give_no_score(make_client: Any) -> None:
    response = make_client(FakeEngine(tasks=THREE_CLASSES)).post("/score", json={"text_1": "a", "text_2": "b"})
    assert response.status_code == 400
    assert "tells 3 classes apart; a score needs one" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("setting", "tasks", "problem"),
    [
        ("classifier", ModelTasks(), "has no classification head"),
        ("yes_no", ONE_CLASS, "has a classification head"),
        ("cosine", ONE_CLASS, None),
        ("cosine", JUDGE, None),
        ("yes_no", ModelTasks(), None),
        ("classifier", ONE_CLASS, None),
    ],
)
def test_a_setting_that_does_not_suit_the_model(
    make_client: Any, setting: str, tasks: ModelTasks, problem: str | None
) -> None:
    if problem is None:
        make_client(FakeEngine(tasks=tasks), score_method=setting)
    else:
        with pytest.raises(ConfigError, match=problem):
            make_client(FakeEngine(tasks=tasks), score_method=setting)


def test_yes_and_no_must_be_tokens(make_client: Any) -> None:
    response = make_client(FakeEngine(), score_method="yes_no").post("/score", json={"text_1": "a", "text_2": "b"})
    assert response.status_code == 400 and "no single token for 'yes'" in response.json()["error"]["message"]


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(), "sigmoid": sigmoid, "identity": lambda x: x,
}  # fmt: skip


@covers("POST /v1/classify")
@covers("ClassifyRequest", "use_activation")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("use_activation", [True, False])
def test_classify(make_client: Any, activation: str, use_activation: bool) -> None:
    labels = ("glad", "sad", "angry")
    client = make_client(FakeEngine(tasks=ModelTasks(labels=labels, activation=activation)))  # type: ignore[arg-type]
    body = post(client, "/classify", input=["Hi", "no"], use_activation=use_activation)
    apply = ACTIVATIONS[activation if use_activation else "identity"]
    for entry, text in zip(body["data"], ("Hi", "no"), strict=True):
        expected = apply(logits([BOS, *text.encode()], [0, 1, 2]))
        np.testing.assert_allclose(entry["probs"], expected, atol=1e-5)
        assert (entry["label"], entry["num_classes"]) == (labels[int(np.argmax(expected))], 3)
    assert body["object"] == "list" and body["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("name", ["qwen3_classifier", "gemma2_classifier"])
def test_a_real_classifier_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    labels = ["glad", "sad", "angry"] if name == "qwen3_classifier" else ["LABEL_0", "LABEL_1"]
    settings = FIELDS | {"model": str(write_checkpoint(name, tmp_path)), "max_model_len": None, "engine_process": False}
    ids = golden.prompt_token_ids
    engine = AsyncLLM(**settings)
    try:
        with TestClient(app_of(ServeConfig(**settings), engine), base_url="http://localhost") as client:
            body = post(client, "/classify", input=[ids, ids[:7], ids[:23]])
            for path, prompt in (("completions", {"prompt": ids}), ("completions", {"prompt": ids, "stream": True})):
                error = client.post(f"/v1/{path}", json=prompt)
                assert error.status_code == 400
                assert "generates no text, it classifies" in error.json()["error"]["message"]
            embedding = post(client, "/v1/embeddings", input=ids)["data"][0]["embedding"]
    finally:
        engine.shutdown()
    for entry, length in zip(body["data"], (len(ids), 7, 23), strict=True):
        expected = ACTIVATIONS["softmax"](golden.logits[length - 1].astype(np.float64))
        np.testing.assert_allclose(entry["probs"], expected, atol=1e-4)
        assert entry["label"] == labels[int(expected.argmax())]
    assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)
