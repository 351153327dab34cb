"""An AsyncLLM that streams canned text: the server's shapes, errors and endings are tested without a model.

`python tests/serving/fake_engine.py PORT DELAY SHUTDOWN_TIMEOUT` serves it, for tests that send signals.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxllm.config import ServeConfig
from jaxllm.engine.messages import EngineInfo, EngineStats, TokenDelta
from jaxllm.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxllm.outputs import Logprob
from jaxllm.sampling_params import SamplingParams

BOS = 256
VOCAB_SIZE = 300
CONTEXT = 256
REPLY = "The capital of France is Paris."


class ByteTokenizer:
    """One token a byte; 256 begins a sequence and has no text unless special tokens are shown."""

    vocab_size = VOCAB_SIZE
    chat_template: str | None = "canned"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = b"" if skip_special_tokens else b"<s>"
        return b"".join(bytes([i]) if i < BOS else special for i in ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        if chat_template == "broken":
            raise InvalidRequestError("the chat template refuses these messages", "messages")
        text = "".join(f"[{m['role']}]{m['content']}" for m in messages)
        extra = "".join(f"({k}={v})" for k, v in sorted(kwargs.items()))
        ending = "[assistant]" if add_generation_prompt else "..." if continue_final_message else ""
        return (chat_template or "") + extra + text + ending


class FakeEngine:
    """Streams REPLY (or `reply`) a few characters at a time, `delay` seconds apart, to every choice in turn."""

    def __init__(self, *, delay: float = 0.0, reply: str = REPLY, queue_limit: int = 1000, tokenizer: bool = True):
        self.delay = delay
        self.reply = reply
        self.queue_limit = queue_limit
        self.tokenizer = ByteTokenizer() if tokenizer else None
        self.info = EngineInfo(
            model_name="fake", vocab_size=VOCAB_SIZE, max_model_len=CONTEXT, eos_token_ids=[257], num_pages=100,
            page_size=16, max_num_seqs=8, max_num_batched_tokens=64,
            default_sampling={"temperature": 0.5, "top_k": 40.0},
        )  # fmt: skip
        self.is_dead = False
        self.fail_after: int | None = None
        self.ready = True
        self.active: set[str] = set()
        self.seen: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.hold_back: set[int] = set()
        self.gate: asyncio.Event | None = None

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt_token_ids")
        if max(prompt_token_ids) >= VOCAB_SIZE:
            raise InvalidRequestError(f"token id {max(prompt_token_ids)} is outside the vocabulary", "prompt_token_ids")

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
            ids = list(self.reply.encode())[: params.max_tokens]
            for step, token in enumerate(ids):
                await asyncio.sleep(self.delay)
                for choice in range(params.n):
                    yield choice, self._delta(request_id, prompt_token_ids, params, step, token, len(ids), start)
        finally:
            self.active.discard(request_id)

    def _delta(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        step: int,
        token: int,
        total: int,
        start: float,
    ) -> TokenDelta:
        if self.is_dead:
            raise EngineDeadError("the engine has stopped")
        text = "" if step in self.hold_back else bytes([token]).decode(errors="replace")
        delta = TokenDelta(request_id=request_id, token_ids=[token], text=text, num_cached_tokens=3)
        if self.fail_after == step:
            delta.error, delta.finish_reason = "the pages caught fire", "error"
        if params.logprobs is not None:
            delta.logprobs = [candidates(token, params.logprobs)]
        if step == 0:
            delta.first_scheduled_time = start
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = [None, *(candidates(t, params.prompt_logprobs) for t in prompt[1:])]
        if step == total - 1:
            delta.finish_reason = "stop" if total == len(self.reply.encode()) else "length"
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


def candidates(token: int, count: int) -> list[tuple[int, Logprob]]:
    """The chosen token second-best at -1, with the most likely ones (65, 66, …) around it."""
    top = [(65, Logprob(-0.5, 1, "A")), *((66 + i, Logprob(-2.0 - i, 3 + i, chr(66 + i))) for i in range(count))]
    return [(token, Logprob(-1.0, 2, None)), *[entry for entry in top if entry[0] != token][:count]]


if __name__ == "__main__":
    from jaxllm.serving.server import bind, run_server

    port, delay, timeout = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    settings = ServeConfig(model="fake", port=port, shutdown_timeout=timeout)
    run_server(settings, FakeEngine(delay=delay), bind(settings.host, settings.port))  # type: ignore[arg-type]
    print("stopped", flush=True)
