"""Calls that wait for the client's approval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.serving.fake_engine import REPLY
from tests.serving.responses.fake_tools import FORECAST, MCP, WARN, FakeServer, says, weather
from tests.serving.responses.shared import prompt_text
from tests.support.covers import covers

ASKING = {"type": "mcp", "server_label": "weather"}


def answer(request: Any, approve: bool = True, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve, **fields}


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


@pytest.fixture
def asked(tools: Callable[..., Any]) -> Callable[..., Any]:
    """A server, the client, the engine, and a response that asks for approval."""

    def ask(*calls: Any, tool: dict[str, Any] = ASKING, **fields: Any) -> tuple[FakeServer, Any, Any, Any]:
        server = weather()
        client, engine = tools(server, script=[says(*calls or [FORECAST])])
        return server, client, engine, client.responses.create(model="fake", input="x", tools=[tool], **fields)

    return ask


@covers("McpApprovalResponseItem", "approval_request_id", "approve")
@covers("McpApprovalRequestItem", "id", "server_label", "name", "arguments")
def test_a_call_runs_once_it_is_approved(asked: Callable[..., Any]) -> None:
    server, client, engine, first = asked()
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"] and first.status == "completed"
    request = first.output[-1]
    assert (request.name, request.server_label, request.arguments) == ("forecast", "weather", '{"city": "Paris"}')
    assert request.id.startswith("mcpr_") and not server.calls and len(engine.seen) == 1
    second = client.responses.create(
        model="fake", input=[answer(request)], previous_response_id=first.id, tools=[ASKING]
    )
    assert kinds(second) == ["mcp_call", "message"] and second.output_text == REPLY
    assert second.output[0].approval_request_id == request.id and second.output[0].output == "Rain in Paris."
    assert server.calls == [("forecast", {"city": "Paris"})]
    chained = prompt_text(engine)
    assert chained.count('<weather_forecast {"city": "Paris"}>') == 1
    sent_back = [{"role": "user", "content": "x"}, *first.output, answer(request)]
    unstored = client.responses.create(model="fake", input=sent_back, tools=[ASKING], store=False)
    assert kinds(unstored) == ["mcp_call", "message"] and prompt_text(engine) == chained
    again = [*sent_back, *unstored.output, {"role": "user", "content": "and?"}]
    third = client.responses.create(model="fake", input=again, tools=[ASKING], store=False)
    assert kinds(third) == ["message"] and len(server.calls) == 2
    third = client.responses.create(model="fake", input="and?", previous_response_id=second.id, tools=[ASKING])
    assert kinds(third) == ["message"] and len(server.calls) == 2


@covers("McpApprovalResponseItem", "reason")
def test_the_model_is_told_of_a_refusal(asked: Callable[..., Any]) -> None:
    server, client, engine, first = asked()
    no = answer(first.output[-1], approve=False, reason="too nosy")
    second = client.responses.create(model="fake", input=[no], previous_response_id=first.id, tools=[ASKING])
    assert kinds(second) == ["message"] and not server.calls
    told = "[tool]The call was not made: the user refused it. The reason given: too nosy[assistant]"
    assert prompt_text(engine).endswith('<weather_forecast {"city": "Paris"}>' + told)


def test_in_a_conversation(asked: Callable[..., Any], tools: Callable[..., Any]) -> None:
    server = weather()
    client, _ = tools(server, script=[says(FORECAST)])
    conversation = client.conversations.create().id
    first = client.responses.create(model="fake", input="x", tools=[ASKING], conversation=conversation)
    request = first.output[-1]
    client.responses.create(model="fake", input=[answer(request)], tools=[ASKING], conversation=conversation)
    items = client.conversations.items.list(conversation, order="asc").data
    assert [item.type for item in items] == [
        "message", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call", "message",
    ]  # fmt: skip
    assert items[3].approve is True and items[4].output == "Rain in Paris."
    with pytest.raises(openai.BadRequestError, match="answered already"):
        client.responses.create(model="fake", input=[answer(request)], tools=[ASKING], conversation=conversation)


def test_who_does_not_answer_may_go_on(asked: Callable[..., Any]) -> None:
    server, client, engine, first = asked()
    second = client.responses.create(model="fake", input="never mind", previous_response_id=first.id, tools=[ASKING])
    assert second.output_text == REPLY and not server.calls
    assert "[tool]The call was not made: the user has not approved it.[user]never mind" in prompt_text(engine)


def test_several_answers_at_once(asked: Callable[..., Any]) -> None:
    server, client, engine, first = asked(FORECAST, WARN, ("weather_forecast", {"city": "Rome"}))
    requests = first.output[1:]
    assert [request.type for request in requests] == ["mcp_approval_request"] * 3
    answers = [answer(requests[0]), answer(requests[1], False), answer(requests[2])]
    second = client.responses.create(model="fake", input=answers, previous_response_id=first.id, tools=[ASKING])
    assert [item.output for item in second.output[:-1]] == ["Rain in Paris.", "Rain in Rome."]
    assert "the user refused it" in prompt_text(engine) and server.most_running >= 1


def test_answers_to_nothing_are_refused(asked: Callable[..., Any]) -> None:
    _, client, _, first = asked()
    request = first.output[-1]
    unknown = {"type": "mcp_approval_response", "approval_request_id": "mcpr_0", "approve": True}
    for items, tool, told in (
        ([unknown], ASKING, f"'mcpr_0', which no mcp_approval_request before it has; those that wait are {request.id}"),
        ([answer(request), answer(request)], ASKING, "answered already"),
        ([answer(request)], None, "server 'weather', which is not in tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=told) as caught:
            client.responses.create(
                model="fake", input=items, previous_response_id=first.id, tools=[tool] if tool else []
            )
        assert caught.value.param == f"input[{len(items) - 1}].approval_request_id"
    with pytest.raises(openai.BadRequestError, match="nothing waits for approval"):
        client.responses.create(model="fake", input=[unknown], tools=[ASKING])


@covers("ApprovalFilters", "always", "never")
@covers("McpTool", "require_approval")
@pytest.mark.parametrize(
    ("setting", "asks"),
    [
        ("always", ["forecast", "warn"]),
        ("never", []),
        ({"never": {"tool_names": ["warn"]}}, ["forecast"]),
        ({"never": {"read_only": True}}, ["warn"]),
        ({"always": {"tool_names": ["warn"]}}, ["forecast", "warn"]),
        ({"always": {"tool_names": ["warn"]}, "never": {"tool_names": ["warn", "forecast"]}}, ["warn"]),
        ({}, ["forecast", "warn"]),
    ],
)
def test_which_calls_need_it(asked: Callable[..., Any], setting: Any, asks: list[str]) -> None:
    server, _, _, response = asked(FORECAST, WARN, tool=ASKING | {"require_approval": setting})
    assert [item.name for item in response.output if item.type == "mcp_approval_request"] == asks
    assert sorted([*asks, *(name for name, _ in server.calls)]) == ["forecast", "warn"]


def test_nobody_is_asked_about_what_cannot_run(asked: Callable[..., Any]) -> None:
    _, _, _, response = asked(("weather_forecast", '{"city": "Par'))
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"] and response.output[1].status == "failed"
    assert response.output[1].error.content[0]["text"].endswith("it must be the JSON text of an object")


def test_a_call_that_is_cut_off_is_not_asked_about(asked: Callable[..., Any]) -> None:
    _, _, _, response = asked(max_output_tokens=55)
    assert kinds(response) == ["mcp_list_tools", "mcp_call"] and response.status == "incomplete"
    assert response.output[1].status == "incomplete" and response.output[1].arguments.startswith('{"city"')


def test_an_empty_filter_is_refused(asked: Callable[..., Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_names, read_only or both"):
        asked(tool=MCP | {"require_approval": {"never": {}}})
