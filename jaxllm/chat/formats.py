"""The formats in which the answers to a chat template come, by what the template shows or by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeVar

from jaxllm.chat.events import OutputFormats, ToolFormat
from jaxllm.chat.tool_formats import TOOL_FORMATS
from jaxllm.errors import ConfigError
from jaxllm.text.reasoning import REASONING_FORMATS, ReasoningFormat, template_reasoning


def _by_alias(**names: str) -> dict[str, str]:
    return {alias: name for name, aliases in names.items() for alias in aliases.split()}


TOOL_ALIASES = _by_alias(
    cohere_command="cohere_command3 cohere_command4",
    glm45="glm47 ling3 poolside_v1",
    harmony="openai",
    hermes="ernie45 granite4 qwen3_json",
    jamba="hunyuan_a13b",
    json="xlam",
    llama3_json="llama4_json",
    llama4_pythonic="pythonic",
    muse="muse_glimmer musespark1x",
    qwen3_coder="qwen3_xml step3p5",
)
"""vLLM's names of formats of calls, by ours."""
REASONING_ALIASES = _by_alias(
    cohere="cohere_command3 cohere_command4",
    deepseek_r1="minimax_m2 step3 step5",
    harmony="openai_gptoss",
    muse="muse_glimmer musespark1x",
    think="deepseek_v3 deepseek_v4 deepseek_v41 glm45 glm47 granite_thinking_parser holo2 hy_v3 kimi_k2 ling3 "
    "mimo minicpmv nemotron_v3 olmo3 poolside_v1 qwen3 step3p5",
)
"""vLLM's names of formats of reasoning, by ours."""
UNREAD = {"beam": "", "hf": "auto", "hy_v4": "", "inkling": "", "k2_horizon": "", "step5": ""}
"""Formats of vLLM's that we do not read, and the nearest that we do; "" where none is near."""

Named = TypeVar("Named", ToolFormat, ReasoningFormat)


def detect_formats(
    chat_template: str | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> OutputFormats:
    """The formats that a model answers in.

    `chat_template` is its Jinja source. A template that shows no format of tool calls gets "json". A parser of "auto"
    is detected from the template, "none" parses nothing, and a name takes that format; vLLM's names are known too.
    Where one of the two is a format of messages on channels, "auto" means the same for the other.

    Raises:
        ConfigError: a parser has an unknown name, or the two do not go together.
    """
    template = chat_template or ""
    spoken = next((known for known in TOOL_FORMATS if known.is_spoken(template)), None)
    tools = _choose("tool_call_parser", tool_call_parser, TOOL_FORMATS, TOOL_ALIASES, spoken)
    detected = template_reasoning(template)
    reasoning = _choose("reasoning_parser", reasoning_parser, REASONING_FORMATS, REASONING_ALIASES, detected)
    channels = OutputFormats(tools, reasoning).channels
    if channels and tool_call_parser == "auto":
        tools = next(known for known in TOOL_FORMATS if known.name == channels)
    if channels and reasoning_parser == "auto":
        reasoning = next((known for known in REASONING_FORMATS if known.name == channels), None)
    if channels and {known.name for known in (tools, reasoning) if known} != {channels}:
        has_reasoning = channels in {known.name for known in REASONING_FORMATS}
        mended = f"both must be {channels}," if has_reasoning else "reasoning_parser must be"
        raise ConfigError(
            f"tool_call_parser is {tool_call_parser!r} and reasoning_parser is {reasoning_parser!r}; answers in the "
            f"format {channels} are messages, so {mended} auto or none"
        )
    return OutputFormats(tools, reasoning)


def _choose(
    field: str, wanted: str, formats: tuple[Named, ...], aliases: Mapping[str, str], detected: Named | None
) -> Named | None:
    if wanted == "none":
        return None
    if wanted == "auto":
        return detected
    own: dict[str, Named] = {known.name: known for known in formats}
    found = own.get(wanted) or own.get(aliases.get(wanted, ""))
    if found is None:
        raise ConfigError(f"{field} is {wanted!r}{_unknown(wanted, ('auto', 'none', *own), aliases)}")
    return detected if detected is not None and detected.variant_of == found.name else found


def _unknown(wanted: str, names: Sequence[str], aliases: Mapping[str, str]) -> str:
    """What to say of a name that is none of `names`, and what is nearest to it."""
    nearest = UNREAD.get(wanted, "")
    if wanted not in UNREAD:
        close = difflib.get_close_matches(wanted, [*names, *aliases], n=1)
        nearest = close[0] if close else ""
    hint = f"; the nearest is {nearest}" if nearest in (*names, *aliases) else ""
    known = ", a format of vLLM's that jaxllm does not read" if wanted in UNREAD else ""
    return f"{known}; it must be one of {', '.join(names)}, or vLLM's name for one of them{hint}"
