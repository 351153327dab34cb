"""From a conversation to token ids and sampling parameters that fit the context, in one call for one thread."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.chat.constraint import answer_constraint, room_for_constraint, thinking_fields
from jaxllm.chat.conversation import ROLES, Conversation, Message, Tool
from jaxllm.chat.events import OutputFormats, ToolFormat
from jaxllm.chat.model import ChatModel
from jaxllm.chat.parser import OutputParser
from jaxllm.engine.doors.beams import BeamSearchParams
from jaxllm.engine.doors.limits import check_request, refuse_text
from jaxllm.errors import ContextLengthError, Field, InvalidRequestError
from jaxllm.requests.sampling import SamplingDefaults, SamplingParams
from jaxllm.text.chat_template import in_format
from jaxllm.text.reasoning import opens_reasoning

_INSTRUCTIONS = """You can call functions. Each line describes one, with a JSON schema of its arguments:
{functions}
To call a function, answer with nothing but its name and arguments, written exactly like this:
{example}
When no function helps, answer the user in plain text."""
"""For models whose template knows no tools, as in llama.cpp's generic format: any instructed model can write JSON that
its prompt asks for."""


@dataclass(frozen=True)
class BeamSearch:
    """A search for the most likely texts instead of sampling."""

    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are generated, whoever asks.

    Attributes:
        sampling: fields of SamplingParams that the caller set, by name; the others are the model's.
        max_tokens: upper bound on generated tokens; None is `default_max_tokens`, or what is left of the context.
        cut_to_context: a max_tokens that the context has no room for is cut to it, not refused.
        n: choices to return for each prompt, the best of `num_generated`.
        truncate_prompt_tokens: keep only this many prompt tokens; -1 keeps what leaves room for max_tokens.
        truncation_side: the end of the prompt that is cut off.
        prediction: what the answer may well be, or have in it.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    cut_to_context: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    num_generated: int = 1
    beam_search: BeamSearch | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    prediction: str = ""

    def beam_search_params(self, max_tokens: int) -> BeamSearchParams | None:
        """The search that is asked for; None to sample."""
        if self.beam_search is None:
            return None
        return BeamSearchParams(
            beam_width=self.num_generated,
            max_tokens=max_tokens,
            length_penalty=self.beam_search.length_penalty,
            ignore_eos=bool(self.sampling.get("ignore_eos")),
            early_stopping=self.beam_search.early_stopping,
        )

    def sampling_params(self, defaults: SamplingDefaults, **derived: Any) -> SamplingParams:
        """The caller's values, else the model's `defaults`, else OpenAI's; `derived` are ours.

        Raises InvalidRequestError when a value is out of range.
        """
        fields = {**defaults.fields(), **self.sampling}
        fields |= {"max_tokens": self.max_tokens, "logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        if self.beam_search is not None and self.logprobs == -1:
            raise InvalidRequestError(
                [Field("logprobs"), " is -1, the whole vocabulary, which beam search cannot give"]
            )
        if self.beam_search is not None:  # the search ranks its own beams and returns n
            return SamplingParams(**fields | {"n": self.n} | derived)
        if self.num_generated > self.n and self.logprobs is None:
            fields["logprobs"] = 0  # what the choices are ranked by
        return SamplingParams(**fields | {"n": self.num_generated} | derived)


@dataclass
class Prompt:
    """One tokenized prompt and the parameters of its sequences; `text` is what an echo shows.

    With `beam_search` the sequences are searched for instead of sampled.
    """

    token_ids: list[int]
    params: SamplingParams
    text: str = ""
    beam_search: BeamSearchParams | None = None


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
            formats, tools=tools, in_reasoning=self.in_reasoning, parse_tools=bool(tools), constrained_after=after
        )


def prepare(model: ChatModel, conversation: Conversation, settings: AnswerSettings) -> ConversationPrompt:
    """Render, tokenize and check a conversation, and compile what its answer must match: work for a thread.

    Raises InvalidRequestError naming the field.
    """
    refuse_text(model.engine.info.tasks)
    conversation = model.with_defaults(conversation)
    rendered = render(model, conversation, may_be_cut=settings.truncate_prompt_tokens is not None)
    formats = rendered.formats
    if formats.channels and formats.reasoning and not conversation.separate_reasoning:
        reason = " is false, but this model writes its reasoning on a channel of its own; it must be true"
        raise InvalidRequestError([Field("separate_reasoning"), reason])
    in_reasoning, derived = _derived(model, conversation, rendered, settings.sampling.get("max_thinking_tokens"))
    if derived["structured_outputs"] is not None and settings.beam_search is not None:
        raise InvalidRequestError("use_beam_search is not available with tools that constrain the answer", "tools")
    if "max_thinking_tokens" in derived and settings.beam_search is not None:
        raise InvalidRequestError("use_beam_search is not available with a thinking budget", "use_beam_search")
    predicted = settings.prediction and model.encode(settings.prediction, Field("prediction"), add_special_tokens=False)
    params = sampling_params(
        model,
        settings,
        predicted_token_ids=predicted or (),
        shown_special_token_ids=model.marker_ids(formats, with_tools=bool(conversation.tools)),
        **derived,
    )
    prompt = fitted(model, rendered.token_ids, params, settings, Field("messages"))
    params = room_for_constraint(prompt.params, conversation, formats.reasoning, in_reasoning=in_reasoning)
    return ConversationPrompt(dataclasses.replace(prompt, params=params), formats, conversation, in_reasoning)


def prepare_params(model: ChatModel, conversation: Conversation, params: SamplingParams) -> ConversationPrompt:
    """The same with parameters that are whole, as notebooks have them; the engine's limits are yet to be checked.

    Special tokens that mark reasoning are shown only if the answer is read.
    """
    rendered = render(model, conversation)
    in_reasoning, derived = _derived(model, conversation, rendered, params.max_thinking_tokens)
    if params.thinking_markers is not None:
        derived = {"structured_outputs": derived["structured_outputs"]}
    if conversation.tools or conversation.separate_reasoning:
        markers = model.marker_ids(rendered.formats, with_tools=bool(conversation.tools))
        derived["shown_special_token_ids"] = [*params.shown_special_token_ids, *markers]
    params = dataclasses.replace(params, **derived)
    params = room_for_constraint(params, conversation, rendered.formats.reasoning, in_reasoning=in_reasoning)
    prompt = Prompt(rendered.token_ids, params, rendered.text)
    return ConversationPrompt(prompt, rendered.formats, conversation, in_reasoning)


def render(model: ChatModel, conversation: Conversation, *, may_be_cut: bool = False) -> Rendered:
    """The prompt of a conversation; with `may_be_cut` it need not fit the context.

    Raises InvalidRequestError where the template or a setting refuses.
    """
    values = _template_values(model, conversation, may_be_cut=may_be_cut)
    text, template = model.render(values), values["template"]
    special = conversation.rendering.special_tokens
    token_ids = model.encode(text, Field("messages"), add_special_tokens=special, may_be_cut=may_be_cut)
    return Rendered(text, token_ids, model.formats(template), template)


def fitted(
    model: ChatModel, token_ids: list[int], params: SamplingParams, settings: AnswerSettings, source: Field
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
        check_request(model.engine.info, model.engine.tokenizer, token_ids, params)
    except InvalidRequestError as error:
        of_prompt = error.param in (None, "prompt")
        raise InvalidRequestError(error.pieces, source if of_prompt else error.field) from None
    return Prompt(token_ids, params, beam_search=settings.beam_search_params(max_tokens))


def sampling_params(model: ChatModel, settings: AnswerSettings, **derived: Any) -> SamplingParams:
    """What the settings ask of this model's sampler. Raises InvalidRequestError when a value is out of range."""
    detokenize = model.engine.tokenizer is not None
    return settings.sampling_params(model.engine.info.default_sampling, detokenize=detokenize, **derived)


