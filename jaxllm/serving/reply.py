"""The answers to one conversation under way: their sequences, and what their texts mean."""

from __future__ import annotations

from jaxllm.chat.answer import Asked, Told, ToolLoop
from jaxllm.chat.conversation import Conversation
from jaxllm.chat.parser import AnswerReader
from jaxllm.chat.prompt import ConversationPrompt, prepare
from jaxllm.serving.call import Call
from jaxllm.serving.generation import Generation, GenerationSettings, Usage
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.records import Phases
from jaxllm.serving.served_model import ServedModel


class Reply(AnswerReader):
    """A conversation's sequences and the parsers of their texts. Entering `generation` starts it.

    `name` is the client's name for the model.
    """

    def __init__(
        self,
        call: Call,
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
        """The most that each choice may have."""
        max_tokens = self.generation.prompts[0].params.max_tokens
        assert max_tokens is not None
        return max_tokens

    def usage(self) -> Usage:
        """Tokens so far, those of the reasoning among them."""
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
        self._past, self._past_phases = Usage(0, 0), Phases()
        """Of the replies that are over."""

    def abort(self, error: APIError) -> None:
        """Stop now; the client gets the error."""
        self.stop(error)
        if self.reply is not None:
            self.reply.generation.abort(error)

    def usage(self) -> Usage:
        """Of all replies so far."""
        return self._past if self.reply is None else self._past + self.reply.usage()

    def phases(self) -> Phases:
        """Where the time of all replies so far has gone."""
        return self._past_phases if self.reply is None else self._past_phases + self.reply.generation.phases()

    async def enter(self, reply: Reply) -> None:
        """Start the next one."""
        await reply.generation.__aenter__()
        self.reply = reply
        if isinstance(self.ended_by, APIError):
            reply.generation.abort(self.ended_by)

    async def leave(self) -> None:
        """End the one under way, if there is one."""
        if self.reply is not None:
            self._past, self._past_phases = self.usage(), self.phases()
            reply, self.reply = self.reply, None
            await reply.generation.__aexit__()


async def begin_reply(
    call: Call,
    conversation: Conversation,
    settings: GenerationSettings,
    *,
    prefix: str,
    goes_on: bool = False,
) -> Reply:
    """Render, tokenize and check a conversation; nothing runs before the reply's `generation` is entered.

    `prefix` begins the reply's id; with `goes_on` it is
    part of a request that was accepted before, which a server that is stopping finishes.
    Raises APIError, or InvalidRequestError naming the field.
    """
    call.model.check_accepting(goes_on=goes_on)
    prompt = await call.state.prepare(prepare, call.model, conversation, settings)
    return Reply(call, prompt, settings, prefix, goes_on=goes_on)
