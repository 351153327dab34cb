"""A model that calls the tools of an MCP server, without a jaxllm server: in a script or a notebook.

pip install jaxllm
python examples/responses_session.py

The tools are those of examples/mcp/mcp.json, which need no network.
"""

import asyncio
from pathlib import Path

from jaxllm import LLM, ResponsesSession
from jaxllm.session.session import ConversationResult, Said, ToolCalled, ToolReturned

CONFIG = Path(__file__).parent / "mcp" / "mcp.json"
QUESTION = [{"role": "user", "content": "What is 6 times 7? Use the tool."}]

# A model as small as SmolLM2 does not know when to call a tool, so its first turn has to, nor when to stop, so it has
# two turns at most. Larger ones need neither.
SETTINGS = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 200}

# `session.add_mcp_server("name", command=…)`, or url=…, adds servers that are in no file.
llm = LLM("smollm2-135m")
with ResponsesSession.from_config_path(CONFIG, llm, **SETTINGS) as session:
    print([tool["function"]["name"] for tool in asyncio.run(session.list_openai_tools())])
    print(asyncio.run(session.call_tool("toolbox_multiply", {"a": 6, "b": 7})).text)

    # All at once. This works in notebooks too, whose event loop is running already.
    result = session.run(QUESTION, max_turns=2, allowed_tools=["toolbox_multiply"])
    for call in result.tool_calls:
        print(f"{call.call.name}({call.call.arguments}) -> {call.output}")
    # The second turn of a model as small as this is another call, which is one too many, and no message.
    print(f"after {result.turns_taken} turns: {result.final_message or 'no message, but a call that was one too many'}")

    # Step by step.
    async def show() -> None:
        async for step in session.stream_conversation(QUESTION, max_turns=2, allowed_tools=["toolbox_multiply"]):
            match step:
                case Said(text):
                    print(text, end="", flush=True)
                case ToolCalled(name=name, arguments=arguments):
                    print(f"{name}({arguments})")
                case ToolReturned(output=output):
                    print(f"-> {output}")
                case ConversationResult(completed=completed):
                    print("completed" if completed else "it would have gone on")

    asyncio.run(show())
llm.shutdown()
