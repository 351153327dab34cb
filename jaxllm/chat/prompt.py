"""A model that conversations are held with, and from a conversation to token ids and sampling parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import tokenizers

from jaxllm.chat.constraint import answer_constraint
from jaxllm.chat.conversation import (
    ROLES,
    Conversation,
    Message,
    Rendering,
    alternating,
    naming,
    room_for_constraint,
    thinking_fields,
    unmarked,
    with_tools_as_text,
)
from jaxllm.chat.events import OutputFormats
from jaxllm.chat.formats import detect_formats
from jaxllm.chat.parser import AnswerReader, OutputParser
from jaxllm.chat.pictures import PLACE, SEAM, Picture, Sent, as_text, row_limits, without_marks
from jaxllm.engine.doors.beams import BeamSearchParams
from jaxllm.engine.doors.eyes import RowLimits
from jaxllm.engine.doors.sequences import check_request, refuse_text
from jaxllm.engine.messages import PlacedImages
from jaxllm.errors import ContextLengthError, Field, InvalidRequestError
from jaxllm.mcp.tools import ToolResult
from jaxllm.requests.sampling import LOGPROBS_MODES, SamplingParams
from jaxllm.requests.steering import Patching
from jaxllm.text.chat_template import in_format
from jaxllm.text.detokenizer import special_token_ids
from jaxllm.text.reasoning import opens_reasoning, prompt_markers

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

MAX_TEXT_TOKENS = 2**18
"""Of a text that need not fit the context: one that is cut or only tokenized. The context's length if that is more."""
MAX_KEPT_TEMPLATE = 64 * 1024
"""Characters of a template whose formats are remembered: a stranger's may have megabytes."""
ContentFormat = Literal["auto", "string", "openai"]


class ChatModel:
    """An engine, an LLM or an AsyncLLM, that conversations are held with.

    Args:
        chat_template: instead of the checkpoint's.
        tool_call_parser, reasoning_parser: names of formats, "none", or "auto" for those that the template speaks.
        content_format: how the template is given contents: see `in_format`.
        variables: default variables of the template.

    Raises ConfigError when a parser's name is unknown, and InvalidRequestError when `variables` has a reserved name.
    """

    def __init__(
        self,
        engine: Any,
        *,
        chat_template: str | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        content_format: ContentFormat = "auto",
        variables: Mapping[str, Any] | None = None,
    ):
        self.engine = engine
        self.chat_template = chat_template
        self.content_format: ContentFormat = content_format
        self.parsers = tool_call_parser, reasoning_parser
        self.variables = variables or {}
        with naming(lambda _: Field("default_chat_template_kwargs")):
            Rendering(variables=self.variables)  # refuses names that are not the caller's
        detect_formats(None, *self.parsers)  # refuses unknown names at the start

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError when the engine was started without one."""
        tokenizer: Tokenizer | None = self.engine.tokenizer
        if tokenizer is None:
            accepted = "only completions of token ids are possible"
            raise InvalidRequestError(f"the engine runs without a tokenizer (skip_tokenizer_init): {accepted}")
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether it answers chats; a base model only continues text."""
        tokenizer = self.engine.tokenizer
        return self.chat_template is not None or (tokenizer is not None and tokenizer.chat_template is not None)

    def encode(
        self, text: str, source: Field, *, add_special_tokens: bool = True, may_be_cut: bool = False
    ) -> list[int]:
        """Token ids of a text. Raises ContextLengthError of `source`, without encoding one that is too long."""
        self.check_length(text, source, may_be_cut=may_be_cut)
        return self.tokenizer.encode(text, add_special_tokens)

    def check_length(self, text: str, source: Field, *, may_be_cut: bool) -> None:
        """Refuse a text that surely does not fit the context, or if it `may_be_cut` one beyond MAX_TEXT_TOKENS."""
        context = self.engine.info.max_model_len
        most = max(context, MAX_TEXT_TOKENS) if may_be_cut else context
        if self.tokenizer.exceeds(text, most):
            reason = "the most that is encoded" if may_be_cut else "and the context holds no more"
            raise ContextLengthError([source, f" has more than {most} tokens, {reason}"])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        tokenizer = self.engine.tokenizer
        return f"token_id:{token_id}".encode() if tokenizer is None else tokenizer.token_bytes(token_id)

    def formats(self, chat_template: str) -> OutputFormats:
        detect = _detect if len(chat_template) <= MAX_KEPT_TEMPLATE else detect_formats
        return detect(chat_template, *self.parsers)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The tokenizer's `grammar_tokens`; none without a tokenizer."""
        return {} if self.engine.tokenizer is None else grammar_tokens(self.tokenizer.backend)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that skip_special_tokens leaves out of a text; none without a tokenizer."""
        tokenizer = self.engine.tokenizer
        return frozenset() if tokenizer is None else special_token_ids(tokenizer.backend)

    def marker_ids(self, formats: OutputFormats, *, with_tools: bool) -> list[int]:
        if not with_tools:
            formats = dataclasses.replace(formats, tools=None)
        ids = map(self.tokenizer.backend.token_to_id, formats.markers)
        return [token for token in ids if token in self.special_token_ids]


_detect = lru_cache(maxsize=32)(detect_formats)


def grammar_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """The tokens, with their ids, that llguidance takes for special: those marked so and those added as <…>."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {t.content: i for i, t in added if t.special or (t.content.startswith("<") and t.content.endswith(">"))}


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are generated, whoever asks.

    Attributes:
        sampling: fields of SamplingParams that the caller set, by name; the others are the model's.
        max_tokens: upper bound on generated tokens, as the context is; None is `default_max_tokens`, or no other bound.
        room: tokens of the context that the prompt must leave.
        n: choices to return for each prompt, the best of `num_generated`.
        beam_search: searches for the most likely texts instead of sampling.
        truncate_prompt_tokens: keep only this many prompt tokens; -1 keeps what leaves room for max_tokens.
        truncation_side: the end of the prompt that is cut off.
        prediction: what the answer may well be, or have in it.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    room: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    num_generated: int = 1
    beam_search: BeamSearchParams | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    prediction: str = ""


