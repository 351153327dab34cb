"""What the texts of a conversation's answers mean: content, reasoning and calls, as they come."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxllm.chat.events import Content, Event, ParsedOutput, ToolArguments, ToolCall, join_events
from jaxllm.chat.prompt import ConversationPrompt
from jaxllm.engine.doors.sequences import failure
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.requests.outputs import Logprob, RequestOutput

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM

Step = Sequence[tuple[int, Logprob]]
"""One token's candidates as the engine gives them: the chosen token first, then the most likely ones."""


@dataclass
class Piece:
    """What one choice gained. `logprobs` and `token_ids` are of the tokens that came, whose text may still be held."""

    index: int
    events: list[Event]
    logprobs: Sequence[Step]
    token_ids: list[int]
    finish_reason: str | None
    """"tool_calls" where it called any."""
    stop_reason: int | str | None


class AnswerReader:
    """Reads the choices of the answer to a conversation.

    Attributes:
        must_call: the answer is made of calls, whatever the model would rather say.
        reasoning_tokens: of all choices, so far.
    """

    def __init__(self, prompt: ConversationPrompt, num_choices: int):
        conversation = prompt.conversation
        self.must_call = bool(conversation.tools) and conversation.tool_choice != "auto"
        self.reasoning_tokens = 0
        self._parallel_tool_calls = conversation.parallel_tool_calls
        self._parsers = [prompt.parser() for _ in range(num_choices)]

    def parse(self, index: int, delta: TokenDelta) -> Piece:
        """What a delta of one choice means; each delta is to be given once, in order."""
        parser = self._parsers[index]
        finish_reason = delta.finish_reason
        if parser is None:
            events: list[Event] = [Content(delta.text)] if delta.text else []
        else:
            in_reasoning = parser.in_reasoning
            events = parser.feed(delta.text) if delta.text else []
            if in_reasoning or parser.in_reasoning:
                self.reasoning_tokens += len(delta.token_ids)
            if finish_reason is not None:
                held = parser.finish(cut=finish_reason == "length")
                events += [event for event in held if not (self.must_call and isinstance(event, Content))]
            if finish_reason == "stop" and parser.num_tool_calls:
                finish_reason = "tool_calls"
            events = [event for event in events if self._is_allowed(event)]
        return Piece(index, events, delta.logprobs or (), delta.token_ids, finish_reason, delta.stop_reason)

    def whole(self, index: int, deltas: Iterable[TokenDelta]) -> tuple[ParsedOutput, str | None]:
        """All of one choice, and its finish reason."""
        pieces = [self.parse(index, delta) for delta in deltas]
        return join_events(event for piece in pieces for event in piece.events), pieces[-1].finish_reason

    def _is_allowed(self, event: Event) -> bool:
        match event:
            case ToolCall(index=index) | ToolArguments(index=index):
                return index == 0 or self._parallel_tool_calls
            case _:
                return True


def read_output(ready: ConversationPrompt, output: RequestOutput) -> None:
    """Part the texts of a finished request into content, reasoning and calls."""
    reader = AnswerReader(ready, len(output.outputs))
    for at, choice in enumerate(output.outputs):
        delta = TokenDelta(request_id=output.request_id, text=choice.text, finish_reason=choice.finish_reason)
        answer, choice.finish_reason = reader.whole(at, [delta])
        choice.text, choice.reasoning, choice.tool_calls = answer.content or "", answer.reasoning, answer.tool_calls


async def speak(
    engine: AsyncLLM, ready: ConversationPrompt, *, priority: int = 0, cache_salt: str | None = None
) -> AsyncGenerator[Piece, None]:
    """The answer of an engine of this process, as it comes; closing the iterator stops it.

    Raises QueueFullError, EngineDeadError, or what `failure` makes of a request that fails.
    """
    prompt = ready.prompt
    request = EngineRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=prompt.token_ids,
        sampling_params=prompt.params,
        priority=priority,
        cache_salt=cache_salt,
    )
    searches = [] if prompt.beam_search is None else [prompt.beam_search]
    reader = AnswerReader(ready, prompt.params.n)
    with engine.run([request], searches=searches) as stream:
        async for gains in stream.arrivals():
            for index, delta in gains:
                if delta.error is not None:
                    raise failure(delta)
                yield reader.parse(index, delta)
