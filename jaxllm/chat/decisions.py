"""Decisions: questions about a text, each answered by the probabilities of labels that are one token each.

A question becomes a prompt: the text that all of them share, then the question with its options, each under a label.
Nothing is generated. The probabilities of the labels' tokens at the answer's first place, divided by their sum, are
those of the options; the sum is the label mass, which tells how far the model has understood what it may answer.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, product
from typing import Literal

import numpy as np

from jaxllm.chat.conversation import Conversation, Message, Rendering, thinking_variables
from jaxllm.chat.prompt import ChatModel, Rendered, render
from jaxllm.engine.doors.sequences import refuse_text
from jaxllm.errors import ContextLengthError, Field, InvalidRequestError
from jaxllm.requests.outputs import PooledOutput, PoolingParams
from jaxllm.text.reasoning import opens_reasoning
from jaxllm.wording import shown

Kind = Literal["predicate", "choice", "score"]
Value = str | bool
Answers = Sequence[Value | tuple[Value, str | None]]

MAX_CHOICES = 255
MAX_LEVELS = 10
TAIL = 32
"""Characters at a prompt's end that decide how a label after them is tokenized."""
LETTERS = string.ascii_uppercase
LABELS: Mapping[Kind, Sequence[Sequence[str]]] = {
    "predicate": (("Yes", "No"), ("yes", "no")),
    "choice": ((*LETTERS, *map("".join, product(LETTERS, repeat=2))),),
    "score": (string.digits,),
}
"""By kind, the first of which the tokenizer has enough."""
ENDINGS: Mapping[Kind, str] = {
    "predicate": 'Answer with "{0}" if that is true and with "{1}" if it is not, and with nothing else.',
    "choice": "Answer with the label of the option that fits best, and with nothing else.",
    "score": "These levels go up in order. Answer with the number of the one that fits best, and with nothing else.",
}


