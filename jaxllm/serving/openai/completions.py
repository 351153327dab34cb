"""/completions"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import Field, field_validator, model_validator

from jaxllm.chat.constraint import compiled
from jaxllm.chat.infill import fim_prompt
from jaxllm.chat.parser import Step
from jaxllm.chat.prompt import Prompt, fitted, sampling_params, with_completion_markers
from jaxllm.engine.doors.sequences import prompt_vectors
from jaxllm.engine.messages import TokenDelta
from jaxllm.errors import Field as Place
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import PromptScores, WeightVersionSpan
from jaxllm.requests.sampling import MAX_LOGPROBS
from jaxllm.serving.call import ClientCall, chunk_stream, open_call
from jaxllm.serving.generation import Choice, Generation, GenerationSettings, collect_for, note_version
from jaxllm.serving.http.answers import DONE, ErrorResponse, ignored_fields, json_response, returns
from jaxllm.serving.http.request_model import Rule, are_integers, check_rules, refuse
from jaxllm.serving.http.route import ChunkWriter, JSONRoute
from jaxllm.serving.openai import answers, sampling
from jaxllm.serving.openai.kv_transfer import KVTransferAnswer, kv_transfer_answer
from jaxllm.serving.openai.prompt_embeds import read_prompt_embeds
from jaxllm.serving.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024


_RULES = (
    Rule(
        lambda body: bool(body.embeds),
        {
            "echo": (False,), "prompt_logprobs": (), "truncate_prompt_tokens": (), "use_beam_search": (False,),
            "kv_transfer_params": (), "return_token_ids": (False,), "suffix": ("",),
        },
        "is not available with prompt_embeds",
    ),
)  # fmt: skip


class CompletionRequest(sampling.GenerationRequest):
    unsupported: ClassVar[frozenset[str]] = sampling.UNSUPPORTED_SAMPLING - {"prompt_embeds"}
    path: ClassVar[str] = "/v1/completions"
    called_here: ClassVar[Mapping[str, str]] = {
        "max_output_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "input": "prompt",
        "stop_sequences": "stop", "top_logprobs": "logprobs", "text": "response_format",
    }  # fmt: skip

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    """One prompt as text or token ids, or a list of either. Required without prompt_embeds."""
    prompt_embeds: str | list[str] | None = None
    """Prompts of vectors, before those of prompt: base64 of float tensors [tokens, hidden size] as torch.save, NumPy or
    safetensors write them. Needs a server with enable_prompt_embeds."""
    suffix: str | None = None
    """Text that comes after the answer, for models that fill in the middle; "" is as if it were left out."""
    echo: bool = False
    """Begin each choice with its prompt."""
    logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS)
    """Log-probabilities of this many most likely tokens besides the chosen one's; with echo, of the prompt's too."""
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=sampling.NO_LIMIT)
    """Upper bound on generated tokens; 0 only together with echo, to score a prompt; -1 is what the context leaves."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as the one that begins a sequence, to text prompts."""

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_kind(cls, value: Any, validate: Any) -> Any:
        """Lists of ids are checked here: they may be long, and pydantic would try every branch on every element."""
        if isinstance(value, list):
            if not value:
                raise refuse("prompt is an empty list; it must have at least one entry")
            if are_integers(value) or all(isinstance(entry, list) and entry and are_integers(entry) for entry in value):
                return value
            if not all(isinstance(entry, str) for entry in value):
                raise refuse("prompt must be a string, a list of strings, of token ids, or of lists of token ids")
            return value
        return validate(value)

    @model_validator(mode="after")
    def _completion_fields(self) -> CompletionRequest:
        if self.prompt is None and not self.embeds:
            raise refuse("prompt is required", "prompt")
        check_rules(self, _RULES)
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens is 0; it must be 1 or more, or 0 together with echo", "max_tokens")
        if self.logprob_token_ids and self.logprobs is None:
            raise refuse("logprob_token_ids needs logprobs, which may be 0", "logprob_token_ids")
        if self.suffix and (self.echo or not all(isinstance(prompt, str) for prompt in self.prompts)):
            problem = "with echo" if self.echo else "with token ids as the prompt"
            raise refuse(f"suffix is not available {problem}", "suffix")
        entries = len(self.prompts) + len(self.embeds)
        choices = entries * self.num_generated
        if choices > MAX_CHOICES:
            raise refuse(
                f"prompt has {entries} entries with {self.num_generated} choices each; at most {MAX_CHOICES} choices",
                "prompt",
            )
        return self

    def generation_settings(self) -> GenerationSettings:
        unbounded = self.max_tokens == sampling.NO_LIMIT
        return self.settings(
            max_tokens=max(self.max_tokens, 1) if "max_tokens" in self.model_fields_set and not unbounded else None,
            default_max_tokens=None if unbounded else DEFAULT_MAX_TOKENS,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs_count,
        )

    @property
    def embeds(self) -> list[str]:
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if self.prompt is None:
            return []
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def prompt_logprobs_count(self) -> int | None:
        """The number that the engine must compute, for the field and for an echo with logprobs."""
        echoed = self.logprobs if self.echo else None
        if self.prompt_logprobs is None or echoed is None:
            return echoed if self.prompt_logprobs is None else self.prompt_logprobs
        return -1 if -1 in (self.prompt_logprobs, echoed) else max(self.prompt_logprobs, echoed)


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: answers.CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: answers.PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[answers.WeightSpan] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole response, or one chunk of a stream (whose usage may be absent or null)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: sampling.CompletionUsage | UnsetType | None = UNSET
    timings: answers.Timings | UnsetType = UNSET
    kv_transfer_params: KVTransferAnswer | UnsetType = UNSET
    conversation_id: str | UnsetType = UNSET
    resource_id: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


