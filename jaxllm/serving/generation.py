"""The answers to one request under way: their sequences, merged, measured and stopped together, and their texts."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import msgspec
from fastapi import Request

from jaxllm.chat.answer import Asked, Told, ToolLoop
from jaxllm.chat.conversation import Conversation
from jaxllm.chat.parser import AnswerReader, Step
from jaxllm.chat.prompt import AnswerSettings, ConversationPrompt, Prompt, prepare
from jaxllm.config.parts import is_peer
from jaxllm.engine.doors.streams import Gain, Stream
from jaxllm.engine.messages import EngineRequest, PagesAt, TokenDelta, TransferInfo
from jaxllm.errors import EngineDeadError, Field, InvalidRequestError
from jaxllm.requests.outputs import PromptScores, WeightVersionSpan, extend_versions
from jaxllm.requests.steering import AdapterUse
from jaxllm.serving.access.keys import Tenant
from jaxllm.serving.call import ClientCall
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import until_disconnect
from jaxllm.serving.request_metrics import Clock, ModelCall, Phases, SequenceTimer, Usage
from jaxllm.serving.served_model import ServedModel, stopped

WIRE_NAME = "kv_transfer_params"
OPENING_SECONDS = 0.1
"""The longest wait of a stream's first byte, in which a refusal by the engine still gets its own status code."""


@dataclass(frozen=True)
class HandOver:
    """A prompt that goes on with the pages of another server at `pages_at`, or whose pages are for another server."""

    pages_at: PagesAt | None = None

    @property
    def hands_on(self) -> bool:
        return self.pages_at is None


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(AnswerSettings):
    """The settings of an answer with those that only a server knows.

    Attributes:
        priority: lower runs earlier.
        request_id: the caller's own, part of the answer's id.
        cache_salt: only requests with the same salt share cached prefixes.
        lora: scales of adapters by their numbers; None where the caller says nothing of them.
        stream_interval: tokens of a choice to an event, after its first; None is the server's setting.
    """

    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    lora: Mapping[int, float] | None = None
    hand_over: HandOver | None = None
    stream_interval: int | None = None


def note_version(spans: list[WeightVersionSpan], delta: TokenDelta) -> None:
    """Note which weights made the tokens of a delta; beam search does not say."""
    if delta.token_ids and delta.weight_version:
        extend_versions(spans, delta.weight_version, len(delta.token_ids))


