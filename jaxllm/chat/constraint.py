"""What an answer must match, and how long its reasoning may be, from what a conversation asks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxllm.chat.conversation import Conversation, Rendering, Tool, ToolChoice
from jaxllm.chat.events import OutputFormats
from jaxllm.chat.grammar import tool_constraint
from jaxllm.chat.model import ChatModel
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.closed_schema import closed
from jaxllm.requests.compiled_grammars import compile_grammar
from jaxllm.requests.plain_schema import UnenforceableError, plain
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.structured_outputs import JSON_OPTIONS, StructuredOutputs, ascii_classes
from jaxllm.text.reasoning import ReasoningFormat, prompt_markers

CONSTRAINT = Field("structured_outputs")
"""What the request itself asks of the text."""
TOOLS = Field("tools")
BLAME_SECONDS = 10.0
"""How long the one of several tools that cannot be enforced is looked for."""


def answer_constraint(
    conversation: Conversation,
    formats: OutputFormats,
    prompt_text: str,
    *,
    in_reasoning: bool,
    special_tokens: Mapping[str, int],
) -> StructuredOutputs | None:
    """The constraint on a conversation's answers, from behind their reasoning on; None where anything may come.

    With tools and a constraint on the text, an answer that may call is either; one that must call only calls.
    Raises InvalidRequestError naming the field.
    """
    asked = conversation.structured_outputs
    if asked is not None and asked.after is not None and not conversation.tools:
        return compiled(asked)  # it says itself what comes before it
    thinks = conversation.rendering.thinks
    after = _reasoning_end(formats.reasoning, prompt_text, in_reasoning=in_reasoning, thinks=thinks)
    constraint = _constraint(conversation, formats, after, special_tokens, in_reasoning=in_reasoning)
    if constraint is None or constraint.after is None or in_reasoning or formats.reasoning is None:
        return constraint
    return replace(constraint, openings=formats.reasoning.openings)


def _reasoning_end(
    reasoning: ReasoningFormat | None, prompt_text: str, *, in_reasoning: bool, thinks: bool | None
) -> str | None:
    """The text that ends the reasoning which the answer to a prompt may begin with; None where it has none."""
    if reasoning is None:
        return None
    if reasoning.answer:
        return reasoning.answer
    none_left = prompt_text.rstrip().endswith(reasoning.close) or thinks is False
    return reasoning.close if in_reasoning or not none_left else None


def _constraint(
    conversation: Conversation,
    formats: OutputFormats,
    after: str | None,
    special_tokens: Mapping[str, int],
    *,
    in_reasoning: bool,
) -> StructuredOutputs | None:
    tools, choice = conversation.tools, conversation.tool_choice
    answer = conversation.structured_outputs and replace(conversation.structured_outputs, after=after)
    if not tools:
        return compiled(answer)

    def calls(choice: ToolChoice) -> StructuredOutputs | None:
        parallel = conversation.parallel_tool_calls
        return tool_constraint(
            formats,
            tools,
            choice,
            parallel=parallel,
            after=after,
            special_tokens=special_tokens,
            in_reasoning=in_reasoning,
        )

    if choice != "auto" or answer is None:
        return _compiled_calls(lambda: calls(choice), tools)
    if formats.channels or (formats.tools and formats.tools.thought):
        raise _needs_choice(answer)
    compiled(answer)

    def either() -> StructuredOutputs:
        required = calls("required")
        assert required is not None
        return _either(required, answer)

    return _compiled_calls(either, tools)


def compiled(constraint: StructuredOutputs | None, field: Field = CONSTRAINT) -> StructuredOutputs | None:
    """The same constraint, known to be enforceable. Raises InvalidRequestError of `field`."""
    if constraint is not None:
        try:
            compile_grammar(constraint)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), field) from None
    return constraint


def _compiled_calls(calls: Callable[[], StructuredOutputs | None], tools: Sequence[Tool]) -> StructuredOutputs | None:
    """The constraint that `calls` makes, known to be enforceable. Raises InvalidRequestError of the tool to blame."""
    deadline = time.monotonic() + BLAME_SECONDS
    try:
        return compiled(calls())
    except (InvalidRequestError, UnenforceableError) as error:
        for tool in tools:
            if time.monotonic() < deadline:
                _check_parameters(tool)
        raise InvalidRequestError(["the ", TOOLS, f" cannot be called as asked: {error}"]) from None


def _check_parameters(tool: Tool) -> None:
    schema = {"type": "object", **(tool.parameters or {}), "x-guidance": {"lenient": not tool.strict}}
    try:
        compile_grammar(StructuredOutputs(json=json.dumps(schema)))
    except InvalidRequestError as error:
        _, problem = error.pieces
        raise InvalidRequestError([tool.parameters_field, f" (of {tool.name!r}){problem}"]) from None


def _either(calls: StructuredOutputs, answer: StructuredOutputs) -> StructuredOutputs:
    """Calls, or a text that matches `answer`: one Lark grammar with two beginnings."""
    match answer.kind:
        case "json" | "json_object":
            schema = json.loads(answer.json) if answer.json is not None else {"type": "object"}
            text = "%json " + json.dumps({**closed(plain(schema)), "x-guidance": JSON_OPTIONS})
        case "choice":
            text = " | ".join(map(json.dumps, answer.choice or ()))
        case "regex":
            escaped = ascii_classes(answer.regex or "").replace("/", r"\/")
            text = f"/{escaped}/"
        case _:
            raise _needs_choice(answer)
    header, rules = (calls.grammar or "").split("\nstart: ", 1)
    grammar = f"{header}\nstart: calls_alone | answer_text\nanswer_text: {text}\ncalls_alone: {rules}"
    return StructuredOutputs(grammar=grammar, after=calls.after)


def _needs_choice(answer: StructuredOutputs) -> InvalidRequestError:
    problem = f" ({answer.kind}) with tools needs a tool_choice: none to answer, required to call"
    return InvalidRequestError([CONSTRAINT, problem])


EFFORT_BUDGETS: dict[str, int | None] = {
    "none": 0, "minimal": 512, "low": 2048, "medium": 8192, "high": 32768, "xhigh": None, "max": None,
}  # fmt: skip
"""Tokens of reasoning that an effort allows where the chat template knows no efforts; None is any number."""
EFFORT_VARIABLE = "reasoning_effort"


def thinking_fields(
    conversation: Conversation,
    reasoning: ReasoningFormat | None,
    template: str,
    asked: int | None,
    *,
    in_reasoning: bool,
) -> dict[str, Any]:
    """The fields of SamplingParams that bound an answer's reasoning.

    `asked` is max_thinking_tokens, which only a model that marks its reasoning can honour; what a request says in other
    ways leaves a model that does not alone. Raises InvalidRequestError of max_thinking_tokens.
    """
    if reasoning is None:
        if asked is not None:
            raise unmarked()
        return {}
    budget = _budget(conversation.rendering, template, asked, in_reasoning)
    if budget is None:
        return {}
    markers = reasoning.markers(opened=in_reasoning, text_follows=not conversation.tools)
    return {"max_thinking_tokens": budget, "thinking_markers": markers}


def room_for_constraint(
    params: SamplingParams, conversation: Conversation, reasoning: ReasoningFormat | None, *, in_reasoning: bool
) -> SamplingParams:
    """The same parameters; unbounded reasoning leaves half of max_tokens to an answer that must match something."""
    outputs, asked = params.structured_outputs, conversation.structured_outputs
    waits = outputs is not None and outputs.after is not None and (asked is None or asked.after is None)
    free = asked is None and conversation.tool_choice == "auto"
    if reasoning is None or not waits or free or params.allowed_token_ids is not None:
        return params
    if params.max_thinking_tokens is not None or params.max_tokens is None:
        return params
    markers = reasoning.markers(opened=in_reasoning, text_follows=bool(reasoning.answer))
    return replace(params, max_thinking_tokens=params.max_tokens // 2, thinking_markers=markers)


def with_completion_markers(model: ChatModel, params: SamplingParams, prompt: list[int]) -> SamplingParams:
    """The parameters of a completion; its prompt was rendered by the caller. Raises InvalidRequestError."""
    if params.max_thinking_tokens is None:
        return params
    template = model.chat_template or model.tokenizer.chat_template or ""
    reasoning = model.formats(template).reasoning
    if reasoning is None:
        raise unmarked()
    return replace(params, thinking_markers=prompt_markers(reasoning, model.tokenizer, prompt))


def unmarked() -> InvalidRequestError:
    field = Field("max_thinking_tokens")
    return InvalidRequestError(
        [field, " needs a model that marks its reasoning; this one's chat template shows no marks"]
    )


def _budget(rendering: Rendering, template: str, asked: int | None, in_reasoning: bool) -> int | None:
    if rendering.thinks is False and in_reasoning:
        return 0  # the template does not know how not to think
    told = rendering.thinking_budget if asked is None else asked
    if told is not None or rendering.thinks is False or EFFORT_VARIABLE in template:
        return told
    return EFFORT_BUDGETS.get(rendering.effort or "")
