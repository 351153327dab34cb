"""An AsyncLLM that streams canned text: the server's shapes, errors and endings are tested without a model.

`python -m tests.serving.fake_engine PORT DELAY SHUTDOWN_TIMEOUT` serves it, for tests that send signals; FAKE_LAMEDUCK
may say how long it is a lame duck before it stops, and FAKE_SETTINGS has more settings as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import tokenizers
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxllm.config import EngineConfig, ModelConfig, ServeConfig
from jaxllm.engine.core.results import Repetition
from jaxllm.engine.doors.async_llm import AsyncLLM
from jaxllm.engine.doors.eyes import Eyes
from jaxllm.engine.doors.streams import Stream
from jaxllm.engine.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    LookAt,
    MemoryRoom,
    Order,
    Pause,
    PlacedImages,
    Resume,
    TokenDelta,
    UpdateWeights,
)
from jaxllm.errors import CheckpointError, EngineDeadError
from jaxllm.requests.outputs import Logprob, ModelTasks, PoolingParams, PromptScores
from jaxllm.requests.sampling import SamplingDefaults, SamplingParams
from jaxllm.requests.steering import AdapterUse, Patching
from jaxllm.serving.served_model import LoadableModel
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.serving.state import Registry

BOS = 256
NEW_WEIGHTS = "/models/new"
"""What it can run with as well."""
VOCAB_SIZE = 300
CONTEXT = 256
CACHED = 3
"""Prompt tokens that are always found in the cache."""
PADDING = 1.25
"""Each sequence's share of the padding."""
DRAFTED = (7, 5)
"""Tokens tried ahead with each sequence whose answer is predicted, and how many of them were right."""
REPLY = "The capital of France is Paris."
HIDDEN_SIZE = 12
HIDDEN = np.random.default_rng(7).normal(size=(VOCAB_SIZE, HIDDEN_SIZE))
"""What each token adds to the hidden states from its own on."""
HEAD = np.random.default_rng(8).normal(size=(VOCAB_SIZE, HIDDEN_SIZE)) / 10