def _derived(
    model: ChatModel, conversation: Conversation, rendered: Rendered, max_thinking_tokens: int | None
) -> tuple[bool, dict[str, Any]]:
    """Whether answers begin in their reasoning, and the fields of SamplingParams that follow from the conversation."""
    reasoning = rendered.formats.reasoning
    continued = conversation.messages[-1].text if conversation.rendering.continues_last else ""
    in_reasoning = opens_reasoning(reasoning, rendered.text, continued)
    constraint = answer_constraint(
        conversation, rendered.formats, rendered.text, in_reasoning=in_reasoning, special_tokens=model.special_tokens
    )
    thinking = thinking_fields(
        conversation, reasoning, rendered.template, max_thinking_tokens, in_reasoning=in_reasoning
    )
    return in_reasoning, {"structured_outputs": constraint, **thinking}


def _template_values(model: ChatModel, conversation: Conversation, *, may_be_cut: bool) -> dict[str, Any]:
    """The arguments of `jaxllm.text.chat_template.render`, with the tools where the template wants them.

    Raises ContextLengthError where one message alone is too long.
    """
    for message in conversation.messages:
        model.check_length(message.text, Field("messages"), may_be_cut=may_be_cut)
    tools = conversation.tools
    messages = [message.for_template() for message in conversation.messages]
    arguments = model.with_defaults(conversation).rendering.template_arguments(model.chat_template)
    if tools:
        arguments["tools"] = [tool.for_template() for tool in tools]
    values = model.tokenizer.chat_template_values(messages, **arguments)
    template = values["template"]
    _check_roles(conversation.messages, template)
    tool_format = model.formats(template).tools
    if tools and tool_format is None:
        raise InvalidRequestError([Field("tools"), " are turned off (tool_call_parser is none)"])
    if tool_format is not None and "tools" not in template and (tools or _has_tool_turns(conversation, messages)):
        values["messages"] = _with_tools_as_text(messages, tools, tool_format)
        values["tools"] = None
    values["messages"] = in_format(values["messages"], template, model.content_format)
    return values


