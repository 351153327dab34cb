"""Tools for models whose chat template knows none: described in the prompt, their calls and results written as text.

The same way as llama.cpp's generic format: any instructed model can answer with JSON that its prompt asks for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxllm.serving.conversation import Tool
from jaxllm.serving.parsing.output_format import ToolFormat

_INSTRUCTIONS = """You can call functions. Each line describes one, with a JSON schema of its arguments:
{functions}
To call a function, answer with nothing but its name and arguments, written exactly like this:
{example}
When no function helps, answer the user in plain text."""


def knows_tools(template: str) -> bool:
    """Whether a chat template writes tools into the prompt."""
    return "tools" in template


def has_tool_turns(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the conversation has calls or their results in it."""
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation with instructions for `tools` in its system message, or else in its first user message.

    Calls become text of the assistant, results text of the user, so that roles alternate as templates want them.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", f"Result of {message.get('name', 'the function')}: {text}"
        elif "tool_calls" in message:
            text = "\n".join(filter(None, (text, calls_text(message["tool_calls"], tool_format))))
        if plain and plain[-1]["role"] == role == "user":
            plain[-1]["content"] += f"\n{text}"
        else:
            kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
            plain.append({**kept, "role": role, "content": text})
    if not tools:
        return plain
    functions = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
    example = {"function": {"name": "function_name", "arguments": {"argument": "value"}}}
    instructions = _INSTRUCTIONS.format(functions=functions, example=calls_text([example], tool_format))
    for message in plain:
        if message["role"] == "system":
            message["content"] += f"\n\n{instructions}"
            return plain
    for message in plain:
        if message["role"] == "user":
            message["content"] = f"{instructions}\n\n{message['content']}"
            return plain
    return [{"role": "user", "content": instructions}, *plain]


def calls_text(calls: Sequence[dict[str, Any]], tool_format: ToolFormat) -> str:
    """Calls as a model of this format writes them."""
    layout = tool_format.layout
    written = (
        layout.head(call["function"]["name"], at)
        + json.dumps(call["function"]["arguments"], ensure_ascii=False)
        + layout.end
        for at, call in enumerate(calls)
    )
    return layout.start + layout.between.join(written) + layout.stop
