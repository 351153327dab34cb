"""/decisions, OpenAI's, and /systemone, TypeSafe's: typed questions about an input, answered by probabilities"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, model_validator

from jaxllm.chat.conversation import Message, naming, renaming
from jaxllm.chat.decisions import Decision, Question, prepare
from jaxllm.errors import Field as Place
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.request_model import ModelFields, RequestModel, ScheduledFields, refuse, refusing
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.pooling.inputs import PoolingRun
from jaxllm.serving.pooling.types import PoolingFields
from jaxllm.serving.request_metrics import Usage
from jaxllm.serving.responses.items import MAX_ITEMS, InputText, NewItem, one_of
from jaxllm.serving.responses.objects import ResponseUsage, response_usage
from jaxllm.serving.responses.translate import spoken

MAX_QUESTIONS = 400
"""As at OpenAI."""
MAX_STATE_QUESTIONS = 64

router = APIRouter(route_class=JSONRoute, tags=["decisions"])

Structured = str | dict[str, Any] | list[Any]
"""Text, or JSON that the model is shown as text."""


def _as_text(value: Structured) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json_parts(value: Any) -> Any:
    """A list of parts, or of messages, in which those of type input_json are text."""
    if not isinstance(value, list):
        return value
    found = []
    for part in value:
        match part:
            case {"type": "input_json", "data": dict() | list() as data, **rest} if not rest:
                part = {"type": "input_text", "text": _as_text(data)}
            case {"content": list() as content}:
                part = part | {"content": _json_parts(content)}
        found.append(part)
    return found


class DecisionChoice(RequestModel):
    value: str | bool
    """The answer; a text and a boolean that look alike are two."""
    description: str | None = None
    """Tells the model more of it."""


class DecisionLevel(RequestModel):
    label: str
    """The level's name."""
    description: str | None = None
    """Tells the model more of it."""


class DecisionQuestion(RequestModel):
    """What is asked about the input."""

    type: Literal["predicate", "choice", "score"]
    """predicate: how likely a statement is to be true; choice: which answer fits; score: how far up a scale."""
    instructions: Annotated[
        str | list[Annotated[InputText, one_of("input_text", "input_json")]], BeforeValidator(_json_parts)
    ] = Field(min_length=1)
    """The statement or the question: text, or a list of parts of type input_text and input_json."""
    name: str | None = None
    """Of the question, which its answer repeats."""
    choices: list[DecisionChoice] | None = None
    """Of a choice, 2 to 255; above 26 the tokenizer must have pairs of capital letters as tokens."""
    levels: list[DecisionLevel] | None = None
    """Of a score, 2 to 10 from the lowest on, which are counted from 0."""

    @model_validator(mode="after")
    def _fields_of_type(self) -> DecisionQuestion:
        for name, kind in (("choices", "choice"), ("levels", "score")):
            if bool(getattr(self, name)) != (self.type == kind):
                raise refuse(f"{name} {'is required' if self.type == kind else f'belongs to type {kind!r}'}", name)
        with refusing():
            self.question()
        return self

    def question(self) -> Question:
        given = self.instructions
        text = given if isinstance(given, str) else "\n".join(part.text for part in given)
        if self.type == "choice":
            return Question(text, choices=[(one.value, one.description) for one in self.choices or ()])
        if self.type == "score":
            return Question(text, levels=[(one.label, one.description) for one in self.levels or ()])
        return Question(text)


class DecisionRequest(ModelFields, ScheduledFields):
    path: ClassVar[str] = "/v1/decisions"

    input: Annotated[
        str | Annotated[list[NewItem], Field(min_length=1, max_length=MAX_ITEMS)], BeforeValidator(_json_parts)
    ]
    """What all questions are about: a text, or messages, calls of functions and their outputs as items."""
    questions: list[DecisionQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS)
    """Each is answered by itself."""
    prompt_cache_key: str | None = Field(default=None, min_length=1)
    """Only requests with the same key share cached prefixes."""
    prompt_cache_options: dict[str, str] | None = None
    """Accepted, without effect: prefixes are cached by themselves, for as long as there is room."""
    safety_identifier: str | None = None
    """Accepted, without effect, as OpenAI documents it."""

    def messages(self, special_tokens: Collection[str]) -> list[Message]:
        """Raises InvalidRequestError where calls and their outputs do not belong together."""
        if isinstance(self.input, str):
            return [Message("user", self.input)]
        return [one.message for one in spoken([item.item() for item in self.input], special_tokens)]


class StateQuestion(RequestModel):
    """What is asked about the state."""

    type: Literal["noul", "choice", "score"]
    """noul: is it true; choice: which option fits; score: how far up a scale."""
    instructions: Structured | None = None
    """The question: text, or JSON that is shown as text."""
    criteria: dict[str, Structured | None] | list[Structured] | None = None
    """Of a choice its options, 2 to 255, with descriptions or null; of a score its levels, 2 to 10, from the lowest on;
    of a noul what "true" and "false" mean, which may be left out."""

    @model_validator(mode="after")
    def _criteria_of_type(self) -> StateQuestion:
        given, kind = self.criteria, {"noul": "object, or left out", "choice": "object", "score": "list"}[self.type]
        if isinstance(given, list) != (kind == "list") or (not given and self.type != "noul"):
            raise refuse(f"criteria of a {self.type} must be {'a' if kind == 'list' else 'an'} {kind}", "criteria")
        if self.type == "noul" and isinstance(given, dict) and not given.keys() <= {"true", "false"}:
            raise refuse('criteria of a noul may have "true" and "false" only', "criteria")
        if self.type == "noul" and not (self.instructions or given):
            raise refuse("instructions is required where criteria say nothing", "instructions")
        with refusing("criteria"), naming(renaming({"choices": "criteria", "levels": "criteria"})):
            self.question()
        return self

    def question(self) -> Question:
        text, given = _as_text(self.instructions or "Which is right?"), self.criteria or {}
        if isinstance(given, list):
            return Question(text, levels=[(_as_text(level), None) for level in given])
        told = {name: None if more is None else _as_text(more) for name, more in given.items()}
        if self.type == "choice":
            return Question(text, choices=list(told.items()))
        return Question(text, outcomes={True: told.get("true"), False: told.get("false")})