router = APIRouter(route_class=JSONRoute, tags=["completions"])


@router.post("/completions", responses=returns(Completion, events=(Completion, ErrorResponse), done=DONE))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive, stream=body.stream)
    state, model = call.state, call.model
    model.check_accepting()
    if body.embeds and not state.config.enable_prompt_embeds:
        raise InvalidRequestError(
            "prompt_embeds is set; this server needs --enable-prompt-embeds for it", "prompt_embeds"
        )
    labels = body.take_labels(request.headers)
    settings = body.generation_settings()
    field = body.constraint_field
    if field is not None:
        await state.offload_grammar(lambda: compiled(body.constraint(), Place(field)))
    prompts = await state.offload(completion_prompts, model, body, settings)
    generation = Generation(call, prompts, settings, "cmpl-", prompt_only=body.max_tokens == 0)
    writer = CompletionWriter(body, generation, call)
    if body.stream:
        return await chunk_stream(call, generation, writer, labels)
    choices = await collect_for(request, generation)
    completion = writer.completion(await state.offload(lambda: [writer.whole(choice) for choice in choices]))
    completion.usage = sampling.usage_object(generation.usage())
    completion.kv_transfer_params = kv_transfer_answer(generation)
    completion.conversation_id = body.conversation_id or UNSET
    completion.resource_id = body.resource_id or UNSET
    return json_response(completion, request_id=generation.id, headers=labels)


def completion_prompts(model: ServedModel, body: CompletionRequest, settings: GenerationSettings) -> list[Prompt]:
    """Tokenize and check every prompt of a request. Raises InvalidRequestError naming the field."""
    params = sampling_params(model, settings, structured_outputs=body.constraint())
    prompts = []
    for text in body.embeds:
        embeds = prompt_vectors({"prompt_embeds": read_prompt_embeds(text)}, model.engine.info)
        assert embeds is not None, "the prompt has vectors"
        prompts.append(fitted(model, [0] * embeds.end, params, settings, Place("prompt_embeds")))
        prompts[-1].embeds = embeds
    for prompt in body.prompts:
        own = params
        if isinstance(prompt, str) and body.suffix:
            token_ids, stops = fim_prompt(model, prompt, body.suffix)
            own = replace(params, stop_token_ids=[*params.stop_token_ids, *stops])
        elif isinstance(prompt, str):
            may_be_cut, special = body.truncate_prompt_tokens is not None, body.add_special_tokens
            token_ids = model.encode(prompt, Place("prompt"), add_special_tokens=special, may_be_cut=may_be_cut)
        else:
            token_ids = prompt
        own = with_completion_markers(model, own, token_ids)
        ready = fitted(model, token_ids, own, settings, Place("prompt"))
        if body.echo and model.engine.tokenizer is not None:  # else all texts are empty
            if isinstance(prompt, str) and len(ready.token_ids) == len(token_ids):
                ready.text = prompt
            else:  # of ids, the special ones were the caller's own: they stay, unless asked otherwise
                skip = params.skip_special_tokens if isinstance(prompt, str) else body.skip_special_tokens is True
                ready.text = model.tokenizer.decode(ready.token_ids, skip)
        prompts.append(ready)
    return prompts


