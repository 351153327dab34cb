"""/decisions and /systemone against NumPy, with OpenAI's SDK, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from openai import OpenAI

from jaxllm.requests.outputs import ModelTasks
from tests.serving.fake_engine import CACHED, HEAD, HIDDEN, ByteTokenizer, FakeEngine
from tests.support.covers import covers

STATE = "I was charged twice."
PREDICATE = {"type": "predicate", "name": "double", "instructions": "It was charged twice."}
CHOICE = {
    "type": "choice", "instructions": "Which team?",
    "choices": [{"value": "billing", "description": "money"}, {"value": True}, {"value": "true"}],
}  # fmt: skip
SCORE = {
    "type": "score",
    "name": "anger",
    "instructions": "How angry?",
    "levels": [{"label": "calm"}, {"label": "cross"}],
}
near = partial(pytest.approx, rel=1e-4)  # what comes of the engine is float32
NOTHING_ELSE = "and with nothing else."


class Decider(FakeEngine):
    """In whose vocabulary yes and no are tokens, and with room for questions."""

    def __init__(self, template: str | None = None, tasks: ModelTasks | None = None):
        super().__init__(tasks=tasks)
        self.tokenizer = ByteTokenizer() if template is None else ByteTokenizer(template)
        self.tokenizer.backend.add_tokens(["yes", "no"])
        self.info.max_model_len = 1024

    @property
    def asked(self) -> list[str]:
        return [self.tokenizer.decode(ids, False) for ids, _, _ in self.pooled]

    def next_logprobs(self, prompt: list[int]) -> np.ndarray:
        logits = HEAD @ HIDDEN[prompt].sum(axis=0)
        return logits - np.log(np.exp(logits).sum())

    def shares(self, at: int, labels: str | list[str]) -> tuple[np.ndarray, float]:
        tokens = [self.tokenizer.encode(label, False)[0] for label in labels]
        weights = np.exp(self.next_logprobs(self.pooled[at][0])[tokens])
        return weights / weights.sum(), float(weights.sum())


@pytest.fixture
def engine() -> Decider:
    return Decider()


def post(client: TestClient, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, path: str, **body: Any) -> tuple[str, str]:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


@covers("POST /v1/decisions")
@covers("DecisionRequest", "input", "questions")
@covers("DecisionQuestion", "type", "instructions", "name", "choices", "levels")
@covers("DecisionChoice", "value", "description")
@covers("DecisionLevel", "label", "description")
def test_openais_sdk_reads_the_answers(listen: Callable[..., str], engine: Decider) -> None:
    sdk = OpenAI(base_url=f"{listen(engine)}/v1", api_key="none")
    level = SCORE | {"levels": [{"label": "calm", "description": "polite"}, {"label": "cross"}]}
    decision = sdk.decisions.create(model="fake", input=STATE, questions=[PREDICATE, CHOICE, level])  # type: ignore
    yes, choice, score = decision.answers
    shares, mass = engine.shares(0, ["yes", "no"])
    assert (yes.type, yes.name) == ("predicate", "double")
    assert yes.probability == near(shares[0]) and yes.label_mass == near(mass)
    shares, mass = engine.shares(1, "ABC")
    assert [one.value for one in choice.probabilities] == ["billing", True, "true"]
    assert [one.probability for one in choice.probabilities] == near(shares)
    assert choice.choice == ["billing", True, "true"][int(np.argmax(shares))] and choice.name is None
    assert choice.confidence == near(shares.max()) and choice.label_mass == near(mass)
    shares, _ = engine.shares(2, "01")
    assert [(one.label, one.value) for one in score.probabilities] == [("calm", 0), ("cross", 1)]
    assert score.score == near(shares[1]) and score.confidence == near(shares.max())
    tokens = sum(len(prompt) for prompt, _, _ in engine.pooled)
    assert (decision.usage.input_tokens, decision.usage.output_tokens) == (tokens, 0)
    assert decision.usage.input_tokens_details.cached_tokens == 3 * CACHED and decision.model == "fake"
    assert all(text.startswith(f"(enable_thinking=False)[user]{STATE}\n\n") for text in engine.asked)
    assert "A. billing: money\nB. true\nC. true\n" in engine.asked[1]
    assert "0. calm: polite\n1. cross\n" in engine.asked[2]


@covers("POST /v1/systemone")
@covers("StateRequest", "state", "questions")
@covers("StateQuestion", "type", "instructions", "criteria")
def test_system_one_answers_by_name(client: TestClient, engine: Decider) -> None:
    questions = {
        "double": {"type": "noul", "criteria": {"true": "two charges", "false": "one"}},
        "team": {"type": "choice", "instructions": "Which team?", "criteria": {"billing": None, "other": {"id": 7}}},
        "anger": {"type": "score", "instructions": ["How", "angry"], "criteria": ["calm", "cross", {"level": "mad"}]},
    }
    body = post(client, "/v1/systemone", state={"mail": STATE}, questions=questions)
    answers = body["answers"]
    shares, mass = engine.shares(0, ["yes", "no"])
    assert answers["double"] == {"type": "noul", "noul": near(shares[0]), "label_mass": near(mass)}
    shares, mass = engine.shares(1, "AB")
    assert answers["team"] == {
        "type": "choice", "choice": ["billing", "other"][int(np.argmax(shares))],
        "probabilities": near(dict(zip(["billing", "other"], shares, strict=True))),
        "confidence": near(shares.max() * mass), "label_mass": near(mass),
    }  # fmt: skip
    shares, mass = engine.shares(2, "012")
    assert answers["anger"]["legend"] == {"0": "calm", "1": "cross", "2": {"level": "mad"}}
    assert answers["anger"]["score"] == near(float(shares @ [0, 1, 2]))
    assert answers["anger"]["probabilities"] == near(dict(zip("012", shares, strict=True)))
    assert body["usage"]["total_tokens"] == sum(len(prompt) for prompt, _, _ in engine.pooled)
    assert 'user]{"mail": "I was charged twice."}\n\n' in engine.asked[0]
    assert "yes: two charges\nno: one\n" in engine.asked[0]
    assert 'B. other: {"id": 7}\n' in engine.asked[1] and '["How", "angry"]\n\n0. calm' in engine.asked[2]


def test_items_are_a_conversation_and_json_is_text(client: TestClient, engine: Decider) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_json", "data": {"a": 1}}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]
    asked = PREDICATE | {"instructions": [{"type": "input_text", "text": "Wet?"}, {"type": "input_json", "data": [{}]}]}
    post(client, "/v1/decisions", input=items, questions=[asked])
    assert '[system]Be brief.[user]Hi\n{"a": 1}[assistant]{"name": "look", "arguments": {}}[user]' in engine.asked[0]
    assert "Result of look: rain\nWet?\n[{}]\n\nAnswer with" in engine.asked[0]
    post(client, "/v1/decisions", input=items[:2], questions=[PREDICATE])
    assert '{"a": 1}\n\nIt was charged twice.\n\nAnswer with "yes"' in engine.asked[1]


@covers("DecisionRequest", "prompt_cache_key")
def test_a_key_and_a_salt_part_the_prefix_cache(client: TestClient, engine: Decider) -> None:
    for given in ({}, {"prompt_cache_key": "k"}, {"cache_salt": "s"}, {"prompt_cache_key": "k", "cache_salt": "s"}):
        post(client, "/v1/decisions", input="Hi", questions=[PREDICATE], priority=3, **given)
    assert [labels["cache_salt"] for _, _, labels in engine.pooled] == [None, "k", "s", "s\nk"]
    assert {labels["priority"] for _, _, labels in engine.pooled} == {3}


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        ("{{ messages[0].content }}[assistant]{# <think> </think> #}<think>{{ '\n' }}",
         "[assistant]<think>\n</think>\n\n"),
        ("{{ messages[0].content }}[assistant]{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
         "[assistant]<think>\n\n</think>\n\n"),
        ("{{ messages[0].content }}<|start|>assistant{# <|channel|>analysis #}",
         "<|start|>assistant<|channel|>final<|message|>"),
    ],
)  # fmt: skip
def test_the_label_stands_where_the_answer_begins_without_thinking(
    make_client: Any, template: str, ending: str
) -> None:
    engine = Decider(template)
    post(make_client(engine), "/v1/decisions", input="Hi", questions=[CHOICE])
    assert engine.asked[0].endswith(NOTHING_ELSE + ending)


def test_more_than_26_choices_need_pairs_of_letters(client: TestClient, engine: Decider) -> None:
    many = {"type": "choice", "instructions": "Which?", "choices": [{"value": str(n)} for n in range(30)]}
    param, message = refused(client, "/v1/decisions", input="Hi", questions=[PREDICATE, many])
    assert param == "questions[1]"
    assert "questions[1] needs 30 labels of one token each, of which this model's tokenizer has 26" in message
    engine.tokenizer.backend.add_tokens(["AC", "AF", "BA", "ZZ"])
    post(client, "/v1/decisions", input="Hi", questions=[many])
    assert "\nZ. 25\nAC. 26\nAF. 27\nBA. 28\nZZ. 29\n" in engine.asked[0]


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"questions": []}, "questions", "at least 1"),
        ({"questions": [PREDICATE] * 401}, "questions", "at most 400"),
        ({"questions": [PREDICATE | {"type": "essay"}]}, "questions[0].type", "'predicate', 'choice' or 'score'"),
        ({"questions": [PREDICATE | {"levels": [{"label": "a"}]}]}, "questions[0].levels", "belongs to type 'score'"),
        ({"questions": [{"type": "choice", "instructions": "?"}]}, "questions[0].choices", "choices is required"),
        ({"questions": [CHOICE | {"choices": CHOICE["choices"][:1]}]}, "questions[0]", "choices has 1 entries"),
        ({"questions": [CHOICE | {"choices": CHOICE["choices"] * 2}]}, "questions[0]", "choices has 'billing' twice"),
        ({"questions": [PREDICATE | {"instructions": ""}]}, "questions[0].instructions", "at least 1"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]", "is an image, which is not available here"),
        ({"input": "word " * 300}, "input", "tokens together; the context holds 1024"),
        ({"questions": [PREDICATE | {"instructions": "word " * 9999}]}, "input", "questions[0] have more than"),
    ],
)  # fmt: skip
def test_a_wrong_decision_is_refused_by_name(client: TestClient, change: dict, param: str, said: str) -> None:
    found, message = refused(client, "/v1/decisions", **({"input": "Hi", "questions": [PREDICATE]} | change))
    assert found == param and said in message, (found, message)


@pytest.mark.parametrize(
    ("question", "param", "said"),
    [
        ({"type": "noul"}, "instructions", "instructions is required where criteria say nothing"),
        ({"type": "noul", "instructions": "?", "criteria": ["a"]}, "criteria", "must be an object, or left out"),
        ({"type": "noul", "criteria": {"maybe": "?"}}, "criteria", '"true" and "false" only'),
        ({"type": "choice", "criteria": {"a": None}}, "criteria", "criteria has 1 entries; it must have from 2 to 255"),
        ({"type": "choice"}, "criteria", "criteria of a choice must be an object"),
        ({"type": "choice", "criteria": {}}, "criteria", "criteria of a choice must be an object"),
        ({"type": "score", "criteria": {"a": None}}, "criteria", "criteria of a score must be a list"),
        ({"type": "score", "criteria": ["a", "a"]}, "criteria", "criteria has 'a' twice"),
    ],
)
def test_a_wrong_question_of_system_one_is_refused_by_name(
    client: TestClient, question: dict, param: str, said: str
) -> None:
    found, message = refused(client, "/v1/systemone", state="Hi", questions={"q": question})
    assert found == f"questions.q.{param}" and said in message, (found, message)


def test_a_model_that_writes_no_text_decides_nothing(make_client: Any) -> None:
    client = make_client(FakeEngine(tasks=ModelTasks(labels=("good", "bad"))))
    assert "it classifies" in refused(client, "/v1/decisions", input="Hi", questions=[PREDICATE])[1]


def test_a_question_that_the_tokenizer_has_no_labels_for_is_named(client: TestClient) -> None:
    many = {"type": "choice", "criteria": {f"{n}": None for n in range(30)}}
    param, message = refused(client, "/v1/systemone", state="Hi", questions={"team": many})
    assert param == "questions.team" and "questions.team needs 30 labels" in message
    asked = {"q": {"type": "noul", "instructions": "?"}}
    assert refused(client, "/v1/systemone", state="word " * 300, questions=asked)[0] == "state"


def test_65_questions_about_a_state_are_too_many(client: TestClient) -> None:
    asked = {"type": "noul", "instructions": "?"}
    param, message = refused(client, "/v1/systemone", state="Hi", questions={str(n): asked for n in range(65)})
    assert param == "questions" and "at most 64" in message
