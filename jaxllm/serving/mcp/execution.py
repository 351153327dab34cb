"""The loop of a conversation whose tools the server runs: an answer, its calls, their results, the next answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from jaxllm.errors import ContextLengthError
from jaxllm.mcp.results import as_data, cut
from jaxllm.mcp.tools import ToolResult
from jaxllm.serving.conversation import Call, Conversation, Message
from jaxllm.serving.generation import Usage
from jaxllm.serving.generation_settings import GenerationSettings
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.loadable import Lease
from jaxllm.serving.mcp.runs import ToolRun, ToolRuns
from jaxllm.serving.parsing.events import Content, Event, Reasoning
from jaxllm.serving.parsing.parsed import ParsedOutput, join_events
from jaxllm.serving.reply import Reply, begin_reply
from jaxllm.serving.state import ServerState

SHORTEST_RESULT = 200
"""Characters: a context that does not hold so much of each result either is full."""
BETWEEN = "\n\n"
"""What stands between the texts of two answers."""


@dataclass
class Ended:
    """The last answer's end."""

    finish_reason: str
    stop_reason: int | str | None = None


Happening = Content | Reasoning | ToolRun | Ended


class Execution:
    """An async context, as a Generation is: entering begins the first answer, leaving ends whatever runs.

    `reply` is the first answer's; to the client its id is that of all of them.
    """

    def __init__(
        self,
        state: ServerState,
        lease: Lease,
        reply: Reply,
        conversation: Conversation,
        settings: GenerationSettings,
        *,
        max_turns: int,
        max_calls: int,
    ):
        self.id = reply.generation.id
        self.reply = reply
        self._state = state
        self._lease = lease
        self._conversation = conversation
        self._settings = settings
        self._max_turns = max_turns
        self._runs = ToolRuns(state.tool_servers, {tool.name for tool in conversation.tools}, max_calls)
        self._replies = [reply]
        self._running: Reply | None = None
        self._ended_by: APIError | None = None
        self._model = lease.model

    async def __aenter__(self) -> Execution:
        await self._enter(self.reply)
        self._model.running.discard(self.reply.generation)
        self._model.running.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._model.running.discard(self)
        await self._runs.close()
        await self._leave()

    def abort(self, error: APIError) -> None:
        """Stop now; the client gets the error."""
        self._ended_by = error
        self._runs.cancel()
        if self._running is not None:
            self._running.generation.abort(error)

    def usage(self) -> Usage:
        """Of all answers together."""
        return sum((reply.usage() for reply in self._replies), Usage(0, 0))

    async def arrivals(self, timeout: float | None = None) -> AsyncIterator[list[tuple[int, Happening]]]:
        """What happens, in order, all of choice 0; an empty list after `timeout` seconds of silence."""
        while True:
            events: list[Event] = []
            ended = Ended("abort")
            async for gains in self._replies[-1].generation.arrivals(timeout):
                pieces = [self._replies[-1].parse(index, delta) for index, delta in gains]
                new = [event for piece in pieces for event in piece.events]
                events += new
                for piece in pieces:
                    if piece.finish_reason is not None:
                        ended = Ended(piece.finish_reason, piece.stop_reason)
                said = [event for event in new if isinstance(event, Content | Reasoning)]
                if said or not gains:
                    yield [(0, event) for event in said]
            if ended.finish_reason != "tool_calls":
                break
            await self._leave()
            answer = join_events(events)
            runs = self._runs.begin(answer.tool_calls)
            yield [(0, run) for run in runs]
            async for run in self._runs.ended(timeout):
                yield [] if run is None else [(0, run)]
            if self._ended_by is not None:
                raise self._ended_by
            left = self._tokens_left()
            if left == 0:
                ended = Ended("length")
                break
            await self._next_answer(answer, runs, left)
            if answer.content:
                yield [(0, Content(BETWEEN))]
        yield [(0, ended)]

    def _tokens_left(self) -> int | None:
        """Of the request's max_tokens, which all answers share."""
        if self._settings.max_tokens is None:
            return None
        return max(self._settings.max_tokens - self.usage().completion_tokens, 0)

    async def _next_answer(self, answer: ParsedOutput, runs: Sequence[ToolRun], left: int | None) -> None:
        """Begin the answer to the results. Raises ContextLengthError where the context holds no part of them."""
        turn = len(self._replies) + 1
        asked = self._settings.request_id
        settings = dataclasses.replace(
            self._settings, max_tokens=left, request_id=None if asked is None else f"{asked}-{turn}"
        )
        longest = max(len(run.result.text) for run in runs if run.result is not None)
        while True:
            conversation = self._with_results(answer, runs, longest, last=turn >= self._max_turns)
            try:
                reply = await begin_reply(
                    self._state, self._lease, conversation, settings, prefix="chatcmpl-", goes_on=True
                )
                break
            except ContextLengthError:
                longest //= 2
                if longest < SHORTEST_RESULT:
                    raise
        self._conversation = conversation
        self._replies.append(reply)
        await self._enter(reply)

    def _with_results(self, answer: ParsedOutput, runs: Sequence[ToolRun], longest: int, *, last: bool) -> Conversation:
        calls = [Call(run.call.id, run.call.name, _arguments(run.call.arguments)) for run in runs]
        said = Message("assistant", answer.content or "", answer.reasoning, calls)
        special = list(self._model.special_tokens)
        results = []
        for run in runs:
            assert run.result is not None
            result = ToolResult(cut(run.result.text, longest), run.result.error)
            results.append(Message("tool", as_data(run.call.name, result, special), call_id=run.call.id))
        return dataclasses.replace(
            self._conversation,
            messages=[*self._conversation.messages, said, *results],
            tools=[] if last or self._runs.exhausted else self._conversation.tools,
            tool_choice="auto",
        )

    async def _enter(self, reply: Reply) -> None:
        await reply.generation.__aenter__()
        self._running = reply
        if self._ended_by is not None:
            reply.generation.abort(self._ended_by)

    async def _leave(self) -> None:
        reply, self._running = self._running, None
        if reply is not None:
            await reply.generation.__aexit__()


def _arguments(text: str) -> dict[str, object]:
    """As templates show them: of a call that was refused as malformed there are none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
