"""The ids of calls, as Anthropic spells them: letters, digits, underscores and hyphens."""

from __future__ import annotations

import re

PREFIX = "toolu_"
SPELLED = "toolu_id-"
"""Before an id that has other characters, each as a hyphen and its code: Kimi's, which its templates insist on."""
SHORT_ID = 9
"""Characters of the ids that Mistral's templates insist on."""
_OTHER = re.compile(r"[^a-zA-Z0-9_]")
_CODE = re.compile(r"-([0-9a-f]{2})")


def tool_use_id(call_id: str) -> str:
    """What a client gets for a call's id.

    Worked example: `call_5f` becomes `toolu_5f`, Mistral's `aB3dE6gH9` becomes `toolu_aB3dE6gH9`, and Kimi's
    `functions.now:0` becomes `toolu_id-functions-2enow-3a0`.
    """
    if _OTHER.search(call_id):
        return SPELLED + _OTHER.sub(lambda match: f"-{ord(match.group()):02x}", call_id)
    return PREFIX + call_id.removeprefix("call_")


def template_call_id(sent: str) -> str:
    """What a template gets for the id that a client sends back: the model's own, but ours as they are."""
    if sent.startswith(SPELLED):
        return _CODE.sub(lambda match: chr(int(match.group(1), 16)), sent.removeprefix(SPELLED))
    bare = sent.removeprefix(PREFIX)
    return bare if len(bare) == SHORT_ID else sent
