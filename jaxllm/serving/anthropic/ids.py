"""The ids of calls, as Anthropic spells them."""

from __future__ import annotations

PREFIX = "toolu_"
SHORT_ID = 9
"""Characters of the ids that Mistral's templates insist on."""


def tool_use_id(call_id: str) -> str:
    """What a client gets for a call's id.

    Worked example: `call_5f` becomes `toolu_5f`, and Mistral's `aB3dE6gH9` becomes `toolu_aB3dE6gH9`.
    """
    return PREFIX + call_id.removeprefix("call_")


def template_call_id(sent: str) -> str:
    """What a template gets for the id that a client sends back: Mistral's without the prefix, others as they are."""
    bare = sent.removeprefix(PREFIX)
    return bare if len(bare) == SHORT_ID else sent
