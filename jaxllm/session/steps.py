"""What happens in a session's conversation, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Said:
    """The model says something to the user."""

    text: str


@dataclass(frozen=True)
class Thought:
    """The model reasons."""

    text: str


@dataclass(frozen=True)
class ToolCalled:
    """The model calls a tool, by the name that it knows it by, with the JSON text of its arguments."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolReturned:
    """What came of a call; `error` is OpenAI's, None where the tool ran."""

    call: ToolCalled
    output: str
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class ConversationResult:
    """How a conversation ended.

    Attributes:
        final_message: the text of the model's last message.
        tool_calls: every call and what came of it, in the order in which they were made.
        turns_taken: how often the model spoke.
        completed: the model came to an end by itself; false where max_turns or max_tokens ended it.
        messages: all that was said, in the form in which it can be gone on with.
    """

    final_message: str
    tool_calls: list[ToolReturned]
    turns_taken: int
    completed: bool
    messages: list[dict[str, Any]] = field(repr=False)


Step = Said | Thought | ToolCalled | ToolReturned | ConversationResult
"""The last one is the result."""
