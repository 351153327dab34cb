"""How long a model may think: from what a request asks to a budget that the engine enforces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.sampling import SamplingParams
from jaxllm.serving.conversation import Conversation, Rendering
from jaxllm.serving.served_model import ServedModel
from jaxllm.text.reasoned_answers import with_room
from jaxllm.text.reasoning import ReasoningFormat, prompt_markers

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
    """The same parameters; where the answer must match something, reasoning leaves room for it: see with_room."""
    outputs = params.structured_outputs
    waits = outputs is not None and outputs.after is not None
    free = conversation.structured_outputs is None and conversation.tool_choice == "auto"
    if reasoning is None or not waits or free:
        return params
    return with_room(params, reasoning, in_reasoning=in_reasoning)


def with_completion_markers(model: ServedModel, params: SamplingParams, prompt: list[int]) -> SamplingParams:
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