@dataclass
class Prompt:
    """One tokenized prompt and the parameters of its sequences; `text` is what an echo shows."""

    token_ids: list[int]
    params: SamplingParams
    text: str = ""
    beam_search: BeamSearchParams | None = None
    embeds: Patching | None = None
    """Vectors that stand where those of its tokens would."""
    images: PlacedImages | None = None


@dataclass
class Rendered:
    """A conversation as the model gets it, the formats it answers in, and the template that rendered it."""

    text: str
    token_ids: list[int]
    formats: OutputFormats
    template: str
    images: PlacedImages | None = None


@dataclass
class ConversationPrompt:
    """A conversation ready to run."""

    prompt: Prompt
    formats: OutputFormats
    conversation: Conversation
    in_reasoning: bool

    def reader(self, num_choices: int) -> AnswerReader:
        return AnswerReader(self.conversation, self.parsers(num_choices))

    def parsers(self, num_choices: int) -> list[OutputParser | None]:
        """A parser for each choice; None where there is nothing to find but text."""
        tools, formats = self.conversation.tools, self.formats
        outputs = self.prompt.params.structured_outputs
        after = (outputs and outputs.after) or ""
        if not self.conversation.separate_reasoning:
            known = formats.reasoning if tools and after else None
            formats = dataclasses.replace(formats, reasoning=known and known.as_content(opened=self.in_reasoning))
        if formats.reasoning is None and not tools:
            return [None] * num_choices
        parser = partial(OutputParser, formats, tools=tools, in_reasoning=self.in_reasoning, constrained_after=after)
        return [parser() for _ in range(num_choices)]


