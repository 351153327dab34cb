"""A Messages request as the conversation and the settings that say the same."""

from __future__ import annotations

import json
import re

from jaxllm.chat.conversation import (
    Call,
    Conversation,
    Message,
    NamedTool,
    Rendering,
    Tool,
    ToolChoice,
    renaming,
    thinking_variables,
)
from jaxllm.errors import Field
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.serving.anthropic.request import (
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceParam,
    ToolChoiceTool,
    ToolResultBlockParam,
)
from jaxllm.serving.generation import GenerationSettings

PREFIX = "toolu_"
SPELLED = "toolu_id-"
"""Before an id that has other characters, each as a hyphen and its code: Kimi's, which its templates insist on."""
SHORT_ID = 9
"""Characters of the ids that Mistral's templates insist on."""
_OTHER = re.compile(r"[^a-zA-Z0-9_]")
_CODE = re.compile(r"-([0-9a-f]{2})")


def tool_use_id(call_id: str) -> str:
    """The id of a call for the client.

    Worked example: `call_5f` becomes `toolu_5f`, Mistral's `aB3dE6gH9` becomes `toolu_aB3dE6gH9`, and Kimi's
    `functions.now:0` becomes `toolu_id-functions-2enow-3a0`.
    """
    if _OTHER.search(call_id):
        return SPELLED + _OTHER.sub(lambda match: f"-{ord(match.group()):02x}", call_id)
    return PREFIX + call_id.removeprefix("call_")


def template_call_id(sent: str) -> str:
    """The id for the template of a call that a client sends back: the model's own, but ours as they are."""
    if sent.startswith(SPELLED):
        return _CODE.sub(lambda match: chr(int(match.group(1), 16)), sent.removeprefix(SPELLED))
    bare = sent.removeprefix(PREFIX)
    return bare if len(bare) == SHORT_ID else sent


ERROR_PREFIX = "Error: "

FIELD_NAMES = renaming({"structured_outputs": "output_config.format", "stop": "stop_sequences"})
"""What the fields of a Conversation and its GenerationSettings are called here."""


def conversation(body: CountTokensRequest) -> Conversation:
    """Raises InvalidRequestError: see FIELD_NAMES."""
    choice, config, thinking = body.tool_choice, body.output_config or OutputConfig(), body.thinking
    tools = [
        Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), Field("tools", at, "input_schema"))
        for at, tool in enumerate(body.tools or ())
    ]
    thinks = None if thinking is None else not isinstance(thinking, ThinkingDisabled)
    budget = thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None
    schema = None if config.format is None else json.dumps(config.format.schema_)
    return Conversation(
        messages=messages(body),
        tools=[] if isinstance(choice, ToolChoiceNone) else tools,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=isinstance(choice, ToolChoiceNone | None) or not choice.disable_parallel_tool_use,
        rendering=Rendering(
            variables=thinking_variables(thinks, config.effort, budget),
            opens_answer=not body.continues_answer,
            continues_last=body.continues_answer,
        ),
        structured_outputs=None if schema is None else StructuredOutputs(json=schema),
    )


def generation_settings(body: MessagesRequest) -> GenerationSettings:
    asked = {
        "temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences,
    }  # fmt: skip
    return GenerationSettings(
        sampling={name: value for name, value in asked.items() if value is not None},
        max_tokens=body.max_tokens,
        cut_to_context=True,
    )


def messages(body: CountTokensRequest) -> list[Message]:
    """The system prompt first; each tool_result is a message of its own."""
    found = []
    if body.system:
        texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        found.append(Message("system", "\n".join(texts)))
    for turn in body.turns:
        text = "\n".join(turn.texts)
        if turn.role == "assistant":
            reasoning = "\n".join(turn.thoughts) if any(turn.thoughts) else None
            calls = [Call(template_call_id(block.id), block.name, block.input) for block in turn.calls]
            found.append(Message("assistant", text, reasoning=reasoning, calls=calls))
            continue
        found += [_result(block) for block in turn.results]
        if turn.texts:
            found.append(Message("user" if turn.role == "user" else "system", text))
    return found


def _result(block: ToolResultBlockParam) -> Message:
    texts = [part.text for part in block.content] if isinstance(block.content, list) else [block.content or ""]
    prefix = ERROR_PREFIX if block.is_error else ""
    return Message("tool", prefix + "\n".join(texts), call_id=template_call_id(block.tool_use_id))


def _tool_choice(choice: ToolChoiceParam | None) -> ToolChoice:
    match choice:
        case ToolChoiceTool(name=name):
            return NamedTool(name)
        case ToolChoiceAuto(type="any"):
            return "required"
        case _:
            return "auto"
