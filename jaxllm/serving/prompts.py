"""From a conversation to token ids and sampling parameters that fit the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.engine.doors.limits import refuse_text
from jaxllm.errors import ContextLengthError, Field, InvalidRequestError
from jaxllm.requests.sampling import SamplingParams
from jaxllm.serving.constraints import answer_constraint
from jaxllm.serving.conversation import ROLES, Conversation, Message
from jaxllm.serving.generation import Prompt
from jaxllm.serving.generation_settings import GenerationSettings
from jaxllm.serving.parsing.output_format import OutputFormats
from jaxllm.serving.parsing.parser import OutputParser
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState
from jaxllm.serving.thinking import room_for_constraint, thinking_fields
from jaxllm.serving.tool_prompt import has_tool_turns, knows_tools, with_tools_as_text
from jaxllm.text.content_format import in_format
from jaxllm.text.reasoning import opens_reasoning


@dataclass
class Rendered:
    """A conversation as the model gets it, and the formats it answers in."""

    text: str
    token_ids: list[int]
    formats: OutputFormats
    template: str
    """That rendered it."""


@dataclass
class ConversationPrompt:
    """A conversation ready to run, and how to read its answers."""

    prompt: Prompt
    formats: OutputFormats
    conversation: Conversation
    in_reasoning: bool

    def parser(self) -> OutputParser | None:
        """A parser for one answer; None where there is nothing to find but text."""
        tools, formats = self.conversation.tools, self.formats
        outputs = self.prompt.params.structured_outputs
        after = (outputs and outputs.after) or ""
        if not self.conversation.separate_reasoning:
            known = formats.reasoning if tools and after else None
            formats = dataclasses.replace(formats, reasoning=known and known.as_content(opened=self.in_reasoning))
        if formats.reasoning is None and not tools:
            return None
        return OutputParser(
            formats,
            tools=tools,
            in_reasoning=self.in_reasoning,
            parse_tools=bool(tools),
            constrained_after=after,
        )


async def render(
    state: ServerState, model: ServedModel, conversation: Conversation, *, may_be_cut: bool = False
) -> Rendered:
    """The prompt of a conversation, made off the event loop; with `may_be_cut` it need not fit the context.

    The template is rendered where it can be stopped, whoever wrote it.
    Raises InvalidRequestError where the template or a setting refuses.
    """
    conversation = with_defaults(model, conversation)
    values = await state.offload(template_values, model, conversation, may_be_cut=may_be_cut)
    came_along = values["template"] == conversation.rendering.chat_template  # and is no name of one of the checkpoint's
    text = await (state.clients_templates if came_along else state.templates).render(values)
    return await state.offload(_rendered, model, conversation, may_be_cut, values["template"], text)


async def conversation_prompt(
    state: ServerState, model: ServedModel, conversation: Conversation, settings: GenerationSettings
) -> ConversationPrompt:
    """Render, tokenize and check a conversation off the event loop. Raises InvalidRequestError naming the field."""
    refuse_text(model.engine.info.tasks)
    may_be_cut = settings.truncate_prompt_tokens is not None
    conversation = with_defaults(model, conversation)
    rendered = await render(state, model, conversation, may_be_cut=may_be_cut)
    constrained = conversation.tools or conversation.structured_outputs is not None
    offload = state.offload_grammar if constrained else state.offload
    return await offload(_checked, model, conversation, settings, rendered)


def with_defaults(model: ServedModel, conversation: Conversation) -> Conversation:
    """The conversation with the variables that the server's settings give its template."""
    rendering = conversation.rendering.with_defaults(model.config.default_chat_template_kwargs or {})
    return dataclasses.replace(conversation, rendering=rendering)


def template_values(model: ServedModel, conversation: Conversation, *, may_be_cut: bool = False) -> dict[str, Any]:
    """The arguments of `jaxllm.text.chat_template.render`, with the tools where the template wants them.

    Raises ContextLengthError where one message alone is too long.
    """
    for message in conversation.messages:
        model.check_length(message.text, Field("messages"), may_be_cut=may_be_cut)
    tools = conversation.tools
    messages = [message.for_template() for message in conversation.messages]
    arguments = conversation.rendering.template_arguments(model.chat_template)
    if tools:
        arguments["tools"] = [tool.for_template() for tool in tools]
    values = model.tokenizer.chat_template_values(messages, **arguments)
    check_roles(conversation.messages, values["template"])
    tool_format = model.formats(values["template"]).tools
    if tools and tool_format is None:
        raise InvalidRequestError([Field("tools"), " are turned off on this server (tool_call_parser is none)"])
    if tool_format is not None and not knows_tools(values["template"]) and (tools or has_tool_turns(messages)):
        values["messages"] = with_tools_as_text(messages, tools, tool_format)
        values["tools"] = None
    values["messages"] = in_format(values["messages"], values["template"], model.config.chat_template_content_format)
    return values


