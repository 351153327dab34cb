"""llama-server's own routes: completions in its form, infilling, vectors, slots, and the control of running answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag

from jaxllm.chat.constraint import compiled
from jaxllm.chat.parser import Step
from jaxllm.chat.prompt import Prompt
from jaxllm.engine.messages import TokenDelta
from jaxllm.errors import Field as Place
from jaxllm.requests.outputs import Logprob
from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.call import ClientCall, chunk_stream, open_call
from jaxllm.serving.dialects import llama_cpp_requests as bodies
from jaxllm.serving.generation import Choice, Generation, collect_for
from jaxllm.serving.http.answers import ErrorResponse, ignored_fields, json_response, returns
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.request_model import ModelFields
from jaxllm.serving.http.route import ChunkWriter, JSONRoute
from jaxllm.serving.openai.answers import Timings, finite, timings
from jaxllm.serving.openai.chat import rendered
from jaxllm.serving.openai.chat_types import ChatRequest
from jaxllm.serving.openai.completions import CompletionRequest, create_completion
from jaxllm.serving.pooling.inputs import PoolingRun
from jaxllm.serving.pooling.routes import embed
from jaxllm.serving.pooling.types import MAX_INPUTS, EmbeddingRequest
from jaxllm.serving.responses.objects import InputTokens
from jaxllm.serving.state import ModelName, ServerState
from jaxllm.wording import shown

NO_SLOT = -1
"""Slots have no numbers that last: any request finds what others have computed."""
SHOWN_PARAMS = (
    "max_tokens", "seed", "temperature", "top_k", "top_p", "min_p", "repeat_last_n", "presence_penalty",
    "frequency_penalty", "ignore_eos",
)  # fmt: skip
"""Of an answer's sampling parameters, those that its generation_settings show by the same names."""


router = APIRouter(route_class=JSONRoute, tags=["llama.cpp"])
native_router = APIRouter(route_class=JSONRoute, tags=["llama.cpp"])
"""What has no path that begins with /v1."""


class TokenProbability(msgspec.Struct, kw_only=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TokenProbability] | UnsetType = UNSET
    """Of a token that was chosen: the likeliest ones at its place."""


class NativeCompletion(msgspec.Struct, kw_only=True):
    """What a choice has gained in a stream, or a whole answer; the last event of a stream has all but its text.

    `tokens_cached` counts the prompt's tokens that earlier requests had computed. `timings` are those of the whole
    request, whatever the number of its answers.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int = NO_SLOT
    stop: bool = False
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | UnsetType = UNSET
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "word", "limit"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    """In the first event of a stream."""


SomeFields = dict[str, Any]
"""Those that response_fields names."""
ANSWERS = returns(
    NativeCompletion, list[NativeCompletion], SomeFields, list[SomeFields],
    events=(NativeCompletion, SomeFields, ErrorResponse),  # type: ignore[arg-type]
)  # fmt: skip


@native_router.post("/completion", responses=ANSWERS)
async def complete(body: bodies.NativeCompletionRequest, request: Request) -> Response:
    """Continue one or several prompts, in llama.cpp's form. /completions is the same for a body with a field that only
    llama.cpp has, as n_predict."""
    return await _answer(body, request)


@native_router.post("/infill", responses=ANSWERS)
async def infill(body: bodies.InfillRequest, request: Request) -> Response:
    """Write what stands between two texts, for models that fill in the middle."""
    return await _answer(body, request)


OWN_FIELDS = {*bodies.NativeCompletionRequest.field_names(), *bodies.NEUTRAL, *bodies.WITHOUT_EFFECT} - {
    *CompletionRequest.field_names()
}


def _kind(body: Any) -> str:
    is_openai = OWN_FIELDS.isdisjoint(body) if isinstance(body, dict) else isinstance(body, CompletionRequest)
    return "openai" if is_openai else "llama.cpp"


@native_router.post("/completions", include_in_schema=False)
async def complete_either(
    body: Annotated[
        Annotated[bodies.NativeCompletionRequest, Tag("llama.cpp")] | Annotated[CompletionRequest, Tag("openai")],
        Discriminator(_kind),
    ],
    request: Request,
) -> Response:
    """Continue prompts in llama.cpp's form or in OpenAI's, whichever the body's fields are."""
    if isinstance(body, CompletionRequest):
        return await create_completion(body, request)
    return await complete(body, request)


