"""A response's items and settings as a conversation."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from jaxllm.chat.conversation import Conversation, Message, Rendering, thinking_variables
from jaxllm.errors import Field
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.serving.generation import GenerationSettings
from jaxllm.serving.openai.structured import JSONObjectFormat
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.messages import spoken
from jaxllm.serving.responses.offers import Offer
from jaxllm.serving.responses.request import PromptFields, ResponseRequest, TextSchemaFormat


class Translation:
    """One request's way to a conversation, and the way back of the errors.

    `context` is all that is said, oldest first; its end, `own`, is what the request itself brings, but for what the
    response has put out by then.
    """

    def __init__(
        self,
        body: PromptFields,
        context: Sequence[Item],
        own: Sequence[Item],
        offer: Offer,
        special_tokens: Collection[str],
    ):
        self._body = body
        self._context = context
        self._offer = offer
        self._special_tokens = special_tokens
        self._places = {id(item): at for at, item in enumerate(own)} if not isinstance(body.input, str) else {}
        self._origins: list[Item | None] = []
        """The item that each message begins with."""

    def conversation(self) -> Conversation:
        """Raises InvalidRequestError: see `name`."""
        said = spoken(self._context, self._special_tokens)
        self._origins = [one.origin for one in said]
        messages = [one.message for one in said]
        if self._body.instructions is not None:
            self._origins.insert(0, None)
            messages.insert(0, Message("system", self._body.instructions))
        return Conversation(
            messages=messages,
            tools=self._offer.tools,
            tool_choice=self._offer.choice,
            parallel_tool_calls=self._body.parallel_tool_calls,
            rendering=_rendering(self._body),
            structured_outputs=_constraint(self._body),
        )

    def name(self, place: Field) -> Field:
        """What the request calls a place of its Conversation or GenerationSettings."""
        match place.path:
            case ("messages", int(at), *rest):
                origin = self._places.get(id(self._origins[at]))
                return Field("input") if origin is None else Field("input", origin, *rest)
            case ("messages", *_):
                return Field("input")
            case ("max_tokens",):
                return Field("max_output_tokens")
            case ("structured_outputs",):
                return Field("text", "format")
            case _:
                return place


def generation_settings(body: ResponseRequest) -> GenerationSettings:
    return GenerationSettings(
        sampling=body.sampling(),
        max_tokens=body.max_output_tokens,
        logprobs=body.logprobs_count,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def _rendering(body: PromptFields) -> Rendering:
    effort = body.reasoning.effort if body.reasoning is not None else None
    budget = body.max_thinking_tokens if isinstance(body, ResponseRequest) else None
    return Rendering(variables=thinking_variables(None, effort, budget) | (body.chat_template_kwargs or {}))


def _constraint(body: PromptFields) -> StructuredOutputs | None:
    match body.text.format if body.text is not None else None:
        case JSONObjectFormat():
            return StructuredOutputs(json_object=True)
        case TextSchemaFormat(schema_=schema):
            return StructuredOutputs(json=json.dumps(schema))
        case _:
            return None
