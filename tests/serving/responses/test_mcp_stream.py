"""The events of servers' tools, and what becomes of tools when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY
from tests.serving.responses.fake_tools import FORECAST, MCP, WARN, hang, says, weather
from tests.serving.responses.shared import parse_events

ASKING = {"type": "mcp", "server_label": "weather"}


def shape(events: list[Any]) -> list[str]:
    """The events' types, with repeated deltas once, and the items that begin and end."""
    seen: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if name.startswith("output_item"):
            name = f"{name.removeprefix('output_item.')} {event['item']['type']} {event['output_index']}"
        elif "output_index" in event and "mcp" in name:
            name += f" {event['output_index']}"
        if not (name.partition(" ")[0].endswith("delta") and seen[-1:] == [name]):
            seen.append(name)
    return seen


TEXT = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]


def stream(client: Any, **body: Any) -> list[dict[str, Any]]:
    """Every event, checked against the openai package's types."""
    answer = httpx.post(f"{client.base_url}responses", json={"input": "x", "stream": True, "tools": [MCP]} | body)
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


def test_events_of_a_call(tools: Callable[..., Any]) -> None:
    client, _ = tools(weather(), script=[says(FORECAST, before="Let me see. ")])
    events = stream(client)
    assert shape(events) == [
        "created", "in_progress",
        "added mcp_list_tools 0", "mcp_list_tools.in_progress 0", "mcp_list_tools.completed 0", "done mcp_list_tools 0",
        "added message 1", *TEXT, "done message 1",
        "added mcp_call 2", "mcp_call.in_progress 2", "mcp_call_arguments.delta 2", "mcp_call_arguments.done 2",
        "mcp_call.completed 2", "done mcp_call 2",
        "added message 3", *TEXT, "done message 3", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = {event["output_index"]: event["item"] for event in events if event["type"].endswith("item.added")}
    done = {event["output_index"]: event["item"] for event in events if event["type"].endswith("item.done")}
    assert added[0]["tools"] == [] and len(done[0]["tools"]) == 2
    assert added[2]["arguments"] == "" and added[2]["status"] == "in_progress" and added[2]["output"] is None
    deltas = [event for event in events if event["type"] == "response.mcp_call_arguments.delta"]
    assert len(deltas) > 1 and "".join(event["delta"] for event in deltas) == done[2]["arguments"]
    assert {event["item_id"] for event in deltas} == {added[2]["id"]} and done[2]["output"] == "Rain in Paris."
    final = events[-1]["response"]
    assert final["output"] == [done[at] for at in range(4)]
    assert client.responses.retrieve(final["id"]).model_dump(mode="json")["output"][2]["output"] == "Rain in Paris."


def test_parallel_calls_end_as_they_end(tools: Callable[..., Any]) -> None:
    async def slow(city: str) -> str:
        await asyncio.sleep(0.2)
        return city

    client, _ = tools(weather(forecast=slow), script=[says(FORECAST, WARN)])
    events = shape(stream(client))
    assert events[6:] == [
        "added mcp_call 1", "mcp_call.in_progress 1", "mcp_call_arguments.delta 1", "mcp_call_arguments.done 1",
        "added mcp_call 2", "mcp_call.in_progress 2", "mcp_call_arguments.delta 2", "mcp_call_arguments.done 2",
        "mcp_call.completed 2", "done mcp_call 2", "mcp_call.completed 1", "done mcp_call 1",
        "added message 3", *TEXT, "done message 3", "completed",
    ]  # fmt: skip


def test_failures_have_their_events(tools: Callable[..., Any]) -> None:
    server = weather(warn=lambda: 1 / 0)
    client, _ = tools(server, script=[says(WARN)])
    assert "mcp_call.failed 1" in shape(stream(client))
    server.status = "failed"
    assert shape(stream(client))[2:6] == [
        "added mcp_list_tools 0", "mcp_list_tools.in_progress 0", "mcp_list_tools.failed 0", "done mcp_list_tools 0",
    ]  # fmt: skip


def test_events_of_an_approval(tools: Callable[..., Any]) -> None:
    client, _ = tools(weather(), script=[says(FORECAST)])
    events = stream(client, tools=[ASKING])
    assert shape(events)[6:] == ["added mcp_approval_request 1", "done mcp_approval_request 1", "completed"]
    request, response_id = events[-2]["item"], events[-1]["response"]["id"]
    assert events[-3]["item"] == request and json.loads(request["arguments"]) == {"city": "Paris"}
    yes = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    assert shape(stream(client, tools=[ASKING], input=[yes], previous_response_id=response_id)) == [
        "created", "in_progress",
        "added mcp_call 0", "mcp_call.in_progress 0", "mcp_call_arguments.delta 0", "mcp_call_arguments.done 0",
        "mcp_call.completed 0", "done mcp_call 0",
        "added message 1", *TEXT, "done message 1", "completed",
    ]  # fmt: skip


def test_the_sdk_helper_puts_it_together(tools: Callable[..., Any]) -> None:
    client, _ = tools(weather(), script=[says(FORECAST, WARN)])
    with client.responses.stream(model="fake", input="x", tools=[MCP]) as helper:
        for _ in helper:
            pass
        final = helper.get_final_response()
    assert [item.type for item in final.output] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert final.output_text == REPLY


def test_silence_of_a_tool_is_filled(tools: Callable[..., Any]) -> None:
    async def slow(city: str) -> str:
        await asyncio.sleep(0.3)
        return city

    client, _ = tools(weather(forecast=slow), script=[says(FORECAST)], serving={"sse_keep_alive": 0.05})
    text = httpx.post(f"{client.base_url}responses", json={"input": "x", "stream": True, "tools": [MCP]}).text
    between = text.split("mcp_call_arguments.done")[-1].split("mcp_call.completed")[0]
    assert ": keep-alive\n\n" in between


def test_a_client_that_goes_away_cancels_its_tools(tools: Callable[..., Any]) -> None:
    server = weather(forecast=lambda city: hang())
    client, engine = tools(server, script=[says(FORECAST)] * 2)
    events = client.responses.create(model="fake", input="x", tools=[MCP], stream=True)
    next(event for event in events if event.type == "response.mcp_call_arguments.done")
    wait_for(lambda: bool(server.calls))
    events.close()
    wait_for(lambda: server.cancelled == ["forecast"])
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).responses.create(model="fake", input="x", tools=[MCP])
    wait_for(lambda: server.cancelled == ["forecast"] * 2)
    assert not engine.active and len(engine.seen) == 2


