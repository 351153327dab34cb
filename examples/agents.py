"""OpenAI's Agents SDK on a jaxllm server: functions of ours, and an MCP server's tools that jaxllm runs.

jaxllm serve smollm2-135m --mcp-config examples/mcp/mcp.json      # in another terminal
pip install openai-agents
python examples/agents.py [http://127.0.0.1:8000]
"""

import asyncio
import sys
from pathlib import Path

# This file has the name of the SDK's package, which Python would look for in this folder first.
sys.path = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]

from agents import (  # noqa: E402
    Agent,
    HostedMCPTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.items import MCPApprovalRequestItem, ToolCallItem, ToolCallOutputItem  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
set_tracing_disabled(True)  # traces would go to OpenAI

# A model as small as SmolLM2 does not know when to call a tool, or when to stop: its first turn has to call, and calls
# are counted. Larger ones need none of that.
FORCED = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0)
FORCED_ONCE = ModelSettings(
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
    max_tokens=500,
    extra_args={"max_tool_calls": 1},
)


@function_tool
def population(city: str) -> str:
    """How many people live in a city."""
    return {"Paris": "2.1 million", "Rome": "2.8 million"}.get(city, "unknown")


def show(title: str, result) -> None:
    print(f"{title}:")
    for item in result.new_items:
        match item:
            case ToolCallItem(raw_item=call) if call.type == "mcp_call":
                print(f"  the server ran {call.name}({call.arguments}) -> {call.output}")
            case ToolCallItem(raw_item=call):
                print(f"  we run {call.name}({call.arguments})")
            case ToolCallOutputItem(output=output):
                print(f"  -> {output}")
            case MCPApprovalRequestItem(raw_item=asked):
                print(f"  approved of {asked.name}({asked.arguments})")
    print(f"  {result.final_output!r}")


async def main() -> None:
    model = (await client.models.list()).data[0].id
    responses, chat = OpenAIResponsesModel(model, client), OpenAIChatCompletionsModel(model, client)

    # Functions that this program runs, over either API.
    question = "How many people live in Paris?"
    for name, kind in (("responses", responses), ("chat", chat)):
        agent = Agent(
            "guide", model=kind, tools=[population], model_settings=FORCED, tool_use_behavior="stop_on_first_tool"
        )
        show(name, await Runner.run(agent, question))

    # Tools of an MCP server that jaxllm has in its configuration, and runs itself.
    toolbox = {"type": "mcp", "server_label": "toolbox", "allowed_tools": ["multiply"], "require_approval": "never"}
    agent = Agent("teacher", model=responses, tools=[HostedMCPTool(toolbox)], model_settings=FORCED_ONCE)
    show("an MCP server's tools", await Runner.run(agent, "What is 6 times 7? Use the tool."))

    # Without require_approval "never" each call waits until somebody has approved of it.
    asking = HostedMCPTool(toolbox | {"require_approval": "always"}, on_approval_request=lambda _: {"approve": True})
    agent = Agent("teacher", model=responses, tools=[asking], model_settings=FORCED_ONCE)
    show("with approval", await Runner.run(agent, "What is 6 times 7? Use the tool."))


asyncio.run(main())