def check_roles(messages: Sequence[Message], template: str) -> None:
    """Refuse a role that this template would ignore: one that is neither usual nor a string in it."""
    for at, message in enumerate(messages):
        if message.role not in ROLES and not any(f"{quote}{message.role}{quote}" in template for quote in "'\""):
            accepted = f"must be {', '.join(ROLES)}, or a role that the chat template names"
            raise InvalidRequestError([Field("messages", at, "role"), f" is {message.role!r}; it {accepted}"])


def fitted(
    model: ServedModel, token_ids: list[int], params: SamplingParams, settings: GenerationSettings, source: Field
) -> Prompt:
    """Cut a prompt if asked to, check it, and settle max_tokens: as asked, or the default, or the rest of the context.

    `source` is where the prompt comes from. Raises InvalidRequestError naming the field.
    """
    context = model.engine.info.max_model_len
    asked, default, truncate = settings.max_tokens, settings.default_max_tokens, settings.truncate_prompt_tokens
    if truncate is not None:
        keep = truncate if truncate > 0 else max(context - (asked or default or 1), 1)
        token_ids = token_ids[-keep:] if settings.truncation_side == "left" else token_ids[:keep]
    length = len(token_ids)
    room = context - length
    if room < 1:
        message = f" has {length} tokens; the context holds {context}, prompt and completion together"
        raise ContextLengthError([source, message])
    if asked is not None and asked > room and not settings.cut_to_context:
        field = Field("max_tokens")
        raise ContextLengthError(
            [
                field, f" is {asked} and ", source, f" has {length} tokens, {asked + length} together; "
                f"the context holds {context}, so ", field, f" may be at most {room}",
            ]
        )  # fmt: skip
    max_tokens = min(asked or default or room, room)
    params = dataclasses.replace(params, max_tokens=max_tokens)
    try:
        model.engine.check(token_ids, params)
    except InvalidRequestError as error:
        of_prompt = error.param in (None, "prompt")
        raise InvalidRequestError(error.pieces, source if of_prompt else error.field) from None
    return Prompt(token_ids, params, beam_search=settings.beam_search_params(max_tokens))


def sampling_params(model: ServedModel, settings: GenerationSettings, **derived: Any) -> SamplingParams:
    """What the settings ask of this model's sampler. Raises InvalidRequestError when a value is out of range."""
    detokenize = model.engine.tokenizer is not None
    return settings.sampling_params(model.engine.info.default_sampling, detokenize=detokenize, **derived)


def _rendered(model: ServedModel, conversation: Conversation, may_be_cut: bool, template: str, text: str) -> Rendered:
    """`text` is what the template gave."""
    special = conversation.rendering.special_tokens
    token_ids = model.encode(text, Field("messages"), add_special_tokens=special, may_be_cut=may_be_cut)
    return Rendered(text, token_ids, model.formats(template), template)


def _checked(
    model: ServedModel, conversation: Conversation, settings: GenerationSettings, rendered: Rendered
) -> ConversationPrompt:
    formats = rendered.formats
    if formats.channels and formats.reasoning and not conversation.separate_reasoning:
        reason = " is false, but this model writes its reasoning on a channel of its own; it must be true"
        raise InvalidRequestError([Field("separate_reasoning"), reason])
    continued = conversation.messages[-1].text if conversation.rendering.continues_last else ""
    in_reasoning = opens_reasoning(formats.reasoning, rendered.text, continued)
    constraint = answer_constraint(
        conversation, formats, rendered.text, in_reasoning=in_reasoning, special_tokens=model.special_tokens
    )
    thinking = thinking_fields(
        conversation,
        formats.reasoning,
        rendered.template,
        settings.sampling.get("max_thinking_tokens"),
        in_reasoning=in_reasoning,
    )
    if constraint is not None and settings.beam_search is not None:
        raise InvalidRequestError("use_beam_search is not available with tools that constrain the answer", "tools")
    if thinking and settings.beam_search is not None:
        raise InvalidRequestError("use_beam_search is not available with a thinking budget", "use_beam_search")
    predicted = settings.prediction and model.encode(settings.prediction, Field("prediction"), add_special_tokens=False)
    params = sampling_params(
        model,
        settings,
        predicted_token_ids=predicted or (),
        structured_outputs=constraint,
        shown_special_token_ids=model.marker_ids(formats, with_tools=bool(conversation.tools)),
        **thinking,
    )
    prompt = fitted(model, rendered.token_ids, params, settings, Field("messages"))
    params = room_for_constraint(prompt.params, conversation, formats.reasoning, in_reasoning=in_reasoning)
    return ConversationPrompt(dataclasses.replace(prompt, params=params), formats, conversation, in_reasoning)
