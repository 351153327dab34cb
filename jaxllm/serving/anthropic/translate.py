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
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolParam,
    ToolResultBlockParam,
    Turn,
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
    parallel = isinstance(body.tool_choice, ToolChoiceNone | None) or not body.tool_choice.disable_parallel_tool_use
    return Conversation(
        messages=messages(body),
        tools=[]
        if isinstance(body.tool_choice, ToolChoiceNone)
        else [_tool(at, tool) for at, tool in enumerate(body.tools or ())],
        tool_choice=_tool_choice(body),
        parallel_tool_calls=parallel,
        rendering=_rendering(body),
        structured_outputs=_constraint(body),
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
        found.append(Message("system", _joined(texts)))
    for turn in body.turns:
        found += [_answer(turn)] if turn.role == "assistant" else _request(turn)
    return found


def _request(turn: Turn) -> list[Message]:
    results = [_result(block) for block in turn.results]
    if not turn.texts:
        return results
    return [*results, Message("user" if turn.role == "user" else "system", _joined(turn.texts))]


def _result(block: ToolResultBlockParam) -> Message:
    texts = [part.text for part in block.content] if isinstance(block.content, list) else [block.content or ""]
    prefix = ERROR_PREFIX if block.is_error else ""
    return Message("tool", prefix + _joined(texts), call_id=template_call_id(block.tool_use_id))


def _answer(turn: Turn) -> Message:
    return Message(
        "assistant",
        _joined(turn.texts),
        reasoning=_joined(turn.thoughts) if any(turn.thoughts) else None,
        calls=[Call(template_call_id(block.id), block.name, block.input) for block in turn.calls],
    )


def _joined(texts: list[str]) -> str:
    return "\n".join(texts)


def _tool(at: int, tool: ToolParam) -> Tool:
    field = Field("tools", at, "input_schema")
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), field)


def _tool_choice(body: CountTokensRequest) -> ToolChoice:
    match body.tool_choice:
        case ToolChoiceTool(name=name):
            return NamedTool(name)
        case ToolChoiceAny():
            return "required"
        case _:
            return "auto"


def _rendering(body: CountTokensRequest) -> Rendering:
    thinks = None if body.thinking is None else not isinstance(body.thinking, ThinkingDisabled)
    effort = body.output_config.effort if body.output_config is not None else None
    budget = body.thinking.budget_tokens if isinstance(body.thinking, ThinkingEnabled) else None
    continues = body.continues_answer
    variables = thinking_variables(thinks, effort, budget)
    return Rendering(variables=variables, opens_answer=not continues, continues_last=continues)


def _constraint(body: CountTokensRequest) -> StructuredOutputs | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    return StructuredOutputs(json=json.dumps(body.output_config.format.schema_))