@dataclass
class Choice:
    """One finished sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Step] = field(default_factory=list)
    prompt_logprobs: PromptScores | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)

    def add(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        self.text += delta.text
        self.token_ids += delta.token_ids
        note_version(self.weight_versions, delta)
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def mean_logprob(self) -> float:
        return sum(step[0][1].logprob for step in self.logprobs) / max(len(self.logprobs), 1)


class Generation:
    """An async context: entering starts every sequence, leaving aborts those that have not finished.

    Choice index of sequence j of prompt i is i * n + j, n being those that are generated: best_of, where the request
    sets it. Entering raises what the engine says at once (QueueFullError, EngineDeadError, InvalidRequestError), and as
    ClientCall.asking. With `prompt_only` the prompts are scored and the one generated token dropped. One that `goes_on`
    belongs to a request that was accepted before.

    Raises InvalidRequestError for a priority, adapters or a hand-over that the request may not have.
    """

    def __init__(
        self,
        call: ClientCall,
        prompts: list[Prompt],
        request: GenerationSettings,
        prefix: str,
        *,
        prompt_only: bool = False,
        goes_on: bool = False,
    ):
        self.id = prefix + (request.request_id or uuid.uuid4().hex)
        self.prompts = prompts
        self.n = prompts[0].params.n
        self.num_returned = request.n
        self.created = int(time.time())
        self._request = request
        self._call = call
        self._model = model = call.model
        self._adapters = call.adapter_uses(request.lora)
        self._hand_over = request.hand_over
        if request.hand_over is not None:
            _check_hand_over(request.hand_over, model.engine.info.transfer, prompts, self._adapters)
        self._priority = call.tenant.priority(request.priority)
        self._prompt_only = prompt_only
        self._goes_on = goes_on
        arrival = time.time()
        self._timers = [
            SequenceTimer(model.metrics, arrival, len(prompt.token_ids), prompt.params.max_tokens)
            for prompt in prompts
            for _ in range(self.n)
        ]
        self._asked = ModelCall(operation="generate", model=model.names[0], clock=Clock(arrival))
        self._entered = AsyncExitStack()
        self._stream: Stream | None = None
        self._opening: list[Gain] = []
        self._failure: Exception | None = None
        self._ended_by: APIError | None = None
        self._usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
        """The usage of all gains handed out so far, without cached tokens, which are by prompt."""
        self._cached_tokens: dict[int, int] = {}
        self._finish_reasons: dict[int, str] = {}
        self._interval = request.stream_interval or call.state.config.stream_interval
        self._held: dict[int, TokenDelta | None] = {}
        """What is not handed out yet of the choices that have begun."""
        self._texts = [""] * self.num_choices
        self._keeps_texts = call.record is not None and call.record.keeps_texts

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    async def __aenter__(self) -> Generation:
        async with AsyncExitStack() as stack:
            most = self._usage.prompt_tokens + self.n * sum(prompt.params.max_tokens or 0 for prompt in self.prompts)
            await stack.enter_async_context(self._call.asking(self, self._asked, most, goes_on=self._goes_on))
            tenant = self._call.tenant
            requests = [
                EngineRequest(
                    request_id=self.id,
                    prompt_token_ids=prompt.token_ids,
                    sampling_params=prompt.params,
                    priority=self._priority,
                    cache_salt=tenant.cache_salt(self._request.cache_salt),
                    group=tenant.group,
                    adapters=self._adapters,
                    patching=prompt.embeds,
                    images=prompt.images,
                    hands_on=self._hand_over is not None and self._hand_over.hands_on,
                    pages_at=None if self._hand_over is None else self._hand_over.pages_at,
                )
                for prompt in self.prompts
            ]
            searches = [prompt.beam_search for prompt in self.prompts if prompt.beam_search is not None]
            self._stream = stack.enter_context(self._model.engine.run(requests, searches=searches))
            stack.callback(self._end)
            for _ in self.prompts:
                self._model.metrics.observe("request_params_n", self.num_returned)
            self._opening = await self._next(OPENING_SECONDS)
            if self._failure is not None and not self._opening:
                raise self._failure
            self._entered = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._entered.aclose()

    def _end(self) -> None:
        reason = "abort" if self._failure in (None, self._ended_by) else "error"
        for index in range(self.num_choices):
            if index not in self._finish_reasons:
                self._finish_reasons[index] = reason
                self._timers[index].on_delta(TokenDelta(request_id=self.id, finish_reason=reason))
        for start in range(0, self.num_choices, self.n):
            longest = max(timer.num_tokens for timer in self._timers[start : start + self.n])
            self._model.metrics.observe("request_max_num_generation_tokens", longest)
        asked = self._asked
        asked.num_answers = self.num_choices
        asked.prompt_tokens = self._usage.prompt_tokens
        asked.params = self.prompts[0].params
        asked.completion_tokens = sum(timer.num_tokens for timer in self._timers)
        asked.cached_tokens = sum(self._cached_tokens.values())
        asked.finish_reasons = [self._finish_reasons[index] for index in range(self.num_choices)]
        if self._keeps_texts:
            asked.answers = self._texts
            if self._model.engine.tokenizer is not None:
                asked.prompts = [self._model.tokenizer.decode(prompt.token_ids, False) for prompt in self.prompts]

    async def arrivals(self, timeout: float | None = None) -> AsyncIterator[list[Gain]]:
        """Events in order, all there are; an empty list after `timeout` seconds. Raises what stopped the streams."""
        if self._opening:
            opening, self._opening = self._opening, []
            yield self._counted(self._due(opening))
        while len(self._finish_reasons) < self.num_choices:
            if self._failure is not None:
                raise self._failure
            gains = await self._next(timeout)
            due = self._due(gains)
            if due or not (gains or self._failure):
                yield self._counted(due)

    def abort(self, error: APIError) -> None:
        """Stop now; the reader of the answer gets the error after what has come of it."""
        self._ended_by = error
        if self._stream is not None:
            self._stream.abort()

    def usage(self) -> Usage:
        """Tokens of all gains handed out so far; a prompt counts once whatever n is."""
        return replace(self._usage, cached_tokens=sum(self._cached_tokens.values()))

    @property
    def handed_on(self) -> tuple[TransferInfo, int] | None:
        """The engine that has the prompt's full pages for another server, and their number; None if not asked for."""
        info = self._model.engine.info
        if self._hand_over is None or not self._hand_over.hands_on or info.transfer is None:
            return None
        return info.transfer, len(self.prompts[0].token_ids) // info.page_size

    def phases(self) -> Phases:
        return self._asked.clock.phases(self.num_choices)

    @property
    def tenant(self) -> Tenant:
        return self._call.tenant

    def progress(self) -> list[tuple[int, int, int, int]]:
        """Of each choice that has not ended: tokens of its prompt, of those cached ones, generated ones, and their
        most."""
        open_ones = [(i // self.n, timer) for i, timer in enumerate(self._timers) if i not in self._finish_reasons]
        found = ((self.prompts[at], self._cached_tokens.get(at, 0), timer.num_tokens) for at, timer in open_ones)
        return [(len(prompt.token_ids), cached, made, prompt.params.max_tokens or 0) for prompt, cached, made in found]

    def end_thinking(self) -> None:
        """Have reasoning that has a budget end now; waits until the engine has been told."""
        if self._stream is not None:
            self._model.engine.end_thinking(self._stream.names)

    def kept(self, gains: list[Gain]) -> list[Gain]:
        """What the choices have gained, which a choice may end with although the engine goes on."""
        return gains

    async def _next(self, timeout: float | None) -> list[Gain]:
        assert self._stream is not None
        try:
            gains = await self._stream.next(timeout)
        except EngineDeadError as error:
            self._failure = error
            return []
        gains = self.kept(gains)
        for at, (index, delta) in enumerate(gains):
            if delta.error is not None:
                self._failure = _failure(delta)
                return gains[:at]
            if delta.finish_reason == "abort":
                self._failure = self._ended_by = self._ended_by or stopped()
                return gains[:at]
            self._asked.clock.on_delta(delta)
            if self._prompt_only:
                delta = msgspec.structs.replace(delta, token_ids=[], text="", logprobs=None)
                gains[at] = index, delta
            self._timers[index].on_delta(delta)
            if self._keeps_texts:
                self._texts[index] += delta.text
            if delta.finish_reason is not None:
                self._finish_reasons[index] = delta.finish_reason
        return gains

    def _due(self, gains: list[Gain]) -> list[Gain]:
        """What there is to say now: the rest waits for more tokens, the choice's end, or tokens of other weights."""
        if self._interval == 1:
            return gains
        due: list[Gain] = []
        for index, delta in gains:
            begins, held = index not in self._held, self._held.get(index)
            if held is not None and held.weight_version != delta.weight_version:
                due.append((index, held))
            elif held is not None:
                delta = _joined(held, delta)
            says = begins or delta.finish_reason or len(delta.token_ids) >= self._interval
            self._held[index] = None if says else delta
            if says:
                due.append((index, delta))
        if self._failure is not None:
            due += [(index, held) for index, held in self._held.items() if held is not None]
        return due

    def _counted(self, gains: list[Gain]) -> list[Gain]:
        for index, delta in gains:
            self._usage.completion_tokens += len(delta.token_ids)
            self._usage.drafted_tokens += delta.num_drafted
            self._usage.taken_tokens += delta.num_taken
            self._cached_tokens.setdefault(index // self.n, delta.num_cached_tokens)
        return gains


def _joined(first: TokenDelta, then: TokenDelta) -> TokenDelta:
    steps = [*(first.logprobs or ()), *(then.logprobs or ())]
    return msgspec.structs.replace(
        then,
        token_ids=[*first.token_ids, *then.token_ids],
        text=first.text + then.text,
        logprobs=None if first.logprobs is None and then.logprobs is None else steps,
        num_drafted=first.num_drafted + then.num_drafted,
        num_taken=first.num_taken + then.num_taken,
    )


def _check_hand_over(
    asked: HandOver, info: TransferInfo | None, prompts: Sequence[Prompt], adapters: Sequence[AdapterUse]
) -> None:
    flag, role = ("do_remote_decode", "kv_producer") if asked.hands_on else ("do_remote_prefill", "kv_consumer")
    at, most = asked.pages_at, prompts[0].params.max_tokens
    problem: list[str | Field]
    if info is None:
        problem = [Field(WIRE_NAME), " is not available: this server was started without kv_transfer_config"]
    elif info.role not in (role, "kv_both"):
        told = f" is true, and this server's kv_role is {info.role}; accepted with {role}, kv_both"
        problem = [Field(WIRE_NAME, flag), told]
    elif at is not None and not is_peer(at.host, info.peers):
        told = f" is {at.host!r}; this server fetches pages from {', '.join(info.peers)} (kv_peers)"
        problem = [Field(WIRE_NAME, "remote_host"), told]
    elif adapters:
        problem = [Field(WIRE_NAME), " is set with an adapter, whose pages other servers do not know; leave it out"]
    elif len(prompts) > 1:
        problem = [Field(WIRE_NAME), f" is set with {len(prompts)} prompts; accepted is 1"]
    elif asked.hands_on and most != 1:
        problem = [Field("max_tokens"), f" is {most}; with {WIRE_NAME}.do_remote_decode it must be 1"]
    else:
        return
    raise InvalidRequestError(problem)


def _failure(delta: TokenDelta) -> Exception:
    if delta.is_dead:
        return EngineDeadError(f"{delta.error}; another engine of the model would answer the same request")
    if delta.invalid:
        return APIError(400, f"{delta.error}", code="request_failed")
    return APIError(500, f"the request failed: {delta.error}", type="server_error", code="request_failed")


async def collect_for(request: Request, generation: Generation) -> list[Choice]:
    """Every choice, or of best_of the n with the highest mean log-probability. Raises ClientDisconnected."""
    async with generation:
        return await until_disconnect(request.receive, _collected(generation))


async def _collected(generation: Generation) -> list[Choice]:
    choices = [Choice(index) for index in range(generation.num_choices)]
    async for gains in generation.arrivals():
        for index, delta in gains:
            choices[index].add(delta)
    if generation.num_returned == generation.n:
        return choices
    best: list[Choice] = []
    for start in range(0, len(choices), generation.n):
        ranked = sorted(choices[start : start + generation.n], key=lambda choice: -choice.mean_logprob)
        best += ranked[: generation.num_returned]
    for index, choice in enumerate(best):
        choice.index = index
    return best


class Reply(AnswerReader):
    """A conversation's sequences and the parsers of their texts. Entering `generation` starts it."""

    def __init__(
        self,
        call: ClientCall,
        prompt: ConversationPrompt,
        settings: GenerationSettings,
        prefix: str,
        *,
        goes_on: bool = False,
    ):
        self.name = call.name
        model = call.model
        self.generation = Generation(call, [prompt.prompt], settings, prefix, goes_on=goes_on)
        self.token_text = model.token_text
        self.token_bytes = model.token_bytes
        self.system_fingerprint = model.system_fingerprint
        super().__init__(prompt.conversation, prompt.parsers(self.generation.num_choices))

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.generation.prompts[0].token_ids

    @property
    def max_tokens(self) -> int:
        max_tokens = self.generation.prompts[0].params.max_tokens
        assert max_tokens is not None
        return max_tokens

    def usage(self) -> Usage:
        usage = self.generation.usage()
        usage.reasoning_tokens = self.reasoning_tokens
        return usage


class ReplyLoop(ToolLoop[Told, Asked]):
    """A loop whose answers are replies of one model."""

    def __init__(self, model: ServedModel, most_calls: int, *, parallel: bool = True):
        super().__init__(most_calls, parallel=parallel)
        self.model = model
        self.reply: Reply | None = None
        """The one under way, or yet to be read."""
        self._past, self._past_phases = Usage(), Phases()  # sums of the replies that are over

    def abort(self, error: APIError) -> None:
        self.stop(error)
        if self.reply is not None:
            self.reply.generation.abort(error)

    def usage(self) -> Usage:
        return self._past if self.reply is None else self._past + self.reply.usage()

    def phases(self) -> Phases:
        return self._past_phases if self.reply is None else self._past_phases + self.reply.generation.phases()

    async def enter(self, reply: Reply) -> None:
        await reply.generation.__aenter__()
        self.reply = reply
        if isinstance(self.ended_by, APIError):
            reply.generation.abort(self.ended_by)

    async def leave(self) -> None:
        if self.reply is not None:
            self._past, self._past_phases = self.usage(), self.phases()
            reply, self.reply = self.reply, None
            await reply.generation.__aexit__()


async def begin_reply(
    call: ClientCall, conversation: Conversation, settings: GenerationSettings, *, prefix: str, goes_on: bool = False
) -> Reply:
    """Render, tokenize and check a conversation; nothing runs before the reply's `generation` is entered.

    The `prefix` begins the reply's id. A reply that `goes_on` is part of a request that was accepted before, which a
    server that is stopping finishes. Raises APIError, or InvalidRequestError naming the field.
    """
    call.model.check_accepting(goes_on=goes_on)
    prompt = await call.prepare(prepare, conversation, settings)
    return Reply(call, prompt, settings, prefix, goes_on=goes_on)