async def _answer(body: bodies.NativeFields, request: Request) -> Response:
    call = await open_call(request, body.model, keep_alive=body.keep_alive, stream=body.stream)
    state, model, field = call.state, call.model, body.constraint_field
    model.check_accepting()
    settings = await state.offload(body.generation_settings, model)
    if field is not None:
        await state.offload_grammar(lambda: compiled(body.constraint(), Place(field)))
    prompts = await state.offload(bodies.prepared, model, body, settings)
    generation = bodies.NativeGeneration(
        call, prompts, settings, "cmpl-", prompt_only=body.n_predict == 0, indent=body.n_indent,
        milliseconds=body.t_max_predict_ms,
    )  # fmt: skip
    writer = NativeWriter(body, generation, call)
    if body.stream:
        return await chunk_stream(call, generation, writer)
    choices = await collect_for(request, generation)
    answers = await state.offload(lambda: [writer.whole(choice) for choice in choices])
    if body.response_fields is not None:
        warnings = {"warnings": ignored_fields.get()} if ignored_fields.get() else {}
        found = [_only(body.response_fields, answer) | warnings for answer in answers]
        content = msgspec.json.encode(found[0] if len(found) == 1 else found)
        return Response(content, media_type="application/json", headers={"X-Request-Id": generation.id})
    return json_response(answers[0] if len(answers) == 1 else answers, request_id=generation.id)


