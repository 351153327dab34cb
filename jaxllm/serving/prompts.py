"""From a request to token ids and sampling parameters that fit the context. Runs on worker threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import SamplingParams
from jaxllm.serving.constraints import answer_constraint, compiled
from jaxllm.serving.errors import APIError
from jaxllm.serving.generation import Prompt
from jaxllm.serving.parsing.formats import OutputFormats, opens_reasoning
from jaxllm.serving.parsing.parser import OutputParser
from jaxllm.serving.protocol.chat import ChatRequest
from jaxllm.serving.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from jaxllm.serving.protocol.messages import Message, TemplateFields
from jaxllm.serving.protocol.tokenize import TokenizeRequest
from jaxllm.serving.protocol.tools import Tool
from jaxllm.serving.state import ServerState
from jaxllm.serving.tool_prompt import has_tool_turns, knows_tools, with_tools_as_text
from jaxllm.text import chat_template


@dataclass
class RenderedChat:
    """A chat as the model gets it, and the formats it answers in."""

    text: str
    token_ids: list[int]
    formats: OutputFormats


@dataclass
class ChatPrompt:
    """A chat ready to run, and how to read its answers."""

    prompt: Prompt
    formats: OutputFormats
    tools: list[Tool]
    in_reasoning: bool

    def parser(self) -> OutputParser | None:
        """A parser for one answer; None where there is nothing to find but text."""
        if self.formats.reasoning is None and not self.tools:
            return None
        return OutputParser(
            self.formats, tools=self.tools, in_reasoning=self.in_reasoning, parse_tools=bool(self.tools)
        )


ChatFields = ChatRequest | TokenizeRequest


async def render_own_template(
    state: ServerState, messages: Sequence[Message], fields: TemplateFields, tools: Sequence[Tool] = ()
) -> str | None:
    """The text of a chat whose template came with the request, rendered where it can be stopped.

    None where it did not: the functions below render the server's templates. Raises InvalidRequestError.
    """
    if fields.chat_template is None:
        return None
    values = await state.offload(template_values, state, messages, fields, tools)
    if values["template"] != fields.chat_template:  # it is the name of one of the checkpoint's
        return None
    return await state.templates.render(values)


def render_chat(state: ServerState, body: ChatFields, text: str | None = None) -> RenderedChat:
    """The prompt of a chat, as token ids too; `text` is what render_own_template gave.

    Raises InvalidRequestError where the template or a setting refuses.
    """
    values = template_values(state, body.messages or (), body, body.active_tools)
    if text is None:
        text = chat_template.render(**values)
    return RenderedChat(text, state.tokenizer.encode(text, body.special_tokens), state.formats(values["template"]))


def tokenize_chat(
    state: ServerState,
    messages: Sequence[Message],
    fields: TemplateFields,
    add_special_tokens: bool,
    text: str | None = None,
) -> list[int]:
    """The token ids of a chat without tools; `text` is what render_own_template gave."""
    if text is None:
        text = chat_template.render(**template_values(state, messages, fields))
    return state.tokenizer.encode(text, add_special_tokens)


def template_values(
    state: ServerState, messages: Sequence[Message], fields: TemplateFields, tools: Sequence[Tool] = ()
) -> dict[str, Any]:
    """The arguments of `jaxllm.text.chat_template.render`, with the tools where the template wants them."""
    plain = [message.for_template() for message in messages]
    arguments = fields.template_arguments(state.chat_template)
    if tools:
        arguments["tools"] = [tool.for_template() for tool in tools]
    values = state.tokenizer.chat_template_values(plain, **arguments)
    tool_format = state.formats(values["template"]).tools
    if tools and tool_format is None:
        raise InvalidRequestError("tools are turned off on this server (tool_call_parser is none)", "tools")
    if tool_format is not None and not knows_tools(values["template"]) and (tools or has_tool_turns(plain)):
        values["messages"] = with_tools_as_text(plain, tools, tool_format)
        values["tools"] = None
    return values


def chat_prompt(state: ServerState, body: ChatRequest, text: str | None = None) -> ChatPrompt:
    """Render, tokenize and check a chat. Raises InvalidRequestError or APIError naming the field."""
    rendered = render_chat(state, body, text)
    formats, tools = rendered.formats, body.active_tools
    continued = body.messages[-1].for_template()["content"] if body.continue_final_message else ""
    in_reasoning = opens_reasoning(formats, rendered.text, continued)
    field, asked = body.asked_max_tokens
    constraint = answer_constraint(
        body, formats, rendered.text, in_reasoning=in_reasoning, special_tokens=state.special_tokens
    )
    if constraint is not None and body.use_beam_search:
        raise InvalidRequestError("use_beam_search is not available with tools that constrain the answer", "tools")
    params = sampling_params(
        state,
        body,
        max_tokens=asked,
        logprobs=body.logprobs_count,
        prompt_logprobs=body.prompt_logprobs,
        structured_outputs=constraint,
        shown_special_token_ids=state.marker_ids(formats, with_tools=bool(tools)),
    )
    prompt = _fit(state, Prompt(rendered.token_ids, params), body, source="messages", field=field)
    return ChatPrompt(prompt, formats, tools, in_reasoning)


def completion_prompts(state: ServerState, body: CompletionRequest) -> list[Prompt]:
    """Tokenize and check every prompt of a request. Raises InvalidRequestError or APIError naming the field."""
    asked = max(body.max_tokens, 1) if "max_tokens" in body.model_fields_set else None
    params = sampling_params(
        state,
        body,
        max_tokens=asked,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs_count,
        structured_outputs=compiled(body.structured(None), body.constraint_field),
    )
    prompts = []
    for prompt in body.prompts:
        token_ids = state.tokenizer.encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
        fitted = _fit(state, Prompt(token_ids, params), body, source="prompt", default=DEFAULT_MAX_TOKENS)
        if body.echo:
            if isinstance(prompt, str) and len(fitted.token_ids) == len(token_ids):
                fitted.text = prompt
            else:
                fitted.text = state.tokenizer.decode(fitted.token_ids, params.skip_special_tokens)
        prompts.append(fitted)
    return prompts


def sampling_params(state: ServerState, body: ChatRequest | CompletionRequest, **derived: Any) -> SamplingParams:
    detokenize = state.engine.tokenizer is not None
    return body.sampling_params(state.engine.info.default_sampling, detokenize=detokenize, **derived)


def _fit(
    state: ServerState,
    prompt: Prompt,
    body: ChatRequest | CompletionRequest,
    *,
    source: str,
    field: str = "max_tokens",
    default: int | None = None,
) -> Prompt:
    """Cut the prompt if asked to, check it, settle max_tokens: as asked, or `default`, or the rest of the context."""
    context = state.engine.info.max_model_len
    asked, truncate = prompt.params.max_tokens, body.truncate_prompt_tokens
    if truncate is not None:
        keep = truncate if truncate > 0 else max(context - (asked or default or 1), 1)
        prompt.token_ids = prompt.token_ids[-keep:]
    length = len(prompt.token_ids)
    room = context - length
    if room < 1:
        message = f"{source} has {length} tokens; the context holds {context}, prompt and completion together"
        raise APIError(400, message, param=source, code="context_length_exceeded")
    if asked is not None and asked > room:
        message = (
            f"{field} is {asked} and {source} has {length} tokens, {asked + length} together; "
            f"the context holds {context}, so {field} may be at most {room}"
        )
        raise APIError(400, message, param=field, code="context_length_exceeded")
    if asked is None:
        asked = min(default or room, room)
        prompt.params = dataclasses.replace(prompt.params, max_tokens=asked)
    try:
        state.engine.check(prompt.token_ids, prompt.params)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), source if error.param in (None, "prompt") else error.param) from None
    prompt.beam_search = body.beam_search_params(asked)
    return prompt
