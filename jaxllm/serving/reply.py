"""The answers to one conversation under way: their sequences, and what their texts mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.engine.messages import TokenDelta
from jaxllm.requests.outputs import WeightVersionSpan
from jaxllm.requests.prompt_scores import PromptScores
from jaxllm.serving.conversation import Conversation
from jaxllm.serving.generation import Choice, Generation, Step, Usage
from jaxllm.serving.generation_settings import GenerationSettings
from jaxllm.serving.loadable import Lease
from jaxllm.serving.parsing.events import Content, Event, ToolArguments, ToolCall
from jaxllm.serving.parsing.parsed import ParsedCall, join_events
from jaxllm.serving.prompts import ConversationPrompt, conversation_prompt
from jaxllm.serving.state import ServerState


@dataclass
class Piece:
    """What one choice gained. `logprobs` and `token_ids` are of the tokens that came, whose text may still be held."""

    index: int
    events: list[Event]
    logprobs: Sequence[Step]
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class Answer:
    """One finished choice, whole. `finish_reason` is "tool_calls" where it called any."""

    index: int
    content: str
    reasoning: str | None
    tool_calls: list[ParsedCall]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[Step]
    prompt_logprobs: PromptScores | None
    token_ids: list[int]
    weight_versions: list[WeightVersionSpan]


class Reply:
    """A conversation's sequences and the parsers of their texts. Entering `generation` starts it.

    `name` is what the client calls the model. The lease is the request's, who releases it.
    """

    def __init__(
        self,
        lease: Lease,
        prompt: ConversationPrompt,
        settings: GenerationSettings,
        prefix: str,
        *,
        goes_on: bool = False,
    ):
        self.name = lease.name
        model = lease.model
        self.generation = Generation(lease, [prompt.prompt], settings, prefix, goes_on=goes_on)
        self.token_text = model.token_text
        self.token_bytes = model.token_bytes
        self.system_fingerprint = model.system_fingerprint
        self.must_call = bool(prompt.conversation.tools) and prompt.conversation.tool_choice != "auto"
        """The answer is made of calls, whatever the model would rather say."""
        self._parallel_tool_calls = prompt.conversation.parallel_tool_calls
        self._parsers = [prompt.parser() for _ in range(self.generation.num_choices)]
        self._reasoning_tokens = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.generation.prompts[0].token_ids

    @property
    def max_tokens(self) -> int:
        """The most that each choice may have."""
        max_tokens = self.generation.prompts[0].params.max_tokens
        assert max_tokens is not None
        return max_tokens

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
                self._reasoning_tokens += len(delta.token_ids)
            if finish_reason is not None:
                held = parser.finish(cut=finish_reason == "length")
                events += [event for event in held if not (self.must_call and isinstance(event, Content))]
            if finish_reason == "stop" and parser.num_tool_calls:
                finish_reason = "tool_calls"
            events = [event for event in events if self._is_allowed(event)]
        return Piece(index, events, delta.logprobs or (), delta.token_ids, finish_reason, delta.stop_reason)

    def answer(self, choice: Choice) -> Answer:
        """A choice that nobody streamed."""
        pieces = [self.parse(choice.index, delta) for delta in choice.deltas]
        parsed = join_events(event for piece in pieces for event in piece.events)
        return Answer(
            index=choice.index,
            content=parsed.content or "",
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            finish_reason=pieces[-1].finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=[step for piece in pieces for step in piece.logprobs],
            prompt_logprobs=choice.prompt_logprobs,
            token_ids=choice.token_ids,
            weight_versions=choice.weight_versions,
        )

    def usage(self) -> Usage:
        """Tokens so far, those of the reasoning among them."""
        usage = self.generation.usage()
        usage.reasoning_tokens = self._reasoning_tokens
        return usage

    def _is_allowed(self, event: Event) -> bool:
        match event:
            case ToolCall(index=index) | ToolArguments(index=index):
                return index == 0 or self._parallel_tool_calls
            case _:
                return True


async def begin_reply(
    state: ServerState,
    lease: Lease,
    conversation: Conversation,
    settings: GenerationSettings,
    *,
    prefix: str,
    goes_on: bool = False,
) -> Reply:
    """Render, tokenize and check a conversation; nothing runs before the reply's `generation` is entered.

    `lease` is the request's hold on the model that is to answer; `prefix` begins the reply's id; with `goes_on` it is
    part of a request that was accepted before, which a server that is stopping finishes.
    Raises APIError, or InvalidRequestError naming the field.
    """
    lease.model.check_accepting(goes_on=goes_on)
    prompt = await conversation_prompt(state, lease.model, conversation, settings)
    return Reply(lease, prompt, settings, prefix, goes_on=goes_on)
