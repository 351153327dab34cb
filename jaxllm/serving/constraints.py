"""What an answer must match: the request's own constraint, calls of its tools, or one of the two."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.closed_schema import closed
from jaxllm.requests.compiled_grammars import compile_grammar
from jaxllm.requests.number_bounds import UnenforceableError
from jaxllm.requests.plain_schema import plain
from jaxllm.requests.structured_outputs import JSON_OPTIONS, StructuredOutputs, ascii_classes
from jaxllm.serving.conversation import Conversation, Tool, ToolChoice
from jaxllm.serving.parsing.grammar import tool_constraint
from jaxllm.serving.parsing.output_format import OutputFormats
from jaxllm.text.reasoned_answers import reasoning_end

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
    thinks = conversation.rendering.thinks
    after = reasoning_end(formats.reasoning, prompt_text, in_reasoning=in_reasoning, thinks=thinks)
    constraint = _constraint(conversation, formats, after, special_tokens, in_reasoning=in_reasoning)
    if constraint is None or constraint.after is None or in_reasoning or formats.reasoning is None:
        return constraint
    return replace(constraint, openings=formats.reasoning.openings)


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
    if formats.channels or (formats.tools and formats.tools.layout.thought):
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
