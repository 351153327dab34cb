"""MCP servers switched on, their calls shown, and approvals asked for; the server's side is played from a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.web.driver import Driver, expect

SERVERS = {
    "object": "list",
    "data": [
        {"label": "clock", "description": "Tells the time", "status": "ready", "error": None, "tools": ["clock_now"]},
        {"label": "files", "description": None, "status": "failed", "error": "the command was not found", "tools": []},
    ],
}  # fmt: skip
LISTED = {
    "id": "mcpl_1",
    "type": "mcp_list_tools",
    "server_label": "clock",
    "tools": [{"name": "now", "input_schema": {}}],
}
CALL = {
    "id": "mcp_1",
    "type": "mcp_call",
    "server_label": "clock",
    "name": "now",
    "arguments": "",
    "output": None,
    "error": None,
}
ARGUMENTS = '{"zone":"Europe/Paris"}'
USAGE = {
    "input_tokens": 40,
    "output_tokens": 12,
    "total_tokens": 52,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}
END = [{"type": "response.completed", "response": {"status": "completed", "usage": USAGE}}]


def item(value: dict[str, Any], **done: Any) -> list[dict[str, Any]]:
    return [
        {"type": "response.output_item.added", "output_index": 0, "item": value},
        *([] if value["type"] != "mcp_call" else [
            {"type": "response.mcp_call_arguments.delta", "item_id": value["id"], "delta": ARGUMENTS[:9]},
            {"type": "response.mcp_call_arguments.done", "item_id": value["id"], "arguments": ARGUMENTS},
        ]),
        {"type": "response.output_item.done", "output_index": 0, "item": value | done},
    ]  # fmt: skip


def text(said: str) -> list[dict[str, Any]]:
    return [
        {"type": "response.output_text.delta", "item_id": "msg_1", "delta": part, "logprobs": []}
        for part in said.split("|")
    ]


@pytest.fixture
def script(page: Driver) -> list[list[dict[str, Any]]]:
    """The events that each response has; the requests for them are in `page.asked`."""
    turns: list[list[dict[str, Any]]] = []
    page.asked = []  # type: ignore[attr-defined]

    def respond(route: Any) -> None:
        page.asked.append(route.request.post_data_json)  # type: ignore[attr-defined]
        events = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in turns.pop(0))
        route.fulfill(status=200, content_type="text/event-stream", body=events)

    page.page.route("**/v1/responses", respond)
    page.page.route("**/v1/mcp/servers", lambda route: route.fulfill(json=SERVERS))
    page.page.reload()
    return turns


def switch_on(page: Driver, approval: str | None = None, server: str = "clock", calls: str | None = None) -> None:
    page.button("Tools").click()
    page.page.get_by_role("switch", name=server).click()
    if approval is not None:
        page.page.get_by_label(f"Ask before calls of {server}").click()
        page.page.get_by_title(approval).click()
    if calls is not None:
        page.page.get_by_label("Calls", exact=True).click()
        page.page.get_by_title(calls).click()
    page.page.keyboard.press("Escape")


def test_without_tool_servers_nothing_is_shown_of_them(page: Driver):
    page.say("Hello")
    expect(page.page.get_by_text("Tools")).to_have_count(0)


def test_servers_are_listed_with_what_is_wrong_with_them(page: Driver, script: list):
    page.button("Tools").click()
    expect(page.page.get_by_text("failed: the command was not found")).to_be_visible()
    expect(page.page.get_by_role("switch", name="files")).to_be_disabled()
    expect(page.page.get_by_role("switch", name="clock")).not_to_be_checked()


def test_a_call_is_shown_with_its_arguments_and_result(page: Driver, script: list):
    script.append(
        [
            *item(LISTED),
            *item(CALL, arguments=ARGUMENTS, output='{"time":"12:00"}', status="completed"),
            *text("It is |noon."),
            *END,
        ]
    )
    switch_on(page, "Never ask")
    page.say("What time is it?")
    assert page.asked[0]["tools"] == [{"type": "mcp", "server_label": "clock", "require_approval": "never"}]
    expect(page.answers).to_contain_text("It is noon.")
    call = page.page.get_by_role("button", name="clock: now")
    expect(call).to_contain_text("done")
    call.press("Enter")
    expect(page.answers).to_contain_text('"zone": "Europe/Paris"')
    expect(page.answers).to_contain_text('"time": "12:00"')


@pytest.mark.parametrize(
    "calls, sent",
    [
        ("Call some tool first", "required"),
        ("Call clock_now first", {"type": "mcp", "server_label": "clock", "name": "now"}),
    ],
)
def test_a_call_can_be_asked_for(page: Driver, script: list, calls: str, sent: object):
    script += [[*text("Noon."), *END], [*text("Noon."), *END]]
    switch_on(page, calls=calls)
    page.check_accessibility()
    page.say("What time is it?")
    page.page.wait_for_timeout(600)  # what is said is written twice a second
    page.page.reload()
    page.say("And now?")
    assert [request["tool_choice"] for request in page.asked] == [sent, sent]
    page.button("Tools (1)").click()
    page.page.get_by_role("switch", name="clock").click()
    page.page.get_by_role("switch", name="clock").click()
    page.page.keyboard.press("Escape")
    script.append([*text("Noon."), *END])
    page.say("Again?")
    assert "tool_choice" not in page.asked[-1]


@pytest.mark.parametrize("answer, state", [("Allow", "done"), ("Refuse", "refused")])
def test_approval_is_asked_for_and_sent(page: Driver, script: list, answer: str, state: str):
    asked = {
        "id": "mcpr_1",
        "type": "mcp_approval_request",
        "server_label": "clock",
        "name": "now",
        "arguments": ARGUMENTS,
    }
    script.append([*item(LISTED), *item(asked), *END])
    called = CALL | {"approval_request_id": "mcpr_1"}
    result = item(called, arguments=ARGUMENTS, output="12:00", status="completed") if answer == "Allow" else []
    script.append([*result, *text("So be it."), *END])
    switch_on(page)
    page.say("What time is it?")
    expect(page.page.get_by_text("May the model call this tool?")).to_be_visible()
    expect(page.answers).to_contain_text('"zone": "Europe/Paris"')
    page.check_accessibility()
    page.button(answer).click()
    page.wait()
    expect(page.answers).to_contain_text("So be it.")
    expect(page.page.get_by_role("button", name="clock: now")).to_contain_text(state)
    sent = page.asked[1]["input"]
    assert [one.get("type") for one in sent] == [
        None,
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
    ]
    assert sent[-1] == {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": answer == "Allow"}


def test_a_failing_call_and_a_failing_list(page: Driver, script: list):
    error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no such zone"}]}
    broken = LISTED | {"tools": [], "error": "connection refused"}
    script.append(
        [*item(broken), *item(CALL, arguments=ARGUMENTS, error=error, status="failed"), *text("I cannot tell."), *END]
    )
    switch_on(page)
    page.say("What time is it?")
    expect(page.answers).to_contain_text("The tools of clock could not be listed: connection refused")
    call = page.page.get_by_role("button", name="clock: now")
    expect(call).to_contain_text("failed")
    call.click()
    expect(page.answers).to_contain_text("no such zone")


def test_settings_that_tools_take_away_are_named(page: Driver, script: list):
    switch_on(page)
    page.button("Settings").click()
    page.page.get_by_role("button", name="Penalties").click()
    page.page.get_by_label("repeat_last_n").fill("5")
    expect(page.page.get_by_role("alert")).to_contain_text("Not sent while tools are on: repeat_last_n")