TEMPLATE = (
    "{% if documents %}(documents={{ documents }}){% endif %}"
    "{% if enable_thinking is defined %}(enable_thinking={{ enable_thinking }}){% endif %}"
    "{% if reasoning_effort is defined %}(reasoning_effort={{ reasoning_effort }}){% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Special tokens from id 258 on; one that ends an answer is 257."""


class ByteTokenizer(Tokenizer):
    """One token a byte; 256 begins a sequence and, like the markers, has no text unless special tokens are shown."""

    def __init__(self, chat_template: str | None = TEMPLATE, further: Sequence[str] = ()):
        letters = byte_letters()
        backend = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", *MARKERS, *further)])
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        super().__init__(
            backend,
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            templates={} if chat_template is None else {"default": chat_template},
        )
        self.vocab_size = VOCAB_SIZE


IMAGE = "<image>"
SEEING_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}(<image>){% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class SeeingTokenizer(ByteTokenizer):
    def __init__(self, chat_template: str | None = SEEING_TEMPLATE):
        super().__init__(chat_template, [IMAGE])


def byte_letters() -> list[str]:
    """The letter that ByteLevel spells each byte with: itself where it is printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class SaidToken(NamedTuple):
    candidates: list[tuple[int, Logprob]]
    text: str
    finish_reason: str | None
    stop: str | None = None


@dataclass
class Answer:
    """How far one sequence has come."""

    request: EngineRequest
    said: list[SaidToken]
    due: float
    step: int = 0
    start: float = field(default_factory=time.time)


class CannedClient:
    """What stands in an engine's place: every sequence gets a token when it is due, all those that are in one turn."""

    def __init__(self, engine: FakeEngine, info: EngineInfo):
        self.info = info
        self.answers: dict[str, Answer] = {}
        self._engine = weakref.ref(engine)
        self._changed = threading.Condition()
        self._choices: Counter[str] = Counter()
        self._dead: str | None = None
        self._paused = False
        self.orders: list[Order] = []
        """What it was told to do."""
        self.last_turn = 0.0

    def add(self, request: EngineRequest) -> None:
        engine = self._engine()
        assert engine is not None
        with self._changed:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            name = request.request_id.rpartition("-")[0]
            said = [] if request.pooling else engine._sequence(request, self._choices[name])
            self._choices[name] += 1
            self.answers[request.request_id] = Answer(request, said, time.monotonic() + engine.until_next(request, 0))
            engine.most_active = max(engine.most_active, len(self.answers))
            self._changed.notify_all()

    def abort(self, request_ids: list[str]) -> None:
        with self._changed:
            for request_id in request_ids:
                self.answers.pop(request_id, None)

    def outputs(self, timeout: float | None = None) -> list[TokenDelta]:
        with self._changed:
            self._changed.wait_for(lambda: self._dead is not None or self.answers, timeout)
            if self._dead is None and self.answers:
                wait = min(answer.due for answer in self.answers.values()) - time.monotonic()
                self._changed.wait_for(lambda: self._dead is not None, min(max(wait, 0), 0.005))
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            engine, now = self._engine(), time.monotonic()
            if self._due(now):
                self.last_turn = now
            return [] if engine is None else [self._next(engine, answer) for answer in self._due(now)]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.answers), num_pages=100, num_free_pages=100 - len(self.answers), page_size=16,
            resident_bytes=2**29,
            prompt_tokens=11, generation_tokens=22, num_steps=4, step_host_seconds=0.002, step_device_wait_seconds=0.4,
            scheduled_tokens={"decode-4": 30}, padded_tokens={"decode-4": 10}, compiles_foreseen=3,
            compiles_unforeseen=1, compile_seconds=7.5, prefix_cache_queries=50, prefix_cache_hits=20,
            num_preemptions=2,
        )  # fmt: skip

    def has_begun(self, request_id: str) -> bool:
        return True

    @property
    def processes(self) -> dict[str, LookAt]:
        return {}

    def order(self, order: Order) -> None:
        self.orders.append(order)
        match order:
            case Pause(mode):
                while mode == "wait" and self.answers:
                    time.sleep(0.001)
                self._paused = True
            case Resume():
                self._paused = False
            case UpdateWeights(source, _) if source != NEW_WEIGHTS:
                raise CheckpointError(f"{source} is another model than the one that runs")

    def keep_weights(self) -> None:
        self.die("the engine is asleep")

    def shutdown(self) -> None:
        self.die("the engine was shut down")

    def die(self, reason: str) -> None:
        with self._changed:
            self._dead = self._dead or reason
            self.answers.clear()
            self._changed.notify_all()

    def _due(self, now: float) -> list[Answer]:
        return [] if self._paused else [answer for answer in self.answers.values() if answer.due <= now]

    def _next(self, engine: FakeEngine, answer: Answer) -> TokenDelta:
        delta = engine._delta(answer)
        answer.step += 1
        answer.due = time.monotonic() + engine.until_next(answer.request, answer.step)
        if delta.finish_reason is not None:
            del self.answers[answer.request.request_id]
        return delta


