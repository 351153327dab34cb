"""context_management of /v1/messages: what a long conversation loses before it becomes a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jaxllm.serving.anthropic.blocks import (
    Block,
    TextBlockParam,
    ThinkingBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    Turn,
)
from jaxllm.serving.http.request_model import RequestModel, refuse
from jaxllm.wording import shown

TRIGGER_TOKENS = 100_000
KEPT_TOOL_USES = 3
KEPT_THINKING_TURNS = 1
MAX_EDITS = 16
MAX_NAMES = 1024
CLEARED = "[Old tool result content cleared]"
"""The model reads it in the place of a result that was cleared."""


class TokenNumber(RequestModel):
    type: Literal["input_tokens"]
    value: int = Field(ge=0)
    """Tokens of the prompt."""


class ToolUses(RequestModel):
    type: Literal["tool_uses"]
    value: int = Field(ge=0)
    """Calls of tools, with their results."""


class ThinkingTurns(RequestModel):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)
    """Turns of the assistant that have thinking: all that it says between two questions of the user's is one."""


class AllThinking(RequestModel):
    type: Literal["all"]


class ClearThinking(RequestModel):
    """Take the thinking out of the oldest turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | Annotated[ThinkingTurns | AllThinking, Field(discriminator="type")] | None = None
    """The newest turns that keep theirs, by default one."""

    def applied(self, turns: Sequence[Turn]) -> tuple[list[Turn], int]:
        """The turns without it, and how many have lost it."""
        keep = KEPT_THINKING_TURNS if self.keep is None else getattr(self.keep, "value", len(turns))
        answers: list[list[int]] = [[]]  # the positions of turns with thinking, by the question that they answer
        for at, turn in enumerate(turns):
            if turn.role == "user" and turn.of(TextBlockParam):
                answers.append([])
            elif turn.of(ThinkingBlockParam):
                answers[-1].append(at)
        old = [answer for answer in answers if answer][:-keep]
        positions = {at for answer in old for at in answer}
        return [_without_thinking(turn) if at in positions else turn for at, turn in enumerate(turns)], len(old)


class ClearToolUses(RequestModel):
    """Take the results out of the oldest calls of tools."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[TokenNumber | ToolUses, Field(discriminator="type")] | None = None
    """Nothing is taken out before the conversation has more than this: by default 100,000 tokens."""
    keep: ToolUses | None = None
    """The newest calls that keep theirs, by default 3."""
    clear_at_least: TokenNumber | None = None
    """Nothing is taken out where fewer tokens would go."""
    clear_tool_inputs: bool | Annotated[list[str], Field(max_length=MAX_NAMES)] = False
    """Take out the inputs of these calls too: of all, or of those of the tools that are named."""
    exclude_tools: list[str] | None = Field(default=None, max_length=MAX_NAMES)
    """Tools whose calls keep everything."""

    def is_due(self, tokens: int, turns: Sequence[Turn]) -> bool:
        if isinstance(self.trigger, ToolUses):
            return len(_uses(turns)) > self.trigger.value
        return tokens > (TRIGGER_TOKENS if self.trigger is None else self.trigger.value)

    def applied(self, turns: Sequence[Turn]) -> tuple[list[Turn], int]:
        """The turns without them, and how many calls have lost theirs."""
        uses = _uses(turns)
        kept = KEPT_TOOL_USES if self.keep is None else self.keep.value
        excluded = frozenset(self.exclude_tools or ())
        old = {id(use) for use in uses[: max(len(uses) - kept, 0)] if use.name not in excluded}
        waiting: dict[str, bool] = {}  # ids of calls, of which later turns may have the same again

        def cleared(block: Block) -> Block:
            if isinstance(block, ToolUseBlockParam):
                waiting[block.id] = id(block) in old
                named = self.clear_tool_inputs
                if waiting[block.id] and (named is True or (isinstance(named, list) and block.name in named)):
                    return block.model_copy(update={"input": {}})
            elif isinstance(block, ToolResultBlockParam) and waiting[block.tool_use_id]:
                return block.model_copy(update={"content": CLEARED})
            return block

        return [replace(turn, blocks=[cleared(block) for block in turn.blocks]) for turn in turns], len(old)


STRATEGIES = {"clear_thinking_20251015": ClearThinking, "clear_tool_uses_20250919": ClearToolUses}


def _known(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise refuse(f"strategy {shown(kind)} is not supported by this server, which has {known}", "type")
    return value


Edit = Annotated[Annotated[ClearThinking | ClearToolUses, Field(discriminator="type")], BeforeValidator(_known)]


class ContextManagement(RequestModel):
    edits: list[Edit] = Field(default_factory=list, max_length=MAX_EDITS)
    """What the conversation loses, one after the other."""


def _uses(turns: Sequence[Turn]) -> list[ToolUseBlockParam]:
    return [use for turn in turns for use in turn.of(ToolUseBlockParam)]


def _without_thinking(turn: Turn) -> Turn:
    return replace(turn, blocks=[block for block in turn.blocks if not isinstance(block, ThinkingBlockParam)])