class CompletionWriter(ChunkWriter[TokenDelta]):
    """A whole completion, or the chunks of its stream, of which a choice's last carries its finish reason."""

    def __init__(self, body: CompletionRequest, generation: Generation, call: ClientCall):
        self._body = body
        self._generation = generation
        self._call = call
        self._options = sampling.stream_options(body.stream_options, call.state.config)
        self._builders = None
        if body.logprobs is not None:
            returned = len(generation.prompts) * body.n
            self._builders = [self._builder(call.model, body.logprobs, index) for index in range(returned)]
        self._to_echo = set(range(generation.num_choices)) if body.echo else set()
        self._pending: list[list[Step | None]] = [[] for _ in range(generation.num_choices)]
        self._pending_ids: list[list[int]] = [[] for _ in range(generation.num_choices)]
        self._versions: list[list[WeightVersionSpan]] = [[] for _ in range(generation.num_choices)]
        self._begun: set[int] = set()
        self._warnings = ignored_fields.get() or UNSET

    def _builder(self, model: ServedModel, count: int, index: int) -> answers.CompletionLogprobsBuilder:
        prompt, special = self._prompt(index), model.special_token_ids
        return answers.CompletionLogprobsBuilder(
            count=count + len(self._body.logprob_token_ids or ()),
            token_bytes=model.token_bytes,
            by_number=self._body.return_tokens_as_token_ids,
            special=special,
            hidden=special if prompt.params.skip_special_tokens else (),
            prompt_ids=prompt.token_ids if self._body.echo else (),
            echoed=prompt.text,
        )

    def completion(self, choices: list[CompletionChoice]) -> Completion:
        """The response, or one chunk of it, around its choices."""
        generation, timed = self._generation, self._body.timings_per_token
        return Completion(
            id=generation.id,
            created=generation.created,
            model=self._call.name,
            system_fingerprint=self._call.model.system_fingerprint,
            choices=choices,
            timings=answers.timings(generation.usage(), generation.phases()) if timed else UNSET,
        )

    def whole(self, choice: Choice) -> CompletionChoice:
        body, prompt, scores = self._body, self._prompt(choice.index), choice.prompt_logprobs
        steps = [*_steps(scores), *choice.logprobs] if body.echo else choice.logprobs
        shaped = CompletionChoice(
            index=choice.index,
            text=prompt.text + choice.text if body.echo else choice.text,
            logprobs=self._logprobs(choice.index, steps),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if body.prompt_logprobs is not None and scores is not None:
            token_text = answers.token_number if body.return_tokens_as_token_ids else self._call.model.token_text
            shaped.prompt_logprobs = answers.prompt_logprobs(scores, token_text)
        if body.return_token_ids:
            shaped.token_ids, shaped.prompt_token_ids = choice.token_ids, prompt.token_ids
        if body.return_weight_versions:
            shaped.weight_versions = answers.weight_spans(choice.weight_versions)
        return shaped

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[Completion]:
        """Log-probabilities of tokens whose text is still held back wait for the chunk that shows it."""
        text = delta.text
        if index in self._to_echo:
            self._to_echo.discard(index)
            text = self._prompt(index).text + text
            self._pending[index] += _steps(delta.prompt_logprobs)
        self._pending[index] += delta.logprobs or []
        self._pending_ids[index] += delta.token_ids
        note_version(self._versions[index], delta)
        if text or delta.finish_reason is not None:
            steps, self._pending[index] = self._pending[index], []
            choice = CompletionChoice(
                index=index,
                text=text,
                logprobs=self._logprobs(index, steps) if steps else None,
                finish_reason=delta.finish_reason,
                stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            )
            if self._body.return_token_ids:
                choice.token_ids, self._pending_ids[index] = self._pending_ids[index], []
                if index not in self._begun:
                    self._begun.add(index)
                    choice.prompt_token_ids = self._prompt(index).token_ids
            if self._body.return_weight_versions and delta.finish_reason is not None:
                choice.weight_versions = answers.weight_spans(self._versions[index])
            yield self._chunk(choice)

    def last(self) -> Iterator[Completion]:
        if self._options.include_usage:
            chunk = self._chunk()
            chunk.usage = sampling.usage_object(self._generation.usage())
            yield chunk

    def _chunk(self, *choices: CompletionChoice) -> Completion:
        chunk = self.completion(list(choices))
        chunk.warnings, self._warnings = self._warnings, UNSET
        chunk.usage = sampling.chunk_usage(self._options, self._generation.usage)
        if self._options.include_obfuscation:
            chunk.obfuscation = answers.obfuscation(choices)
        return chunk

    def _prompt(self, index: int) -> Prompt:
        return self._generation.prompts[index // self._body.n]

    def _logprobs(self, index: int, steps: Sequence[Step | None]) -> answers.CompletionLogprobs | None:
        return None if self._builders is None else self._builders[index].build(steps)


def _steps(scores: PromptScores | None) -> Iterable[Step | None]:
    return () if scores is None else scores.steps()