@dataclass(frozen=True)
class Question:
    """What is asked about a text: with `choices` which of them fits, with `levels` how far up, else if it is true.

    Attributes:
        instructions: the question, or the statement to judge.
        choices: 2 to 255 different answers, each by itself or with a description: `["other", ("refund", "of money")]`.
        levels: 2 to 10 different steps from the lowest on, likewise.
        outcomes: what it means that the statement is true, and that it is not: `{True: …, False: …}`.

    Raises InvalidRequestError: there are too few or too many answers, or two alike; `param` names the field.
    """

    instructions: str
    choices: Answers | None = None
    levels: Answers | None = None
    outcomes: Mapping[bool, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        both = [name for name in ("levels", "choices", "outcomes") if getattr(self, name) not in (None, {})]
        if len(both) > 1:
            first, second, *_ = map(Field, both)
            raise InvalidRequestError([first, " and ", second, " are both given; give one of them"])
        if wrong := self.outcomes.keys() - {True, False}:
            raise InvalidRequestError([Field("outcomes"), f" has {shown(wrong.pop())}; its keys are True and False"])
        name, most = ("choices", MAX_CHOICES) if self.kind == "choice" else ("levels", MAX_LEVELS)
        given = self.values
        if not 2 <= len(given) <= most:
            raise InvalidRequestError([Field(name), f" has {len(given)} entries; it must have from 2 to {most}"])
        again = next((value for at, value in enumerate(given) if value in given[:at]), None)
        if again is not None:
            raise InvalidRequestError([Field(name), f" has {shown(again)} twice; all must differ"])

    @property
    def kind(self) -> Kind:
        return "choice" if self.choices is not None else "score" if self.levels is not None else "predicate"

    @property
    def options(self) -> list[tuple[Value, str | None]]:
        """The answers that it may have, with what is told of them."""
        if self.kind == "predicate":
            return [(value, self.outcomes.get(value)) for value in (True, False)]
        return [one if isinstance(one, tuple) else (one, None) for one in self.choices or self.levels or ()]

    @property
    def values(self) -> list[Value]:
        return [value for value, _ in self.options]

    def text(self, labels: Sequence[str]) -> str:
        """The question as the model reads it, its options under these labels."""
        lines = []
        for label, (value, more) in zip(labels, self.options, strict=True):
            if self.kind != "predicate":
                label += f". {value if isinstance(value, str) else str(value).lower()}"
            if more or self.kind != "predicate":
                lines.append(f"{label}: {more}" if more else label)
        parts = self.instructions, "\n".join(lines), ENDINGS[self.kind].format(*labels)
        return "\n\n".join(filter(None, parts))


@dataclass(frozen=True)
class Decision:
    """The answer to one question.

    Attributes:
        probabilities: of the answers that it may have, by the answer and in the question's order; they add up to 1.
        label_mass: the probability that the model answers with any of the labels at all.
        num_cached_tokens: tokens of its prompt that another request had computed already.
    """

    question: Question
    probabilities: dict[Value, float]
    label_mass: float
    num_cached_tokens: int = 0

    @property
    def answer(self) -> Value:
        """The likeliest; of a statement, whether it is true."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    @property
    def probability(self) -> float:
        """Of the likeliest answer; of a statement, that it is true."""
        return self.probabilities[True if self.question.kind == "predicate" else self.answer]

    @property
    def score(self) -> float:
        """The expected level, where the lowest is 0."""
        return sum(at * share for at, share in enumerate(self.probabilities.values()))


@dataclass(frozen=True)
class Asked:
    """Questions ready to run: a prompt for each, and the tokens of its labels."""

    questions: Sequence[Question]
    prompts: list[list[int]]
    labels: list[list[int]]

    @property
    def pooling(self) -> PoolingParams:
        """What is read after each prompt: the same of all, the labels of every question."""
        return PoolingParams(kind="logprobs", token_ids=tuple(sorted(set().union(*self.labels))))

    def decisions(self, found: Iterable[PooledOutput]) -> list[Decision]:
        """The answers, from what `pooling` has found after each prompt."""
        column = {token: at for at, token in enumerate(self.pooling.token_ids)}
        decisions = []
        for question, labels, output in zip(self.questions, self.labels, found, strict=True):
            logprobs = output.values[[column[token] for token in labels]].astype(np.float64)
            weights = np.exp(logprobs - np.max(logprobs))
            shares = dict(zip(question.values, (weights / weights.sum()).tolist(), strict=True))
            mass = min(float(np.exp(logprobs).sum()), 1.0)
            decisions.append(Decision(question, shares, mass, output.num_cached_tokens))
        return decisions


def prepare(model: ChatModel, messages: Sequence[Message], questions: Sequence[Question]) -> Asked:
    """A prompt for each question about a conversation, whose last user's message it becomes part of.

    Raises InvalidRequestError: the model writes no text, its tokenizer has too few labels, or a prompt is too long.
    """
    refuse_text(model.engine.info.tasks)
    Conversation(messages=list(messages)).refuse_images()
    context = model.engine.info.max_model_len
    probe = _rendered(model, [Message("user", "?")])
    opening = answer_opening(probe)
    label_token = _label_tokens(model, (probe.text + opening)[-TAIL:])
    prompts, tokens = [], []
    for at, question in enumerate(questions):
        count = len(question.values)
        for spellings in LABELS[question.kind]:
            known = ((label, label_token(label)) for label in spellings)
            labels = dict(islice(((label, token) for label, token in known if token is not None), count))
            if len(labels) == count:
                break
        else:
            problem = f" needs {count} labels of one token each, of which this model's tokenizer has {len(labels)}"
            raise InvalidRequestError([Field("questions", at), problem])
        try:
            rendered = _rendered(model, _with_question(messages, question.text(list(labels))))
            ids = model.tokenizer.encode(rendered.text + opening, False) if opening else rendered.token_ids
        except ContextLengthError:  # which is raised before so long a text is all read
            ids = []
        if not 0 < len(ids) <= context:
            problem = f" have {len(ids) or f'more than {context}'} tokens together; the context holds {context}"
            raise ContextLengthError([Field("messages"), " and ", Field("questions", at), problem])
        prompts.append(ids)
        tokens.append(list(labels.values()))
    return Asked(questions, prompts, tokens)


def answer_opening(rendered: Rendered) -> str:
    """What stands between a prompt and the answer's text if the model does not think, such as a closing mark."""
    reasoning = rendered.formats.reasoning
    if reasoning is None:
        return "all\n" if rendered.formats.channels else ""  # functionary's, which has no reasoning
    closes = opens_reasoning(reasoning, rendered.text)
    return (reasoning.close + reasoning.behind if closes else "") + reasoning.answer


def _label_tokens(model: ChatModel, tail: str) -> Callable[[str], int | None]:
    """The token of a label after a prompt that ends with `tail`; None where it is no single one."""
    encode = model.tokenizer.encode
    start = encode(tail, False)

    @cache
    def token(label: str) -> int | None:
        *before, last = encode(tail + label, False)
        return last if before == start else None

    return token


def _rendered(model: ChatModel, messages: list[Message]) -> Rendered:
    return render(model, Conversation(messages=messages, rendering=Rendering(variables=thinking_variables(False))))


def _with_question(messages: Sequence[Message], text: str) -> list[Message]:
    """The question after the last user's words, in one message, as many templates want roles to alternate."""
    if not messages or messages[-1].role != "user":
        return [*messages, Message("user", text)]
    last = messages[-1]
    both = f"{last.text}\n\n{text}"
    given = None if last.given is None else {**last.given, "content": both}
    return [*messages[:-1], replace(last, text=both, given=given)]