def prepare(model: ChatModel, conversation: Conversation, settings: AnswerSettings) -> ConversationPrompt:
    """Render, tokenize and check a conversation, and compile its constraint. Raises InvalidRequestError."""
    refuse_text(model.engine.info.tasks)
    rendering = conversation.rendering.with_defaults(model.variables)
    conversation = dataclasses.replace(conversation, rendering=rendering)
    rendered = render(model, conversation, may_be_cut=settings.truncate_prompt_tokens is not None)
    formats = rendered.formats
    if formats.channels and formats.reasoning and not conversation.separate_reasoning:
        reason = " is false, but this model writes its reasoning on a channel of its own; it must be true"
        raise InvalidRequestError([Field("separate_reasoning"), reason])
    in_reasoning, derived = _derived(model, conversation, rendered, settings.sampling.get("max_thinking_tokens"))
    if settings.beam_search is not None:
        if derived["structured_outputs"] is not None:
            raise InvalidRequestError("use_beam_search is not available with tools that constrain the answer", "tools")
        if "max_thinking_tokens" in derived:
            raise InvalidRequestError("use_beam_search is not available with a thinking budget", "use_beam_search")
    if settings.prediction:
        predicted = model.encode(settings.prediction, Field("prediction"), add_special_tokens=False)
        derived["predicted_token_ids"] = predicted
    derived["shown_special_token_ids"] = model.marker_ids(formats, with_tools=bool(conversation.tools))
    params = sampling_params(model, settings, **derived)
    if rendered.images is not None and settings.truncate_prompt_tokens is not None:
        raise InvalidRequestError([Field("truncate_prompt_tokens"), " is not available with images; leave it out"])
    prompt = fitted(model, rendered.token_ids, params, settings, Field("messages"))
    prompt.images = rendered.images
    prompt.params = room_for_constraint(prompt.params, conversation, formats.reasoning, in_reasoning=in_reasoning)
    return ConversationPrompt(prompt, formats, conversation, in_reasoning)


def prepare_params(model: ChatModel, conversation: Conversation, params: SamplingParams) -> ConversationPrompt:
    """As `prepare`, with complete parameters, as notebooks have them; the engine's limits are not checked."""
    rendered = render(model, conversation)
    in_reasoning, derived = _derived(model, conversation, rendered, params.max_thinking_tokens)
    if params.thinking_markers is not None:
        derived = {"structured_outputs": derived["structured_outputs"]}
    if conversation.tools or conversation.separate_reasoning:
        markers = model.marker_ids(rendered.formats, with_tools=bool(conversation.tools))
        derived["shown_special_token_ids"] = [*params.shown_special_token_ids, *markers]
    params = dataclasses.replace(params, **derived)
    params = room_for_constraint(params, conversation, rendered.formats.reasoning, in_reasoning=in_reasoning)
    prompt = Prompt(rendered.token_ids, params, rendered.text, images=rendered.images)
    return ConversationPrompt(prompt, rendered.formats, conversation, in_reasoning)


def render(model: ChatModel, conversation: Conversation, *, may_be_cut: bool = False) -> Rendered:
    """The prompt of a conversation, which need not fit the context if it `may_be_cut`. Raises InvalidRequestError."""
    pictures = shown_pictures(model, conversation)
    values = _template_values(model, conversation, may_be_cut=may_be_cut)
    text, template = model.tokenizer.render(values, own=model.chat_template), values["template"]
    if PLACE in text:
        text = text.replace(PLACE, _image_text(model, values))
    special, token_ids = conversation.rendering.special_tokens, list[int]()
    for at, piece in enumerate(text.split(SEAM)):
        begins = special and at == 0
        token_ids += model.encode(piece, Field("messages"), add_special_tokens=begins, may_be_cut=may_be_cut)
    images = None
    if pictures:
        eyes, room, seen = model.engine.eyes, model.engine.info.most_image_rows, []
        limits = row_limits(conversation.image_sizes, eyes)
        for picture in pictures:
            seen.append(picture.look(eyes, limits))
            room -= seen[-1].num_rows
            if room < 0:
                break  # `place` refuses that many, so the others need not be decoded
        token_ids, images = eyes.place(token_ids, seen)
    return Rendered(text.replace(SEAM, ""), token_ids, model.formats(template), template, images)


