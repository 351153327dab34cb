"""Answers that are constrained behind their reasoning: where the constraint begins, and that room is left for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxllm.requests.sampling import SamplingParams
from jaxllm.text.reasoning import ReasoningFormat, opens_reasoning

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""What templates call the switch: Qwen, GLM and SmolLM the first, DeepSeek and Granite the second."""


def told_to_think(variables: Mapping[str, Any]) -> bool | None:
    """Whether a template's variables ask for reasoning; None where they leave it to the model."""
    told = next((variables[name] for name in THINKING_VARIABLES if name in variables), None)
    return None if told is None else bool(told)


def reasoning_end(
    reasoning: ReasoningFormat | None, prompt_text: str, *, in_reasoning: bool, thinks: bool | None
) -> str | None:
    """The text that ends the reasoning which the answer to a prompt may begin with; None where it has none."""
    if reasoning is None:
        return None
    if reasoning.answer:
        return reasoning.answer
    none_left = prompt_text.rstrip().endswith(reasoning.close) or thinks is False
    return reasoning.close if in_reasoning or not none_left else None


def with_room(params: SamplingParams, reasoning: ReasoningFormat, *, in_reasoning: bool) -> SamplingParams:
    """The same parameters; reasoning that nobody bounds leaves half of max_tokens to an answer that is constrained."""
    bounded = params.max_thinking_tokens is not None or params.max_tokens is None
    if bounded or params.allowed_token_ids is not None:
        return params
    assert params.max_tokens is not None
    markers = reasoning.markers(opened=in_reasoning, text_follows=bool(reasoning.answer))
    return replace(params, max_thinking_tokens=params.max_tokens // 2, thinking_markers=markers)


def constrained_answer(
    params: SamplingParams,
    reasoning: ReasoningFormat | None,
    prompt_text: str,
    *,
    continued: str = "",
    thinks: bool | None = None,
) -> SamplingParams:
    """The same parameters, with a constraint that begins where the reasoning of the answer ends, if it has any.

    `continued` is the text of an assistant's message that the model goes on with. A constraint that says itself what
    comes before it stays as it is.
    """
    outputs = params.structured_outputs
    if outputs is None or outputs.after is not None or reasoning is None:
        return params
    in_reasoning = opens_reasoning(reasoning, prompt_text, continued)
    after = reasoning_end(reasoning, prompt_text, in_reasoning=in_reasoning, thinks=thinks)
    if after is None:
        return params
    openings = () if in_reasoning else reasoning.openings
    waiting = replace(params, structured_outputs=replace(outputs, after=after, openings=openings))
    return with_room(waiting, reasoning, in_reasoning=in_reasoning)
