"""An AsyncLLM that streams canned text: the server's shapes, errors and endings are tested without a model.

`python tests/serving/fake_engine.py PORT DELAY SHUTDOWN_TIMEOUT` serves it, for tests that send signals.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxllm.config import ServeConfig
from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.front.messages import EngineInfo, EngineStats, TokenDelta
from jaxllm.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxllm.requests.outputs import Logprob, PooledOutput
from jaxllm.requests.pooling import PoolingParams
from jaxllm.requests.sampling import SamplingDefaults, SamplingParams
from jaxllm.requests.tasks import ModelTasks
from jaxllm.text.tokenizer import Tokenizer

BOS = 256
VOCAB_SIZE = 300
CONTEXT = 256
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

    def __init__(self, chat_template: str | None = TEMPLATE):
        letters = byte_letters()
        backend = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", *MARKERS)])
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        super().__init__(
            backend,
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            templates={} if chat_template is None else {"default": chat_template},
        )
        self.vocab_size = VOCAB_SIZE


def byte_letters() -> list[str]:
    """The letter that ByteLevel spells each byte with: itself where it is printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class SaidToken(NamedTuple):
    candidates: list[tuple[int, Logprob]]
    text: str
    finish_reason: str | None


class FakeEngine:
    """Streams REPLY (or `reply`) a few characters at a time, `delay` seconds apart, to every choice in turn."""

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
        self.queue_limit = queue_limit
        self.tokenizer = ByteTokenizer() if tokenizer else None
        self.info = EngineInfo(
            model_name="fake", vocab_size=VOCAB_SIZE, max_model_len=CONTEXT, eos_token_ids=[257], num_pages=100,
            page_size=16, max_num_seqs=8, max_num_batched_tokens=64, hidden_size=HIDDEN_SIZE,
            tasks=tasks or ModelTasks(), default_sampling=SamplingDefaults(temperature=0.5, top_k=40),
        )  # fmt: skip
        self.is_dead = False
        self.fail_after: int | None = None
        self.ready = True
        self.active: set[str] = set()
        self.seen: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.pooled: list[tuple[list[int], PoolingParams, dict[str, Any]]] = []
        self.most_active = 0
        self.hold_back: set[int] = set()
        self.replies: list[str] | None = None
        """What the choices say, in turn, instead of `reply`."""
        self.logprobs = [-1.0]
        """Log-probability of the choices' tokens, in turn."""
        self.next_tokens: Callable[[list[int]], list[tuple[int, Logprob]]] | None = None
        """The most likely tokens after some ids, best first: what is said then, instead of replies."""
        self.gate: asyncio.Event | None = None

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt_token_ids")
        outside = next((token for token in prompt_token_ids if not 0 <= token < VOCAB_SIZE), None)
        if outside is not None:
            raise InvalidRequestError(f"token id {outside} is outside the vocabulary", "prompt_token_ids")

    async def stream(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[tuple[int, TokenDelta]]:
        self.seen.append((prompt_token_ids, params, {"priority": priority, "cache_salt": cache_salt}))
        if self.is_dead:
            raise EngineDeadError("the engine has stopped")
        if len(self.active) >= self.queue_limit:
            raise QueueFullError(f"{len(self.active)} requests are waiting, the most there may be")
        assert request_id is not None and request_id not in self.active
        self.active.add(request_id)
        try:
            start = time.time()
            if self.gate is not None:
                await self.gate.wait()
            said = [self._sequence(prompt_token_ids, params, choice) for choice in range(params.n)]
            for step in range(max(len(tokens) for tokens in said)):
                await asyncio.sleep(self.delay)
                for choice, tokens in enumerate(said):
                    if step < len(tokens):
                        yield choice, self._delta(request_id, prompt_token_ids, params, step, tokens, start)
        finally:
            self.active.discard(request_id)

    async def pool(
        self,
        prompt_token_ids: list[int],
        pooling: PoolingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> PooledOutput:
        """Values of `hidden_states`; the logits are those of the first rows of HEAD where the model classifies."""
        self.check(prompt_token_ids, SamplingParams())
        self.pooled.append((prompt_token_ids, pooling, {"priority": priority, "cache_salt": cache_salt}))
        if self.is_dead:
            raise EngineDeadError("the engine has stopped")
        if len(self.active) >= self.queue_limit:
            raise QueueFullError(f"{len(self.active)} requests are waiting, the most there may be")
        assert request_id not in self.active
        self.active.add(request_id)
        self.most_active = max(self.most_active, len(self.active))
        try:
            await asyncio.sleep(self.delay)
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.active.discard(request_id)
        states = hidden_states(prompt_token_ids)
        rows = list(pooling.token_ids) or range(len(self.info.tasks.labels) or VOCAB_SIZE)
        values = {
            "last": states[-1], "cls": states[0], "mean": states.mean(axis=0), "logits": HEAD[rows] @ states[-1],
        }[pooling.kind]  # fmt: skip
        return PooledOutput(values.astype(np.float32), 3)

    def _sequence(self, prompt: list[int], params: SamplingParams, choice: int) -> list[SaidToken]:
        """All that one choice says."""
        if self.next_tokens is not None:
            steps = self._likeliest(prompt, params)
            finish_reason = "stop" if steps[-1][0][0] in self.info.eos_token_ids else "length"
        else:
            reply = self.reply if self.replies is None else self.replies[choice % len(self.replies)]
            ids = list(reply.encode()) if self.tokenizer is None else self.tokenizer.encode(reply, False)
            finish_reason = "stop" if params.max_tokens is None or len(ids) <= params.max_tokens else "length"
            logprob = self.logprobs[choice % len(self.logprobs)]
            steps = [candidates(token, params.logprobs or 0, logprob) for token in ids[: params.max_tokens]]
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer.backend,
                prompt,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_token_ids=params.shown_special_token_ids,
            )
        said, held = [], ""
        for at, step in enumerate(steps):
            last = at == len(steps) - 1
            held += detokenizer.add(step[0][0])[0] if detokenizer else ""
            shown = "" if at in self.hold_back and not last else held
            held = held.removeprefix(shown)
            said.append(SaidToken(step, shown, finish_reason if last else None))
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

    def _delta(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        step: int,
        said: list[SaidToken],
        start: float,
    ) -> TokenDelta:
        if self.is_dead:
            raise EngineDeadError("the engine has stopped")
        token = said[step]
        delta = TokenDelta(
            request_id=request_id,
            token_ids=[token.candidates[0][0]],
            text=token.text,
            finish_reason=token.finish_reason,
            num_cached_tokens=3,
        )
        if self.fail_after == step:
            delta.error, delta.finish_reason = "the pages caught fire", "error"
        if params.logprobs is not None:
            delta.logprobs = [token.candidates]
        if step == 0:
            delta.first_scheduled_time = start
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = [None, *(candidates(t, params.prompt_logprobs) for t in prompt[1:])]
        return delta

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.active), num_pages=100, num_free_pages=100 - len(self.active), page_size=16,
            prompt_tokens=11, generation_tokens=22, num_steps=4, step_host_seconds=0.002, step_device_wait_seconds=0.4,
            scheduled_tokens={"decode-4": 30}, padded_tokens={"decode-4": 10}, compiles_foreseen=3,
            compiles_unforeseen=1, compile_seconds=7.5, prefix_cache_queries=50, prefix_cache_hits=20,
            num_preemptions=2, ready=self.ready,
        )  # fmt: skip

    def shutdown(self) -> None:
        self.is_dead = True


def hidden_states(token_ids: list[int]) -> np.ndarray:
    return np.cumsum(HIDDEN[token_ids], axis=0)


def candidates(token: int, count: int, logprob: float = -1.0) -> list[tuple[int, Logprob]]:
    """The chosen token second-best at -1, or as told, with the most likely ones (65, 66, …) around it."""
    top = [(65, Logprob(-0.5, 1, "A")), *((66 + i, Logprob(-2.0 - i, 3 + i, chr(66 + i))) for i in range(count))]
    return [(token, Logprob(logprob, 2, None)), *[entry for entry in top if entry[0] != token][:count]]


if __name__ == "__main__":
    from jaxllm.serving.server import bind, run_server

    port, delay, timeout = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    settings = ServeConfig(model="fake", port=port, shutdown_timeout=timeout)
    run_server(settings, FakeEngine(delay=delay), bind(settings.host, settings.port))  # type: ignore[arg-type]
    print("stopped", flush=True)