def shown_pictures(model: ChatModel, conversation: Conversation) -> list[Picture]:
    """The images of a conversation. Raises InvalidRequestError: the model sees none."""
    pictures = conversation.pictures
    if pictures and not model.engine.info.most_image_rows:
        raise pictures[0].refused(" is an image, and this model sees no images: only text is served")
    return pictures


def with_seen(model: ChatModel | None, result: ToolResult) -> ToolResult:
    """A tool's result with those of its images that the model can see: a tool's bad image fails no request."""
    seen = []
    if model is not None and model.engine.info.most_image_rows:
        for image in result.images:
            with suppress(InvalidRequestError):
                Picture(Sent(image)).look(model.engine.eyes, RowLimits())
                seen.append(image)
    return dataclasses.replace(result, images=tuple(seen))


def _image_text(model: ChatModel, values: Mapping[str, Any]) -> str:
    """The text that the template writes for an image among texts; only the placeholder where it reads no lists."""
    around, placeholder = ("before", "after"), model.engine.eyes.placeholder
    [first, last] = ({"type": "text", "text": text} for text in around)
    asked = {"messages": [{"role": "user", "content": [first, {"type": "image"}, last]}], "tools": None}
    try:
        text = model.tokenizer.render({**values, **asked, "continue_final_message": False}, own=model.chat_template)
    except InvalidRequestError:
        return placeholder
    found = text.partition(around[0])[2].rpartition(around[1])[0]
    return found if found.count(placeholder) == 1 else placeholder


def fitted(
    model: ChatModel, token_ids: list[int], params: SamplingParams, settings: AnswerSettings, source: Field
) -> Prompt:
    """Cut a prompt from `source` if asked to, check it, and settle max_tokens. Raises InvalidRequestError."""
    context, truncate = model.engine.info.max_model_len, settings.truncate_prompt_tokens
    asked, default = settings.max_tokens, settings.default_max_tokens
    default = model.engine.info.default_sampling.max_tokens or default
    if truncate is not None:
        keep = truncate if truncate > 0 else max(context - (asked or default or 1), 1)
        if truncate < 0 and asked is not None and asked >= context:
            problem = f" is {asked}, which leaves no room in the context of {context} tokens for a prompt"
            raise ContextLengthError([Field("max_tokens"), problem])
        token_ids = token_ids[-keep:] if settings.truncation_side == "left" else token_ids[:keep]
    length = len(token_ids)
    room = context - length
    if room < settings.room:
        message = f" has {length} tokens; the context holds {context}, prompt and completion together"
        raise ContextLengthError([source, message])
    max_tokens = min(asked or default or room, room)
    params = dataclasses.replace(params, max_tokens=max_tokens)
    try:
        check_request(model.engine.info, model.engine.tokenizer, token_ids, params)
    except InvalidRequestError as error:
        of_prompt = error.param in (None, "prompt")
        raise InvalidRequestError(error.pieces, source if of_prompt else error.field) from None
    search = settings.beam_search and dataclasses.replace(settings.beam_search, max_tokens=max_tokens)
    return Prompt(token_ids, params, beam_search=search)


def sampling_params(model: ChatModel, settings: AnswerSettings, **derived: Any) -> SamplingParams:
    """The caller's values, else the model's defaults, else OpenAI's; `derived` are ours. Raises InvalidRequestError."""
    info, logprobs = model.engine.info, settings.logprobs
    num_generated = settings.num_generated
    if settings.beam_search is not None:
        if logprobs == -1:
            raise InvalidRequestError(
                [Field("logprobs"), " is -1, the whole vocabulary, which beam search cannot give"]
            )
        num_generated = settings.n  # the search ranks its own beams and returns n
    ranked = {}
    if num_generated > settings.n:
        logprobs, ranked = logprobs or 0, {"logprobs_mode": LOGPROBS_MODES[0]}  # what the choices are ranked by
    fields = {**info.default_sampling.fields(), **settings.sampling, "n": num_generated, "logprobs": logprobs, **ranked}
    fields |= {"max_tokens": settings.max_tokens, "prompt_logprobs": settings.prompt_logprobs}
    return SamplingParams(**fields | {"detokenize": model.engine.tokenizer is not None} | derived)


