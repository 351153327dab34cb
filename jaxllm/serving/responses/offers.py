"""Which tools a turn offers to the model, and whether it must call one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jaxllm.chat.conversation import MAX_TOOLS, NamedTool, Tool, ToolChoice
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.mcp.tools import ServerTool
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.responses.mcp_request import ChosenServer
from jaxllm.serving.responses.request import AllowedFunctions, ChosenFunction, FunctionTool, PromptFields
from jaxllm.serving.responses.toolbox import Toolbox
from jaxllm.wording import shown


@dataclass(frozen=True)
class Offer:
    """What a conversation has as `tools` and `tool_choice`."""

    tools: list[Tool]
    choice: ToolChoice


def as_functions(tools: Sequence[Tool]) -> list[FunctionTool]:
    """Servers' tools as functions, which the client runs."""
    return [
        FunctionTool(type="function", name=tool.name, description=tool.description, parameters=tool.parameters)
        for tool in tools
    ]


def check_choice(body: PromptFields) -> None:
    """Raises InvalidRequestError where tool_choice asks for what is not in tools."""
    choice = body.tool_choice
    if choice == "required" and not body.tools:
        raise InvalidRequestError("tool_choice is 'required', but tools is empty", "tool_choice")
    chosen: dict[str, ChosenFunction | ChosenServer] = {}
    if isinstance(choice, ChosenFunction | ChosenServer):
        chosen = {"tool_choice": choice}
    elif isinstance(choice, AllowedFunctions):
        chosen = {f"tool_choice.tools[{at}]": tool for at, tool in enumerate(choice.tools)}
    for place, tool in chosen.items():
        if isinstance(tool, ChosenFunction):
            field, name, known = f"{place}.name", tool.name, body.function_names.values()
        else:
            field, name, known = f"{place}.server_label", tool.server_label, body.server_labels.values()
        if name not in known:
            has = f"tools has {', '.join(known)}" if known else "tools has none"
            raise InvalidRequestError(f"{field} is {shown(name)}; {has}", field)


def make_offer(body: PromptFields, toolbox: Toolbox, *, forces: bool, runs: bool) -> Offer:
    """What one turn offers.

    Args:
        forces: tool_choice still holds where it asks for a call; once servers' tools have run the model decides, or it
            would call for ever.
        runs: this server may still call tools; without it only functions are offered.

    Raises:
        InvalidRequestError, APIError: there are too many tools, or none of those that must be called.
    """
    choice = body.tool_choice
    if choice == "none":
        return Offer([], "auto")
    functions = [tool.tool("tools", at) for at, tool in enumerate(body.tools) if isinstance(tool, FunctionTool)]
    served = list(toolbox.tools()) if runs else []
    if isinstance(choice, AllowedFunctions):
        functions = [tool for tool in functions if any(_names(one, tool) for one in choice.tools)]
        served = [(tool, told) for tool, told in served if any(_has(one, tool) for one in choice.tools)]
    elif isinstance(choice, ChosenServer) and forces:
        functions, served = [], [(tool, told) for tool, told in served if _has(choice, tool)]
    tools = [*functions, *(told for _, told in served)]
    if len(tools) > MAX_TOOLS:
        problem = (
            f" are {len(tools)}, those of servers among them; at most {MAX_TOOLS} can be offered: use allowed_tools"
        )
        raise InvalidRequestError([Field("tools"), problem])
    asked = _asked(body.tool_choice) if forces else "auto"
    if asked != "auto" and not tools:
        _refuse_choice(toolbox, runs)
    if isinstance(choice, ChosenServer) and isinstance(asked, NamedTool):
        asked = NamedTool(tools[0].name)
    return Offer(tools, asked)


def _refuse_choice(toolbox: Toolbox, runs: bool) -> NoReturn:
    message = "tool_choice asks for a call, but there is no such tool"
    for listing in toolbox.listings:
        if listing.error is not None:
            message += f": {listing.label}: {listing.error}"
            raise APIError(424, message, param="tool_choice", code="tool_server_failed")
    raise InvalidRequestError(message if runs else f"{message} to call where max_tool_calls is 0", "tool_choice")


def _asked(choice: object) -> ToolChoice:
    match choice:
        case ChosenFunction(name=name) | ChosenServer(name=str(name)):
            return NamedTool(name)
        case ChosenServer():
            return "required"
        case AllowedFunctions(mode=mode):
            return mode
        case "required":
            return "required"
        case _:
            return "auto"


def _names(chosen: ChosenFunction | ChosenServer, tool: Tool) -> bool:
    return isinstance(chosen, ChosenFunction) and chosen.name == tool.name


def _has(chosen: ChosenFunction | ChosenServer, tool: ServerTool) -> bool:
    return isinstance(chosen, ChosenServer) and chosen.server_label == tool.server and chosen.name in (None, tool.name)