class FakeEngine(AsyncLLM):
    """The real front door of an engine that says REPLY (or `reply`), a token every `delay` seconds."""

    def __init__(
        self,
        *,
        delay: float = 0.0,
        reply: str = REPLY,
        queue_limit: int = 1000,
        tokenizer: bool = True,
        tasks: ModelTasks | None = None,
    ):
        self.delay = delay
        self.reply = reply
        self.fail_after: int | None = None
        self.fail_invalid = False
        """Whether the requests that fail are to blame."""
        self.ready = True
        self.seen: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.pooled: list[tuple[list[int], PoolingParams, dict[str, Any]]] = []
        self.patchings: list[Patching | None] = []
        self.adapters: list[tuple[AdapterUse, ...]] = []
        """What each request that was run uses."""
        self.refused_adapters: set[str] = set()
        """Paths of those that the engine cannot use."""
        self.images: list[PlacedImages | None] = []
        """Those of each request that was run."""
        self.groups: list[str] = []
        """What requests belonged to."""
        self.most_active = 0
        self.sleeps = True
        self.kept = 0
        """What it says that it keeps in memory."""
        self.slept: list[int] = []
        """The levels at which it was told to sleep."""
        self.hold_back: set[int] = set()
        self.replies: list[str] | None = None
        """What the choices say, in turn, instead of `reply`."""
        self.script: list[str] = []
        """What the next sequences say, one after the other, before all that."""
        self.versions = ["initial"]
        """Of the weights that made each token; the last one makes all others too."""
        self.logprobs = [-1.0]
        """Log-probability of the choices' tokens, in turn."""
        self.next_tokens: Callable[[list[int]], list[tuple[int, Logprob]]] | None = None
        """The most likely tokens after some ids, best first: what is said then, instead of replies."""
        info = EngineInfo(
            model_name="fake", vocab_size=VOCAB_SIZE, max_model_len=CONTEXT, eos_token_ids=[257], num_pages=100,
            page_size=16, max_num_seqs=8, max_num_batched_tokens=64, hidden_size=HIDDEN_SIZE, num_parameters=1_000_000,
            planned_memory=2**28,
            tasks=tasks or ModelTasks(), default_sampling=SamplingDefaults(temperature=0.5, top_k=40),
        )  # fmt: skip
        self.client = CannedClient(self, info)
        started = self.client, ByteTokenizer() if tokenizer else None
        with mock.patch("jaxllm.engine.doors.async_llm.start_engine", return_value=started):
            super().__init__(EngineConfig(model="fake"))
        self.queue_limit = queue_limit

    @property
    def active(self) -> set[str]:
        """The sequences under way."""
        return set(self.client.answers)

    @property
    def queue_limit(self) -> int | None:
        return self._streams.limit

    @queue_limit.setter
    def queue_limit(self, limit: int) -> None:
        self._streams.limit = limit

    def die(self) -> None:
        """As if the engine had crashed."""
        self.client.die("the engine has stopped")
        while not self.is_dead:
            time.sleep(0.001)

    @property
    def can_sleep(self) -> bool:
        return self.sleeps

    @property
    def kept_bytes(self) -> int:
        return self.kept

    def sleep(self, level: int = 1) -> None:
        if not self.is_asleep:
            self.slept.append(level)
            self._sleep_level = level
            self._streams.sleep(keep=level == 1)

    def wake_up(self, given_up: threading.Event | None = None, room: MemoryRoom | None = None) -> None:
        if not self.is_asleep:
            return
        if room is not None:
            room.ask(None)
        self.client = CannedClient(self, self.info)
        self._streams._start = lambda given_up, room: self.client
        super().wake_up(given_up, room)

    def until_next(self, request: EngineRequest, step: int) -> float:
        """Seconds until a sequence's token of this step."""
        return self.delay

    def run(self, requests: Sequence[EngineRequest], **arguments: Any) -> Stream:
        for request in requests:
            self.adapters.append(request.adapters)
            self.patchings.append(request.patching)
            self.images.append(request.images)
            labels = {"priority": request.priority, "cache_salt": request.cache_salt}
            self.groups.append(request.group)
            if request.pooling is not None:
                self.pooled.append((request.prompt_token_ids, request.pooling, labels))
            else:
                self.seen.append((request.prompt_token_ids, request.sampling_params, labels))
        return super().run(requests, **arguments)

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(super().stats(), ready=self.ready)

    def _sequence(self, request: EngineRequest, choice: int) -> list[SaidToken]:
        """All that one choice says."""
        prompt, params = request.prompt_token_ids, request.sampling_params
        if self.next_tokens is not None:
            steps = self._likeliest(prompt, params)
            finish_reason = "stop" if steps[-1][0][0] in self.info.eos_token_ids else "length"
        else:
            reply = self.reply if self.replies is None else self.replies[choice % len(self.replies)]
            reply = self.script.pop(0) if self.script else reply
            ids = list(reply.encode()) if self.tokenizer is None else self.tokenizer.encode(reply, False)
            finish_reason = "stop" if params.max_tokens is None or len(ids) <= params.max_tokens else "length"
            logprob = self.logprobs[choice % len(self.logprobs)]
            steps = [candidates(token, params.logprobs or 0, logprob) for token in ids[: params.max_tokens]]
            if params.logprob_token_ids:
                asked = [(token, Logprob(-token / 8)) for token in params.logprob_token_ids]
                steps = [[*step, *(entry for entry in asked if entry[0] not in dict(step))] for step in steps]
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(
                self.tokenizer.backend,
                prompt,
                stop=params.stop,
                stop_regex=params.stop_regex,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_token_ids=params.shown_special_token_ids,
            )
        said: list[SaidToken] = []
        repetition = None if params.repetition_detection is None else Repetition(params.repetition_detection)
        held, stop = "", None
        for at, step in enumerate(steps):
            text, stop = detokenizer.add(step[0][0], at + 1 >= params.min_tokens) if detokenizer else ("", None)
            repeats = repetition is not None and repetition.add(step[0][0]) and stop is None
            last = at == len(steps) - 1 or stop is not None or repeats
            if last and stop is None and detokenizer:
                text += detokenizer.flush()
            held += text
            shown = "" if at in self.hold_back and not last else held
            held = held.removeprefix(shown)
            if repeats:
                finish_reason, stop = "repetition", "repetition_detected"
            ended = "stop" if stop is not None and not repeats else finish_reason
            said.append(SaidToken(step, shown, ended if last else None, stop))
            if stop is not None:
                break
        return said

    def _likeliest(self, prompt: list[int], params: SamplingParams) -> list[list[tuple[int, Logprob]]]:
        assert self.next_tokens is not None
        steps: list[list[tuple[int, Logprob]]] = []
        while len(steps) < (params.max_tokens or CONTEXT):
            best = self.next_tokens([*prompt, *(step[0][0] for step in steps)])
            steps.append(best[: (params.logprobs or 0) + 1])
            if best[0][0] in self.info.eos_token_ids:
                break
        return steps

    def _delta(self, answer: Answer) -> TokenDelta:
        """What a sequence's next step gives."""
        request = answer.request
        if refused := next((use.path for use in request.adapters if use.path in self.refused_adapters), None):
            return TokenDelta(
                request_id=request.request_id,
                finish_reason="error",
                error=f"{refused}: its rank is 64",
                invalid=True,
            )
        if request.pooling is not None:
            pooled = self._pooled(request.prompt_token_ids, request.pooling).astype("<f4").tobytes()
            return TokenDelta(
                request_id=request.request_id, pooled=pooled, finish_reason="stop", num_cached_tokens=CACHED
            )
        params, token = request.sampling_params, answer.said[answer.step]
        delta = TokenDelta(
            request_id=request.request_id,
            token_ids=[token.candidates[0][0]],
            text=token.text,
            finish_reason=token.finish_reason,
            stop_reason=token.stop,
            weight_version=self.versions[min(answer.step, len(self.versions) - 1)],
        )
        if self.fail_after == answer.step:
            return TokenDelta(
                request_id=request.request_id,
                finish_reason="error",
                error="the pages caught fire",
                invalid=self.fail_invalid,
            )
        if params.wants_vocabulary:
            delta.logprobs = [[*token.candidates[:1], *((i, Logprob(-9.0, 2 + i)) for i in range(3))]]
        elif params.logprobs is not None:
            delta.logprobs = [token.candidates]
        if token.finish_reason is not None:
            delta.padding = PADDING
            if params.predicted_token_ids:
                delta.num_drafted, delta.num_taken = DRAFTED
        if answer.step == 0:
            delta.num_cached_tokens = CACHED
            delta.first_scheduled_time = answer.start
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = prompt_scores(request.prompt_token_ids, params.prompt_logprobs)
        return delta

    def _pooled(self, prompt: list[int], pooling: PoolingParams) -> np.ndarray:
        """Values of `hidden_states`; the logits are those of the first rows of HEAD where the model classifies."""
        states = hidden_states(prompt)
        match pooling.kind:
            case "last":
                return states[-1]
            case "cls":
                return states[0]
            case "mean":
                return states.mean(axis=0)
        rows = list(pooling.token_ids) or range(len(self.info.tasks.labels) or VOCAB_SIZE)
        logits = HEAD @ states[-1]
        norm = np.log(np.exp(logits).sum()) if pooling.kind == "logprobs" else 0.0
        return logits[rows] - norm