def _derived(
    model: ChatModel, conversation: Conversation, rendered: Rendered, max_thinking_tokens: int | None
) -> tuple[bool, dict[str, Any]]:
    reasoning = rendered.formats.reasoning
    continued = conversation.messages[-1].text if conversation.rendering.continues_last else ""
    in_reasoning = opens_reasoning(reasoning, rendered.text, continued)
    constraint = answer_constraint(
        conversation, rendered.formats, rendered.text, in_reasoning=in_reasoning, special_tokens=model.special_tokens
    )
    thinking = thinking_fields(conversation, reasoning, rendered.template, max_thinking_tokens, in_reasoning)
    return in_reasoning, {"structured_outputs": constraint, **thinking}


def _template_values(model: ChatModel, conversation: Conversation, *, may_be_cut: bool) -> dict[str, Any]:
    """The arguments of `jaxllm.text.chat_template.render`, with the tools where the template wants them."""
    for message in conversation.messages:
        model.check_length(message.text, Field("messages"), may_be_cut=may_be_cut)
    tools = conversation.tools
    messages = [message.for_template() for message in conversation.messages]
    arguments = conversation.rendering.with_defaults(model.variables).template_arguments(model.chat_template)
    if shown := [tool for tool in tools if tool.in_prompt]:
        arguments["tools"] = [tool.for_template() for tool in shown]
    values = model.tokenizer.chat_template_values(messages, **arguments)
    template = values["template"]
    _check_roles(conversation.messages, template)
    tool_format = model.formats(template).tools
    if tools and tool_format is None:
        raise InvalidRequestError([Field("tools"), " are turned off (tool_call_parser is none)"])
    # A notebook's messages may have calls and results that are meant for a template which does not know them.
    as_given = not conversation.separate_reasoning and any(m.given is not None for m in conversation.messages)
    has_turns = not as_given and any(m["role"] == "tool" or "tool_calls" in m for m in messages)
    tells = tool_format if "tools" not in template and (tools or has_turns) else None
    joins = "must alternate" in template and not as_given
    if conversation.pictures:  # results are strings to many templates, and so are messages that are put together
        flat = {role for role in (m["role"] for m in messages) if role == "tool" or tells is not None or joins}
        messages = [{**m, "content": as_text(m["content"])} if m["role"] in flat else m for m in messages]
    if tells is not None:
        messages, values["tools"] = with_tools_as_text(messages, shown, tells), None
    if joins:
        messages = alternating(messages)
    values["messages"] = in_format(messages, template, model.content_format, as_text)
    if model.engine.info.most_image_rows:
        own = {"template", *model.tokenizer.special_tokens}
        marks = model.engine.eyes.marks
        values |= {name: without_marks(value, marks) for name, value in values.items() if name not in own}
    return values


def _check_roles(messages: Sequence[Message], template: str) -> None:
    """Refuse a role that this template would ignore: one that is neither usual nor a string in it."""
    for at, message in enumerate(messages):
        if message.role in ROLES or message.given is not None:
            continue
        if not any(f"{quote}{message.role}{quote}" in template for quote in "'\""):
            accepted = f"must be {', '.join(ROLES)}, or a role that the chat template names"
            raise InvalidRequestError([Field("messages", at, "role"), f" is {message.role!r}; it {accepted}"])


def with_completion_markers(model: ChatModel, params: SamplingParams, prompt: list[int]) -> SamplingParams:
    """The parameters of a completion; its prompt was rendered by the caller. Raises InvalidRequestError."""
    if params.max_thinking_tokens is None:
        return params
    template = model.chat_template or model.tokenizer.chat_template or ""
    reasoning = model.formats(template).reasoning
    if reasoning is None:
        raise unmarked()
    return dataclasses.replace(params, thinking_markers=prompt_markers(reasoning, model.tokenizer, prompt))
