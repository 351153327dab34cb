"""Decisions of a real model's first layers: `LLM.decide` against `LLM.score`, alone and among other requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, Decision, InvalidRequestError, PoolingParams, Question, SamplingParams, cpu_kernels
from jaxllm.chat.conversation import Message
from jaxllm.chat.decisions import Asked, prepare
from jaxllm.chat.prompt import ChatModel
from tests.support.real_models import first_layers
from tests.test_same_answer import FIELDS

TEXT = "I was charged twice for the same order, and nobody answers my mails. " * 12
QUESTIONS = [
    Question("The customer has paid more than once."),
    Question("Is it about a bill?", outcomes={True: "a bill is named", False: "none is"}),
    Question("Which team is it for?", choices=[("billing", "payments and refunds"), "shipping", True]),
    Question("How angry is the customer?", levels=["calm", ("cross", "complains"), "furious"]),
    Question("Which number is it?", choices=[f"number {n}" for n in range(60)]),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = first_layers("smollm2-135m", 4, tmp_path_factory.mktemp("decisions"))
    with LLM(model, **FIELDS | {"decode_steps": 1}) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Decision]:
    """Each question by itself, on an engine that does nothing else and has no prefix of it."""
    found = []
    for question in QUESTIONS:
        llm.reset_prefix_cache()
        found += llm.decide(TEXT, [question], use_tqdm=False)
    return found


def asked(llm: LLM) -> Asked:
    return prepare(ChatModel(llm), [Message("user", TEXT)], QUESTIONS)


def same(found: list[Decision], expected: list[Decision]) -> bool:
    return [(one.probabilities, one.label_mass) for one in found] == [
        (one.probabilities, one.label_mass) for one in expected
    ]


def test_probabilities_are_those_of_scored_labels(llm: LLM, alone: list[Decision]) -> None:
    for prompt, labels, decision in zip(*(lambda a: (a.prompts, a.labels))(asked(llm)), alone, strict=True):
        scored = llm.score([prompt] * len(labels), [[label] for label in labels], use_tqdm=False)
        weights = np.exp([one.total for one in scored])
        np.testing.assert_allclose(list(decision.probabilities.values()), weights / weights.sum(), rtol=1e-6)
        assert decision.label_mass == pytest.approx(weights.sum(), rel=1e-6)
        assert 0 < decision.label_mass <= 1 and sum(decision.probabilities.values()) == pytest.approx(1)


@pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")
def test_probabilities_repeat_to_the_bit_in_a_busy_batch(llm: LLM, alone: list[Decision]) -> None:
    llm.reset_prefix_cache()
    busy = threading.Thread(
        target=llm.generate,
        args=([[at, 7, 9] for at in range(3, 15)], SamplingParams(max_tokens=60, ignore_eos=True), False),
    )
    busy.start()
    together = llm.decide(TEXT, [*QUESTIONS, *QUESTIONS[::-1]], use_tqdm=False)
    busy.join()
    assert same(together, [*alone, *alone[::-1]])
    assert same(llm.decide(TEXT, QUESTIONS, use_tqdm=False), alone)


def test_the_text_that_questions_share_is_computed_once(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first, *others = llm.decide(TEXT, QUESTIONS, use_tqdm=False)
    shared = len(llm.get_tokenizer().encode(TEXT))
    assert first.num_cached_tokens == 0
    assert all(one.num_cached_tokens > shared - 2 * llm.info.page_size for one in others)


def test_each_question_is_asked_in_the_chat_template_after_the_text(llm: LLM) -> None:
    texts = [llm.get_tokenizer().decode(ids, False) for ids in asked(llm).prompts]
    assert all(text.endswith("nothing else.<|im_end|>\n<|im_start|>assistant\n") for text in texts)
    for question, text in zip(QUESTIONS, texts, strict=True):
        assert f"<|im_start|>user\n{TEXT}\n\n{question.instructions}\n\n" in text
    assert "\n\nYes: a bill is named\nNo: none is\n\nAnswer with" in texts[1]
    assert "\n\nA. billing: payments and refunds\nB. shipping\nC. true\n\n" in texts[2]
    assert "\n\n0. calm\n1. cross: complains\n2. furious\n\n" in texts[3]
    labels = [llm.get_tokenizer().decode([label], False) for label in asked(llm).labels[4]]
    assert labels[:26] == list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert all(len(label) == 2 and label.isupper() for label in labels[26:]) and len(set(labels)) == 60


def test_a_conversation_is_asked_about_as_it_is(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    [decision] = llm.decide(messages, [QUESTIONS[0]], use_tqdm=False)
    assert decision.answer in (True, False)
    prompt = prepare(ChatModel(llm), [Message(m["role"], m["content"]) for m in messages], QUESTIONS[:1]).prompts[0]
    text = llm.get_tokenizer().decode(prompt, False)
    assert "Hello!<|im_end|>\n<|im_start|>user\nThe customer has paid" in text
    assert llm.decide("Hi", [], use_tqdm=False) == []


def test_answers_and_scores_are_read_off_the_probabilities() -> None:
    choice = Decision(Question("?", choices=["a", True]), {"a": 0.25, True: 0.75}, 1.0)
    assert (choice.answer, choice.probability) == (True, 0.75)
    level = Decision(Question("?", levels=["a", "b", "c"]), {"a": 0.25, "b": 0.25, "c": 0.5}, 1.0)
    assert (level.answer, level.score) == ("c", 1.25)
    assert Decision(Question("?"), {True: 0.25, False: 0.75}, 1.0).probability == 0.25


def test_log_probabilities_of_chosen_tokens_are_those_of_the_whole_distribution(llm: LLM) -> None:
    ids = tuple(range(100, 300))  # more than one row of a step has
    [logits] = llm.pool([[5, 6, 7]], PoolingParams(kind="logits", token_ids=ids), use_tqdm=False)
    [found] = llm.pool([[5, 6, 7]], PoolingParams(kind="logprobs", token_ids=ids), use_tqdm=False)
    scored = llm.score([[5, 6, 7]] * 2, [[100], [299]], use_tqdm=False)
    assert [found.values[0], found.values[-1]] == [one.logprobs[0] for one in scored]
    np.testing.assert_allclose(np.diff(found.values), np.diff(logits.values), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"choices": ["a"]}, "choices has 1 entries; it must have from 2 to 255"),
        ({"choices": [str(n) for n in range(256)]}, "choices has 256 entries"),
        ({"levels": [str(n) for n in range(11)]}, "levels has 11 entries; it must have from 2 to 10"),
        ({"levels": ["a", "b", "a"]}, "levels has 'a' twice; all must differ"),
        ({"choices": ["a", "b"], "levels": ["a", "b"]}, "levels and choices are both given"),
        ({"choices": []}, "choices has 0 entries; it must have from 2 to 255"),
        ({"choices": ["a", "b"], "outcomes": {True: "?"}}, "choices and outcomes are both given; give one of them"),
        ({"outcomes": {"yes": "?"}}, "outcomes has 'yes'; its keys are True and False"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(fields: dict, said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        Question("Which?", **fields)
    assert said in str(error.value)


def test_a_text_that_leaves_no_room_is_refused_by_name(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages and questions\[0\] have \d+ tokens together; the context"):
        llm.decide("word " * 1010, QUESTIONS[:1], use_tqdm=False)