class SeeingEngine(FakeEngine):
    """One whose images have a row for each 4 × 4 pixels, 64 at most; a request may have 128."""

    def __init__(self, chat_template: str | None = SEEING_TEMPLATE, most_images: int | None = None):
        from jaxllm.models.vision.processor import HALF
        from jaxllm.models.vision.processors import PixelsProcessor

        super().__init__()
        self.tokenizer = tokenizer = SeeingTokenizer(chat_template)
        self.info.most_image_rows, self.info.max_model_len = 128, 4096
        token = tokenizer.backend.token_to_id(IMAGE)
        assert token is not None
        processor = PixelsProcessor(
            image=token, placeholder=token, patch=4, merge=1, mean=HALF[0], std=HALF[1], scale=1 / 255, resample=3,
            encode=lambda text: tokenizer.encode(text, False), axes=False, min_pixels=16, max_pixels=1024,
        )  # fmt: skip
        self._streams.__dict__["eyes"] = Eyes(processor, tokenizer, self.info, most_images=most_images)


def hidden_states(token_ids: list[int]) -> np.ndarray:
    return np.cumsum(HIDDEN[token_ids], axis=0)


def prompt_scores(prompt: list[int], count: int) -> PromptScores:
    """`candidates` of every token but the first, as the engine's arrays; of the whole vocabulary all are alike."""
    if count == -1:
        scores = PromptScores.empty(prompt, VOCAB_SIZE, whole=True)
        scores.logprobs[:] = -np.log(VOCAB_SIZE)
        return scores.finish()
    scores = PromptScores.empty(prompt, count + 2, whole=False)
    for row, token in enumerate(prompt[1:]):
        for column, (found, value) in enumerate(candidates(token, count)):
            scores.ids[row, column], scores.ranks[row, column] = found, value.rank or 0
            scores.logprobs[row, column] = value.logprob
        scores.logprobs[row, column + 1 :] = -np.inf
    return scores.finish()


