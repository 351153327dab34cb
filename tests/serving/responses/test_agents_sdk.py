"""OpenAI's Agents SDK running its own loop, and ours, against this server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest

from tests.mcp.conftest import Listening, wait_for
from tests.serving.fake_engine import REPLY
from tests.serving.responses.fake_tools import FORECAST, MCP, WARN, says, weather
from tests.serving.responses.shared import prompt_text

pytestmark = pytest.mark.programs

Mode = Literal["responses", "chat"]
BOTH = pytest.mark.parametrize("mode", ["responses", "chat"])


@pytest.fixture
def sdk() -> Any:
    """Half a second to load, which most of the processes that collect tests can spare."""
    import agents

    return agents


def population(city: str) -> int:
    """How many people live in a city."""
    return {"Paris": 2_100_000}[city]


@pytest.fixture
def quiet(sdk: Any) -> Any:
    return sdk.RunConfig(tracing_disabled=True)


@pytest.fixture
def agent(sdk: Any, tools: Callable[..., Any]) -> Callable[..., Any]:
    """An agent of a model that says `script`, the tool server it may ask, and the engine."""

    def make(mode: Mode, *script: str, **settings: Any) -> tuple[Any, Any, Any]:
        server = weather()
        client, engine = tools(server, script=script, serving={"mcp_inject": False})
        kind = sdk.OpenAIResponsesModel if mode == "responses" else sdk.OpenAIChatCompletionsModel
        model = kind("fake", openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0))
        return sdk.Agent("helper", instructions="Be brief.", model=model, **settings), server, engine

    return make


@BOTH
def test_its_own_functions(sdk: Any, quiet: Any, agent: Callable[..., Any], mode: Mode) -> None:
    call = says(("population", {"city": "Paris"}))
    helper, _, engine = agent(mode, call, tools=[sdk.function_tool(population)])
    result = sdk.Runner.run_sync(helper, "How many?", run_config=quiet)
    assert result.final_output == REPLY and "[tool]2100000[assistant]" in prompt_text(engine)
    assert result.context_wrapper.usage.requests == 2


@BOTH
def test_its_own_functions_streamed(sdk: Any, quiet: Any, agent: Callable[..., Any], mode: Mode) -> None:
    helper, _, _ = agent(mode, says(("population", {"city": "Paris"})), tools=[sdk.function_tool(population)])

    async def go() -> tuple[list[str], str]:
        result = sdk.Runner.run_streamed(helper, "How many?", run_config=quiet)
        kinds = [event.item.type async for event in result.stream_events() if event.type == "run_item_stream_event"]
        return kinds, result.final_output

    assert asyncio.run(go()) == (["tool_call_item", "tool_call_output_item", "message_output_item"], REPLY)


@BOTH
def test_mcp_servers_of_its_own(sdk: Any, quiet: Any, agent: Callable[..., Any], mode: Mode) -> None:
    async def go(url: str) -> None:
        async with sdk.mcp.MCPServerStreamableHttp({"url": url}) as server:
            helper, _, engine = agent(mode, says(("add", {"a": 2, "b": 3})), mcp_servers=[server])
            result = await sdk.Runner.run(helper, "2 + 3?", run_config=quiet)
            assert result.final_output == REPLY
            (output,) = (item for item in result.new_items if isinstance(item, sdk.items.ToolCallOutputItem))
            assert "5" in str(output.output) and "5" in prompt_text(engine).partition("[tool]")[2]

    listening = Listening("http")
    try:
        wait_for(listening.listens)
        asyncio.run(go(listening.url))
    finally:
        listening.end()


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_that_the_server_runs(sdk: Any, quiet: Any, agent: Callable[..., Any], streamed: bool) -> None:
    helper, server, _ = agent("responses", says(FORECAST), tools=[sdk.HostedMCPTool(tool_config=MCP)])

    async def go() -> Any:
        if not streamed:
            return await sdk.Runner.run(helper, "weather?", run_config=quiet)
        result = sdk.Runner.run_streamed(helper, "weather?", run_config=quiet)
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(go())
    assert result.final_output == REPLY and server.calls == [("forecast", {"city": "Paris"})]
    assert {sdk.items.MCPListToolsItem, sdk.items.ToolCallItem} <= {type(item) for item in result.new_items}


@pytest.mark.parametrize("approve", [True, False])
def test_approvals(sdk: Any, quiet: Any, agent: Callable[..., Any], approve: bool) -> None:
    def decide(request: Any) -> dict[str, Any]:
        assert request.data.name == "warn"
        return {"approve": approve, "reason": "not today"}

    tool = sdk.HostedMCPTool(tool_config=MCP | {"require_approval": "always"}, on_approval_request=decide)
    helper, server, engine = agent("responses", says(WARN), tools=[tool])
    result = sdk.Runner.run_sync(helper, "warn them", run_config=quiet)
    assert result.final_output == REPLY and server.calls == [("warn", {})] * approve
    assert any(isinstance(item, sdk.items.MCPApprovalRequestItem) for item in result.new_items)
    assert ("The reason given: not today" in prompt_text(engine)) is not approve


def test_a_forced_choice_ends(sdk: Any, quiet: Any, agent: Callable[..., Any]) -> None:
    settings = sdk.ModelSettings(tool_choice="required", parallel_tool_calls=False)
    tools = [sdk.function_tool(population), sdk.HostedMCPTool(tool_config=MCP)]
    script = [says(FORECAST), says(("population", {"city": "Paris"}))]
    helper, server, _ = agent("responses", *script, tools=tools, model_settings=settings)
    assert sdk.Runner.run_sync(helper, "x", run_config=quiet).final_output == REPLY and len(server.calls) == 1