def _has_tool_turns(conversation: Conversation, messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the conversation has calls or results that its template may not know; a notebook's may be meant so."""
    if not conversation.separate_reasoning and any(message.given is not None for message in conversation.messages):
        return False
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _check_roles(messages: Sequence[Message], template: str) -> None:
    """Refuse a role that this template would ignore: one that is neither usual nor a string in it."""
    for at, message in enumerate(messages):
        if message.role in ROLES or message.given is not None:
            continue
        if not any(f"{quote}{message.role}{quote}" in template for quote in "'\""):
            accepted = f"must be {', '.join(ROLES)}, or a role that the chat template names"
            raise InvalidRequestError([Field("messages", at, "role"), f" is {message.role!r}; it {accepted}"])


def _with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation with instructions for `tools` in its system message, or else in its first user message.

    Calls become text of the assistant, results text of the user, so that roles alternate as templates want them.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", f"Result of {message.get('name', 'the function')}: {text}"
        elif "tool_calls" in message:
            text = "\n".join(filter(None, (text, _calls_text(message["tool_calls"], tool_format))))
        if plain and plain[-1]["role"] == role == "user":
            plain[-1]["content"] += f"\n{text}"
        else:
            kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
            plain.append({**kept, "role": role, "content": text})
    if not tools:
        return plain
    functions = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
    example = {"function": {"name": "function_name", "arguments": {"argument": "value"}}}
    instructions = _INSTRUCTIONS.format(functions=functions, example=_calls_text([example], tool_format))
    for message in plain:
        if message["role"] == "system":
            message["content"] += f"\n\n{instructions}"
            return plain
    for message in plain:
        if message["role"] == "user":
            message["content"] = f"{instructions}\n\n{message['content']}"
            return plain
    return [{"role": "user", "content": instructions}, *plain]


def _calls_text(calls: Sequence[dict[str, Any]], tool_format: ToolFormat) -> str:
    """Calls as a model of this format writes them."""
    written = (
        tool_format.head(call["function"]["name"], at)
        + json.dumps(call["function"]["arguments"], ensure_ascii=False)
        + tool_format.end
        for at, call in enumerate(calls)
    )
    return tool_format.start + tool_format.between.join(written) + tool_format.stop
