"""Answers of a conversation as they come, and the loop that runs their calls and asks again."""

from __future__ import annotations

import asyncio
import math
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from jaxllm.mcp.tools import ToolResult

if TYPE_CHECKING:
    from jaxllm.chat.parser import Piece
    from jaxllm.chat.prompt import ConversationPrompt
    from jaxllm.engine.doors.async_llm import AsyncLLM
    from jaxllm.requests.outputs import RequestOutput

Told = TypeVar("Told")
Asked = TypeVar("Asked")


def read_output(ready: ConversationPrompt, output: RequestOutput) -> None:
    """Divide the texts of a finished request into content, reasoning and calls."""
    from jaxllm.engine.messages import TokenDelta

    reader = ready.reader(len(output.outputs))
    for at, choice in enumerate(output.outputs):
        delta = TokenDelta(request_id=output.request_id, text=choice.text, finish_reason=choice.finish_reason)
        answer, choice.finish_reason = reader.whole(at, [delta])
        choice.text, choice.reasoning, choice.tool_calls = answer.content or "", answer.reasoning, answer.tool_calls


async def speak(
    engine: AsyncLLM, ready: ConversationPrompt, *, priority: int = 0, cache_salt: str | None = None
) -> AsyncGenerator[Piece, None]:
    """The answer of an engine of this process, as it comes; closing the iterator stops it. Raises as AsyncLLM does."""
    from jaxllm.engine.doors.sequences import failure
    from jaxllm.engine.messages import EngineRequest

    prompt = ready.prompt
    request = EngineRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=prompt.token_ids,
        sampling_params=prompt.params,
        priority=priority,
        cache_salt=cache_salt,
        images=prompt.images,
    )
    searches = [] if prompt.beam_search is None else [prompt.beam_search]
    reader = ready.reader(prompt.params.n)
    with engine.run([request], searches=searches) as stream:
        async for gains in stream.arrivals():
            for index, delta in gains:
                if delta.error is not None:
                    raise failure(delta)
                yield reader.parse(index, delta)


class ToolLoop(ABC, Generic[Told, Asked]):
    """The loop of answers and calls; a subclass begins and reads answers, and runs calls.

    Attributes:
        silence: what is told after a time without anything else.
        num_calls: tools that have been run, `most_calls` at most; further calls are refused.
        ended_by: why it was told to stop, once it was.
    """

    silence: Told

    def __init__(self, most_calls: float = math.inf, *, parallel: bool = True):
        """Without `parallel` each call waits for the one before."""
        self.most_calls = most_calls
        self.num_calls = 0
        self.ended_by: Exception | None = None
        self._parallel = parallel
        self._running: dict[asyncio.Task[ToolResult], Asked] = {}

    @abstractmethod
    async def begin_answer(self) -> bool:
        """Begin the next answer, to what the calls gave; false where there is to be none."""

    @abstractmethod
    def read_answer(self, timeout: float | None) -> AsyncIterator[Told]:
        """The answer as it comes, and the calls that it ends with."""

    @abstractmethod
    def calls(self) -> Iterable[Asked]:
        """Those that are to be run before the next answer."""

    @abstractmethod
    async def call(self, asked: Asked) -> ToolResult:
        """Run a call. Failures are told in the result."""

    @abstractmethod
    def ended(self, asked: Asked, result: ToolResult) -> Told:
        """What came of one."""

    def no_call_left(self) -> ToolResult:
        """What comes of calls beyond the most."""
        raise NotImplementedError

    async def turns(self, timeout: float | None = None) -> AsyncGenerator[Told, None]:
        """All that happens, in order; `silence` after `timeout` seconds without anything. Calls may come first."""
        async for told in self._run_calls(timeout):
            yield told
        while await self.begin_answer():
            async for told in self.read_answer(timeout):
                yield told
            async for told in self._run_calls(timeout):
                yield told

    def stop(self, error: Exception) -> None:
        """Run no more calls, and end those that run."""
        self.ended_by = error
        for task in self._running:
            task.cancel()

    async def end_calls(self) -> None:
        tasks, self._running = self._running, {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_calls(self, timeout: float | None) -> AsyncIterator[Told]:
        waiting = deque(self.calls())
        while waiting and self.ended_by is None:
            for asked in [waiting.popleft() for _ in range(len(waiting) if self._parallel else 1)]:
                if self.num_calls < self.most_calls:
                    self.num_calls += 1
                    self._running[asyncio.create_task(self.call(asked))] = asked
                else:
                    yield self.ended(asked, self.no_call_left())
            while self._running:
                done, _ = await asyncio.wait(self._running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield self.silence
                for task in [task for task in self._running if task in done]:
                    asked = self._running.pop(task)
                    if not task.cancelled():
                        yield self.ended(asked, task.result())