def test_background_and_cancel(tools: Callable[..., Any]) -> None:
    server = weather(forecast=lambda city: hang())
    client, _ = tools(server, script=[says(FORECAST), says(WARN)])
    response = client.responses.create(model="fake", input="x", tools=[MCP], background=True)
    wait_for(lambda: bool(server.calls))
    assert [item.type for item in client.responses.retrieve(response.id).output] == ["mcp_list_tools", "mcp_call"]
    assert client.responses.cancel(response.id).status == "cancelled"
    assert server.cancelled == ["forecast"]
    response = client.responses.create(model="fake", input="x", tools=[MCP], background=True)
    wait_for(lambda: client.responses.retrieve(response.id).status == "completed")
    found = client.responses.retrieve(response.id)
    assert found.output[1].output == "Warned everybody." and found.output_text == REPLY


def test_a_background_stream_is_taken_up_again(tools: Callable[..., Any]) -> None:
    gate = asyncio.Event()

    async def wait() -> str:
        await gate.wait()
        return "Warned."

    server = weather(warn=wait)
    client, _ = tools(server, script=[says(WARN)])
    events = client.responses.create(model="fake", input="x", tools=[MCP], background=True, stream=True)
    first = []
    for event in events:
        first.append(event)
        if event.type == "response.mcp_call_arguments.done":
            break
    events.close()
    response_id = first[0].response.id
    wait_for(lambda: bool(server.calls))
    server.loop.call_soon_threadsafe(gate.set)
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=first[-1].sequence_number))
    assert rest[0].type == "response.mcp_call.completed" and rest[-1].response.output_text == REPLY
    numbers = [event.sequence_number for event in [*first, *rest]]
    assert numbers == list(range(len(numbers)))


def test_a_server_that_stops_cancels_tools(
    make_client: Callable[..., Any], roomy: Callable[..., Any], tmp_path: Any
) -> None:
    from tests.serving.responses.fake_tools import FakeServers
    from tests.serving.responses.shared import PARSERS

    server = weather(forecast=lambda city: hang())
    engine = roomy()
    engine.script.append(says(FORECAST))
    client = make_client(engine, data_dir=tmp_path, **PARSERS)
    client.app.state.server.tool_servers = FakeServers(server)
    body = {"input": "x", "tools": [MCP], "background": True}
    response = client.post("/v1/responses", json=body).json()
    wait_for(lambda: bool(server.calls))
    client.__exit__()
    assert server.cancelled == ["forecast"]
    after = make_client(roomy(), data_dir=tmp_path).get(f"/v1/responses/{response['id']}").json()
    assert after["status"] == "failed" and "stopped" in after["error"]["message"]


def test_what_fails_after_a_call_is_told(tools: Callable[..., Any]) -> None:
    server = weather()
    client, engine = tools(server, script=[says(FORECAST)])

    def die(city: str) -> str:
        engine.fail_after = 2
        return "x"

    server._functions["forecast"] = die
    events = stream(client)
    assert shape(events)[-3:] == ["done message 2", "error", "failed"]
    final = events[-1]["response"]
    assert [item["status"] for item in final["output"][1:]] == ["completed", "incomplete"]
    assert client.responses.retrieve(final["id"]).status == "failed"
