"""/completions"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from jaxllm.chat.answer import Step
from jaxllm.chat.constraint import compiled, with_completion_markers
from jaxllm.chat.prompt import Prompt, fitted, sampling_params
from jaxllm.config.server import ServerConfig
from jaxllm.engine.messages import TokenDelta
from jaxllm.errors import Field
from jaxllm.requests.outputs import PromptScores, WeightVersionSpan
from jaxllm.serving.call import chunk_stream, open_call
from jaxllm.serving.generation import Choice, Generation, GenerationSettings, collect_for, note_version
from jaxllm.serving.http.answers import DONE, ErrorResponse, ignored_fields, json_response, returns
from jaxllm.serving.http.route import ChunkWriter, JSONRoute
from jaxllm.serving.openai.completion_types import Completion, CompletionChoice, CompletionRequest
from jaxllm.serving.openai.kv_transfer import kv_transfer_answer
from jaxllm.serving.openai.logprobs import CompletionLogprobs, CompletionLogprobsBuilder, prompt_logprobs, token_number
from jaxllm.serving.openai.timings import timings
from jaxllm.serving.openai.usage import chunk_usage, stream_options, usage_object
from jaxllm.serving.openai.weight_spans import weight_spans
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["completions"])


@router.post("/completions", responses=returns(Completion, events=(Completion, ErrorResponse), done=DONE))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    state: ServerState = request.app.state.server
    call = await open_call(request, body.model, keep_alive=body.keep_alive, stream=body.stream)
    model = call.model
    model.check_accepting()
    labels = body.take_labels(request.headers)
    settings = body.generation_settings()
    field = body.constraint_field
    if field is not None:
        await state.offload_grammar(lambda: compiled(body.constraint(), Field(field)))
    prompts = await state.offload(completion_prompts, model, body, settings)
    generation = Generation(call, prompts, settings, "cmpl-", prompt_only=body.max_tokens == 0)
    shaper = ChoiceShaper(body, generation, call.name, model)
    if body.stream:
        writer = CompletionWriter(body, generation, shaper, state.config)
        return await chunk_stream(call, generation, writer, labels)
    choices = await collect_for(request, generation)
    completion = shaper.completion(await state.offload(lambda: [shaper.whole(choice) for choice in choices]))
    completion.usage = usage_object(generation.usage())
    completion.kv_transfer_params = kv_transfer_answer(generation)
    completion.conversation_id = body.conversation_id or UNSET
    completion.resource_id = body.resource_id or UNSET
    return json_response(completion, request_id=generation.id, headers=labels)


def completion_prompts(model: ServedModel, body: CompletionRequest, settings: GenerationSettings) -> list[Prompt]:
    """Tokenize and check every prompt of a request. Raises InvalidRequestError naming the field."""
    params = sampling_params(model, settings, structured_outputs=body.constraint())
    prompts = []
    for prompt in body.prompts:
        token_ids = (
            prompt
            if isinstance(prompt, list)
            else model.encode(
                prompt,
                Field("prompt"),
                add_special_tokens=body.add_special_tokens,
                may_be_cut=body.truncate_prompt_tokens is not None,
            )
        )
        own = with_completion_markers(model, params, token_ids)
        ready = fitted(model, token_ids, own, settings, Field("prompt"))
        if body.echo and model.engine.tokenizer is not None:  # else all texts are empty
            if isinstance(prompt, str) and len(ready.token_ids) == len(token_ids):
                ready.text = prompt
            else:  # of ids, the special ones were the caller's own: they stay, unless asked otherwise
                skip = params.skip_special_tokens if isinstance(prompt, str) else body.skip_special_tokens is True
                ready.text = model.tokenizer.decode(ready.token_ids, skip)
        prompts.append(ready)
    return prompts


class ChoiceShaper:
    """Shapes text and log-probabilities of each choice, with its prompt in front when echoed.

    `name` is what the client calls the model.
    """

    def __init__(self, body: CompletionRequest, generation: Generation, name: str, model: ServedModel):
        self._body = body
        self._generation = generation
        self._name = name
        self._fingerprint = model.system_fingerprint
        self._token_text = token_number if body.return_tokens_as_token_ids else model.token_text
        self._builders = None
        if body.logprobs is not None:
            returned = len(generation.prompts) * body.n
            self._builders = [self._builder(model, body.logprobs, index) for index in range(returned)]

    def _builder(self, model: ServedModel, count: int, index: int) -> CompletionLogprobsBuilder:
        prompt, special = self.prompt(index), model.special_token_ids
        return CompletionLogprobsBuilder(
            count + len(self._body.logprob_token_ids or ()),
            model.token_bytes,
            by_number=self._body.return_tokens_as_token_ids,
            special=special,
            hidden=special if prompt.params.skip_special_tokens else (),
            prompt_ids=prompt.token_ids if self._body.echo else (),
            echoed=prompt.text,
        )

    def completion(self, choices: list[CompletionChoice]) -> Completion:
        """The response, or one chunk of it, around its choices."""
        return Completion(
            id=self._generation.id,
            created=self._generation.created,
            model=self._name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            timings=timings(self._generation.usage(), self._generation.phases())
            if self._body.timings_per_token
            else UNSET,
        )

    def whole(self, choice: Choice) -> CompletionChoice:
        echo = self._body.echo
        shaped = CompletionChoice(
            index=choice.index,
            text=self.echo_text(choice.index) + choice.text if echo else choice.text,
            logprobs=self.logprobs(
                choice.index, [*_steps(choice.prompt_logprobs), *choice.logprobs] if echo else choice.logprobs
            ),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self._body.prompt_logprobs is not None and choice.prompt_logprobs is not None:
            shaped.prompt_logprobs = prompt_logprobs(choice.prompt_logprobs, self._token_text)
        if self._body.return_token_ids:
            shaped.token_ids, shaped.prompt_token_ids = choice.token_ids, self.prompt(choice.index).token_ids
        if self._body.return_weight_versions:
            shaped.weight_versions = weight_spans(choice.weight_versions)
        return shaped

    def prompt(self, index: int) -> Prompt:
        """The prompt of a returned choice."""
        return self._generation.prompts[index // self._body.n]

    def echo_text(self, index: int) -> str:
        return self.prompt(index).text

    def logprobs(self, index: int, steps: Sequence[Step | None]) -> CompletionLogprobs | None:
        return None if self._builders is None else self._builders[index].build(steps)


class CompletionWriter(ChunkWriter[TokenDelta]):
    """Chunks of a completion stream; the last of a choice carries its finish reason."""

    def __init__(self, body: CompletionRequest, generation: Generation, shaper: ChoiceShaper, config: ServerConfig):
        self._generation = generation
        self._shaper = shaper
        self._options = stream_options(body.stream_options, config)
        self._to_echo = set(range(generation.num_choices)) if body.echo else set()
        self._pending: list[list[Step | None]] = [[] for _ in range(generation.num_choices)]
        self._pending_ids: list[list[int]] = [[] for _ in range(generation.num_choices)]
        self._with_ids = body.return_token_ids
        self._with_versions = body.return_weight_versions
        self._versions: list[list[WeightVersionSpan]] = [[] for _ in range(generation.num_choices)]
        self._begun: set[int] = set()
        self._warnings = ignored_fields.get() or UNSET

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[Completion]:
        """Log-probabilities of tokens whose text is still held back wait for the chunk that shows it."""
        text = delta.text
        if index in self._to_echo:
            self._to_echo.discard(index)
            text = self._shaper.echo_text(index) + text
            self._pending[index] += _steps(delta.prompt_logprobs)
        self._pending[index] += delta.logprobs or []
        self._pending_ids[index] += delta.token_ids
        note_version(self._versions[index], delta)
        if text or delta.finish_reason is not None:
            steps, self._pending[index] = self._pending[index], []
            choice = CompletionChoice(
                index=index,
                text=text,
                logprobs=self._shaper.logprobs(index, steps) if steps else None,
                finish_reason=delta.finish_reason,
                stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            )
            if self._with_ids:
                choice.token_ids, self._pending_ids[index] = self._pending_ids[index], []
                if index not in self._begun:
                    self._begun.add(index)
                    choice.prompt_token_ids = self._shaper.prompt(index).token_ids
            if self._with_versions and delta.finish_reason is not None:
                choice.weight_versions = weight_spans(self._versions[index])
            yield self._chunk(choice)

    def last(self) -> Iterator[Completion]:
        if self._options.include_usage:
            chunk = self._chunk()
            chunk.usage = usage_object(self._generation.usage())
            yield chunk

    def _chunk(self, *choices: CompletionChoice) -> Completion:
        chunk = self._shaper.completion(list(choices))
        chunk.warnings, self._warnings = self._warnings, UNSET
        chunk.usage = chunk_usage(self._options, self._generation.usage)
        return chunk


def _steps(scores: PromptScores | None) -> Iterable[Step | None]:
    return () if scores is None else scores.steps()