class NativeWriter(ChunkWriter[TokenDelta]):
    """Whole answers, or the events of a stream, of which a choice's last tells everything but its text."""

    done = b""

    def __init__(self, body: bodies.NativeFields, generation: Generation, call: ClientCall):
        self._body, self._generation, self._call = body, generation, call
        self._choices = [Choice(index) for index in range(generation.num_choices)]
        self._sent = [0] * generation.num_choices
        self._warnings = ignored_fields.get() or UNSET

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[Any]:
        """What has no text yet waits for the event that shows it."""
        choice, first = self._choices[index], self._sent[index]
        choice.add(delta)
        new = choice.token_ids[first:]
        if delta.text or (new and delta.finish_reason is not None):
            self._sent[index] = len(choice.token_ids)
            chunk = self._gained(choice, delta.text, new, choice.logprobs[first:])
            chunk.warnings, self._warnings = self._warnings, UNSET
            yield chunk
        if delta.finish_reason is not None:
            answer = self._ended(choice, "", [], None)
            yield answer if self._body.response_fields is None else _only(self._body.response_fields, answer)

    def whole(self, choice: Choice) -> NativeCompletion:
        return self._ended(choice, choice.text, choice.token_ids if self._body.return_tokens else [], choice.logprobs)

    def _ended(self, choice: Choice, text: str, tokens: list[int], steps: Sequence[Step] | None) -> NativeCompletion:
        prompt = self._prompt(choice.index)
        answer = self._gained(choice, text, tokens, steps)
        answer.stop, answer.model, answer.timings = True, self._call.name, self._timings()
        answer.generation_settings, answer.prompt = self._settings(prompt), prompt.text
        answer.has_new_line, answer.truncated = "\n" in choice.text, False
        answer.stopping_word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        answer.stop_type = "limit"
        if choice.finish_reason == "stop":
            answer.stop_type = "word" if answer.stopping_word else "eos"
        answer.tokens_cached = choice.deltas[0].num_cached_tokens
        return answer

    def _gained(self, choice: Choice, text: str, tokens: list[int], steps: Sequence[Step] | None) -> NativeCompletion:
        return NativeCompletion(
            index=choice.index,
            content=text,
            tokens=tokens,
            tokens_predicted=len(choice.token_ids),
            tokens_evaluated=len(self._prompt(choice.index).token_ids),
            timings=self._timings() if self._body.timings_per_token else UNSET,
            completion_probabilities=UNSET if steps is None or not self._body.n_probs else self._probabilities(steps),
        )

    def _prompt(self, index: int) -> Prompt:
        return self._generation.prompts[index // self._body.n_cmpl]

    def _timings(self) -> Timings:
        return timings(self._generation.usage(), self._generation.phases())

    def _settings(self, prompt: Prompt) -> dict[str, Any]:
        """What the answer was generated with, in llama.cpp's words."""
        body, params = self._body, prompt.params
        return {
            **{name: getattr(params, name) for name in SHOWN_PARAMS},
            **{name: getattr(body, name) for name in ("n_predict", "stream", "n_probs", "timings_per_token")},
            "n_ctx": self._call.model.engine.info.max_model_len,
            "repeat_penalty": params.repetition_penalty,
            "stop": list(params.stop),
            "grammar": body.grammar or "",
            "logit_bias": [{"bias": bias, "token": token} for token, bias in params.logit_bias.items()],
            "lora": [one.model_dump() for one in body.lora or ()],
        }

    def _probabilities(self, steps: Sequence[Step]) -> list[TokenProbability]:
        def entry(token: int, value: Logprob) -> TokenProbability:
            raw = self._call.model.token_bytes(token)
            text, logprob = raw.decode(errors="replace"), finite(value.logprob)
            return TokenProbability(id=token, token=text, bytes=list(raw), logprob=logprob)

        found = []
        for step in steps:
            best = sorted(dict(step).items(), key=lambda one: -one[1].logprob)[: self._body.n_probs]
            found.append(entry(*step[0]))
            found[-1].top_logprobs = [entry(*one) for one in best]
        return found


def _only(fields: Sequence[str], answer: msgspec.Struct) -> dict[str, Any]:
    """{"a": 1, "b": {"c": 2}} with ["a", "b/c", "d"] -> {"a": 1, "c": 2}"""
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = msgspec.to_builtins(answer)
        for part in (parts := path.split("/")):
            value = value.get(part, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            found[parts[-1]] = value
    return found


class NativeEmbeddingRequest(ModelFields):
    content: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
    """A text, or a list of them."""
    embd_normalize: Literal[-1, 2] = 2
    """2 scales vectors to unit length, and -1 leaves them as they are."""


class NativeEmbedding(msgspec.Struct):
    index: int
    embedding: list[list[float]]


class _OfContent(EmbeddingRequest):
    called: ClassVar = {"input": "content"}


@native_router.post("/embedding", responses=returns(list[NativeEmbedding]))
async def embedding(body: NativeEmbeddingRequest, request: Request) -> Response:
    """A vector for each text, in llama.cpp's form; /embeddings is as /v1/embeddings."""
    asked = _OfContent(input=body.content, normalize=body.embd_normalize == 2)
    run = PoolingRun(request, await open_call(request, body.model), asked, "embd")
    vectors = await embed(run, asked)
    return json_response([NativeEmbedding(i, [vector.tolist()]) for i, vector in enumerate(vectors)], request_id=run.id)


class NextToken(msgspec.Struct, kw_only=True):
    has_next_token: bool = True
    n_remain: int
    n_decoded: int


class Slot(msgspec.Struct, kw_only=True):
    """A place for a sequence. Idle ones have only the first four fields."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    next_token: list[NextToken] | UnsetType = UNSET


@native_router.get("/slots", responses=returns(list[Slot]))
async def slots(
    request: Request,
    model: ModelName = None,
    fail_on_no_slot: Annotated[str | None, Query(description="Answer with 503 if all are in use.")] = None,
) -> Response:
    """The sequences that run or wait, and as many idle places as are left; nothing of what they say."""
    state: ServerState = request.app.state.server
    served = state.registry.find_loaded(model, tenant_of(request))
    info, drafts = served.engine.info, served.config.speculative_config is not None
    running = [one for run in served.running if isinstance(run, Generation) for one in run.progress()]
    if fail_on_no_slot and len(running) >= info.max_num_seqs:
        raise unavailable("all slots are in use", code="no_slot")
    found = [
        Slot(id=number, n_ctx=info.max_model_len, speculative=drafts, is_processing=number < len(running))
        for number in range(max(info.max_num_seqs, len(running)))
    ]
    for slot, one in zip(found, running, strict=False):
        slot.n_prompt_tokens, slot.n_prompt_tokens_cache, generated, most = one
        slot.next_token = [NextToken(n_remain=most - generated, n_decoded=generated)]
    return json_response(found)


@native_router.post("/slots/{id_slot}", include_in_schema=False)
async def change_slot(
    request: Request, id_slot: int, action: Annotated[str, Query(description="save, restore or erase.")]
) -> Response:
    """Refused with 501: prompts are found by what they say, in whichever slot they were computed."""
    instead = {"erase": "POST /reset_prefix_cache empties the cache"}
    hint = instead.get(action, "kv_offload_dir keeps prompts on disk, and finds them by what they say")
    message = f"action is {shown(action)}; slots of this server cannot be saved, restored or erased: {hint}"
    raise APIError(501, message, type="not_supported_error", param="action")


@router.post("/chat/completions/input_tokens", responses=returns(InputTokens))
async def count_input_tokens(body: ChatRequest, request: Request) -> Response:
    """The number of tokens that the prompt of a chat would have."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    return json_response(InputTokens(len((await rendered(call, body)).token_ids)))


class ControlRequest(ModelFields):
    id: str = Field(max_length=256)
    """The id of a chat completion, as its answer has it, that was sent with `reasoning_control`."""
    action: Literal["reasoning_end"]
    """End its reasoning, so that the answer follows."""


class Controlled(msgspec.Struct, kw_only=True):
    success: bool
    message: str | UnsetType = UNSET


@router.post("/chat/completions/control", responses=returns(Controlled))
async def control(body: ControlRequest, request: Request) -> Response:
    """End the reasoning of an answer under way, of the same API key."""
    state: ServerState = request.app.state.server
    running = state.registry.find_loaded(body.model, tenant_of(request)).running
    found = next((run for run in running if isinstance(run, Generation) and run.id == body.id), None)
    if found is None or found.tenant.name != tenant_of(request).name:
        return json_response(Controlled(success=False, message="no active completion for this id"))
    if all(prompt.params.max_thinking_tokens is None for prompt in found.prompts):
        return json_response(Controlled(success=False, message="it was not sent with reasoning_control"))
    await asyncio.to_thread(found.end_thinking)
    return json_response(Controlled(success=True))