class StateRequest(ModelFields, ScheduledFields):
    path: ClassVar[str] = "/v1/systemone"

    state: Structured
    """What all questions are about: text, or JSON that is shown as text."""
    questions: dict[str, StateQuestion] = Field(min_length=1, max_length=MAX_STATE_QUESTIONS)
    """By names, which the answers have too."""

    def messages(self, _: Collection[str]) -> list[Message]:
        return [Message("user", _as_text(self.state))]


class OptionProbability(msgspec.Struct):
    value: str | bool | int
    probability: float
    label: str | UnsetType = UNSET
    """Of a score, whose value is the level's number."""


class DecisionAnswer(msgspec.Struct, kw_only=True):
    """A predicate has a probability, the others have an answer, its probability as confidence, and all of them."""

    type: Literal["predicate", "choice", "score"]
    name: str | None
    probability: float | UnsetType = UNSET
    choice: str | bool | UnsetType = UNSET
    score: float | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    probabilities: list[OptionProbability] | UnsetType = UNSET
    label_mass: float


class DecisionResponse(msgspec.Struct):
    model: str
    answers: list[DecisionAnswer]
    usage: ResponseUsage


class StateAnswer(msgspec.Struct, kw_only=True):
    """As vLLM answers: the confidence is the likeliest answer's probability among all tokens."""

    type: Literal["noul", "choice", "score"]
    noul: float | UnsetType = UNSET
    choice: str | UnsetType = UNSET
    score: float | UnsetType = UNSET
    legend: dict[str, Any] | UnsetType = UNSET
    probabilities: dict[str, float] | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    label_mass: float


class StateResponse(msgspec.Struct):
    model: str
    answers: dict[str, StateAnswer]
    usage: ResponseUsage


@router.post("/decisions", responses=returns(DecisionResponse))
async def create_decision(body: DecisionRequest, request: Request) -> Response:
    """Answer questions about an input by the probabilities of their answers."""
    with naming(renaming({"messages": "input"})):
        asked = [one.question() for one in body.questions]
        run, found = await _decide(request, body, asked, body.prompt_cache_key)
    answers = [_answer(one.name, decision) for one, decision in zip(body.questions, found, strict=True)]
    return json_response(DecisionResponse(run.call.name, answers, _usage(run)), request_id=run.id)


@router.post("/systemone", responses=returns(StateResponse))
async def create_state_decision(body: StateRequest, request: Request) -> Response:
    """Answer named questions about a state by the probabilities of their answers; TypeSafe's System One."""
    names = {"messages": "state"} | dict(enumerate(body.questions))
    with naming(lambda place: Place(*(names.get(part, part) for part in place.path))):
        asked = [one.question() for one in body.questions.values()]
        run, found = await _decide(request, body, asked)
    told = zip(body.questions.items(), found, strict=True)
    answers = {name: _state_answer(one, decision) for (name, one), decision in told}
    return json_response(StateResponse(run.call.name, answers, _usage(run)), request_id=run.id)


async def _decide(
    request: Request,
    body: DecisionRequest | StateRequest,
    questions: Sequence[Question],
    cache_key: str | None = None,
) -> tuple[PoolingRun, list[Decision]]:
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    salt = "\n".join(filter(None, (body.cache_salt, cache_key))) or None
    run = PoolingRun(request, call, PoolingFields(priority=body.priority, cache_salt=salt), "decn")
    messages = body.messages(call.model.special_tokens)
    asked = await call.state.offload(prepare, call.model, messages, questions)
    return run, asked.decisions(await run.outputs(asked.prompts, asked.pooling))


def _usage(run: PoolingRun) -> ResponseUsage:
    used = run.usage()
    return response_usage(Usage(used.prompt_tokens, cached_tokens=used.prompt_tokens_details.cached_tokens))


def _answer(name: str | None, decision: Decision) -> DecisionAnswer:
    kind, told = decision.question.kind, decision.probabilities.items()
    answer = DecisionAnswer(type=kind, name=name, label_mass=decision.label_mass)
    if kind == "predicate":
        answer.probability = decision.probability
        return answer
    answer.confidence = decision.probability
    if kind == "choice":
        answer.choice = decision.answer
        answer.probabilities = [OptionProbability(value, share) for value, share in told]
    else:
        answer.score = decision.score
        answer.probabilities = [OptionProbability(at, share, str(level)) for at, (level, share) in enumerate(told)]
    return answer


def _state_answer(asked: StateQuestion, decision: Decision) -> StateAnswer:
    answer = StateAnswer(type=asked.type, label_mass=decision.label_mass)
    if asked.type == "noul":
        answer.noul = decision.probability
        return answer
    answer.confidence = decision.probability * decision.label_mass
    if asked.type == "choice":
        answer.choice = str(decision.answer)
    else:
        answer.score, answer.legend = decision.score, {str(at): text for at, text in enumerate(asked.criteria or ())}
    names = asked.criteria if isinstance(asked.criteria, dict) else answer.legend or ()
    answer.probabilities = dict(zip(names, decision.probabilities.values(), strict=True))
    return answer
