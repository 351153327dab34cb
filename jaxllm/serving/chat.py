"""One chat request under way: its sequences, and what their texts mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.engine.front.messages import TokenDelta
from jaxllm.serving.generation import Choice, Generation
from jaxllm.serving.http.request_model import Usage
from jaxllm.serving.openai.chat_request import ChatRequest
from jaxllm.serving.openai.logprobs import Step, numbered
from jaxllm.serving.parsing.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.serving.parsing.parser import ParsedCall, join_events
from jaxllm.serving.prompts import ChatPrompt, chat_prompt, render_own_template
from jaxllm.serving.state import ServerState


@dataclass
class ChatPiece:
    """What one choice gained. `logprobs` and `token_ids` are of the tokens that came, whose text may still be held."""

    index: int
    events: list[Event]
    logprobs: Sequence[Step]
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class ChatAnswer:
    """One finished choice, whole. `finish_reason` is "tool_calls" where it called any."""

    index: int
    content: str | None
    reasoning: str | None
    tool_calls: list[ParsedCall]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[Step]
    prompt_logprobs: Sequence[Step | None] | None
    token_ids: list[int]


class ChatTurn:
    """A chat's sequences and the parsers of their texts. Entering `generation` starts it."""

    def __init__(self, state: ServerState, model: str, body: ChatRequest, prompt: ChatPrompt, kind: str):
        self.model = model
        self.body = body
        self.generation = Generation(state, [prompt.prompt], body, kind)
        self._parsers = [prompt.parser() for _ in range(self.generation.num_choices)]
        self._reasoning_tokens = 0
        self.token_text = state.token_text

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.generation.prompts[0].token_ids

    def parse(self, index: int, delta: TokenDelta) -> ChatPiece:
        """What a delta of one choice means; each delta is to be given once, in order."""
        parser = self._parsers[index]
        finish_reason = delta.finish_reason
        logprobs: Sequence[Step] = delta.logprobs or ()
        if self.body.return_tokens_as_token_ids:
            logprobs = numbered(logprobs)
        if parser is None:
            events: list[Event] = [Content(delta.text)] if delta.text else []
        else:
            in_reasoning = parser.in_reasoning
            events = parser.feed(delta.text) if delta.text else []
            if in_reasoning or parser.in_reasoning:
                self._reasoning_tokens += len(delta.token_ids)
            if finish_reason is not None:
                events += parser.finish()
            if finish_reason == "stop" and parser.num_tool_calls:
                finish_reason = "tool_calls"
            events = [event for event in events if self._is_shown(event)]
        return ChatPiece(index, events, logprobs, delta.token_ids, finish_reason, delta.stop_reason)

    def answer(self, choice: Choice) -> ChatAnswer:
        """A choice that nobody streamed."""
        pieces = [self.parse(choice.index, delta) for delta in choice.deltas]
        parsed = join_events(event for piece in pieces for event in piece.events)
        content = self.body.echoed + (parsed.content or "")
        return ChatAnswer(
            index=choice.index,
            content=None if parsed.tool_calls and not content else content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            finish_reason=pieces[-1].finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=[step for piece in pieces for step in piece.logprobs],
            prompt_logprobs=choice.prompt_logprobs,
            token_ids=choice.token_ids,
        )

    def usage(self) -> Usage:
        """Tokens so far, those of the reasoning among them."""
        usage = self.generation.usage()
        usage.completion_tokens_details.reasoning_tokens = self._reasoning_tokens
        return usage

    def _is_shown(self, event: Event) -> bool:
        match event:
            case Reasoning():
                return self.body.include_reasoning
            case ToolCall(index=index) | ToolArguments(index=index):
                return index == 0 or self.body.parallel_tool_calls
            case _:
                return True


async def begin_chat(state: ServerState, body: ChatRequest, *, kind: str = "chatcmpl") -> ChatTurn:
    """Render, tokenize and check a chat off the event loop; nothing runs before `generation` is entered.

    Raises APIError or InvalidRequestError naming the field.
    """
    model = state.resolve_model(body.model)
    state.check_accepting()
    text = await render_own_template(state, body.messages, body, body.active_tools)
    prompt = await state.offload(chat_prompt, state, body, text)
    return ChatTurn(state, model, body, prompt, kind)