def candidates(token: int, count: int, logprob: float = -1.0) -> list[tuple[int, Logprob]]:
    """The chosen token second-best at -1, or as told, with the most likely ones (65, 66, …) around it."""
    top = [(65, Logprob(-0.5, 1, "A")), *((66 + i, Logprob(-2.0 - i, 3 + i, chr(66 + i))) for i in range(count))]
    return [(token, Logprob(logprob, 2, None)), *[entry for entry in top if entry[0] != token][:count]]


def app_of(
    config: ServeConfig,
    engine: Any,
    others: Mapping[str, Any] | None = None,
    unloaded: Iterable[LoadableModel] = (),
) -> FastAPI:
    """The application of a server with this engine, with `others` by their models' names, and with `unloaded`."""
    from jaxllm.serving.app import create_app
    from jaxllm.serving.served_model import ServedModel
    from jaxllm.serving.state import Registry

    models = [ServedModel(config.of_model, engine)]
    models += [ServedModel(ModelConfig(model=name), other) for name, other in (others or {}).items()]
    return create_app(
        config.of_server,
        Registry([*map(LoadableModel.loaded, models), *unloaded], any_name=config.serve_any_model_name),
    )


def single_model(config: ServeConfig, engine: Any) -> Registry:
    """The registry of a server with one model, which is loaded."""
    from jaxllm.serving.served_model import ServedModel
    from jaxllm.serving.state import Registry

    model = LoadableModel.loaded(ServedModel(config.of_model, engine))
    return Registry([model], any_name=config.serve_any_model_name)


def serve_engine(config: ServeConfig, engine: Any, listener: socket.socket) -> None:
    """Serve this one engine until a signal."""
    from jaxllm.serving.server import run_server

    run_server(config.of_server, lambda: single_model(config, engine), listener)


if __name__ == "__main__":
    from jaxllm.serving.http.listening import bind

    port, delay, timeout = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    tool_servers = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    lameduck = float(os.environ.get("FAKE_LAMEDUCK", "0"))
    with tempfile.TemporaryDirectory() as data_dir:
        settings = ServeConfig(
            model="fake", port=port, shutdown_timeout=timeout, lameduck=lameduck, mcp_config=tool_servers,
            **({"data_dir": Path(data_dir)} | json.loads(os.environ.get("FAKE_SETTINGS", "{}"))),
        )  # fmt: skip
        serve_engine(settings, FakeEngine(delay=delay), bind(settings.host, settings.port))
    print("stopped", flush=True)
