"""A real MCP server over stdio, its tools approved and called from the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mcp.conftest import TOOL_SERVER
from tests.serving.responses.fake_tools import TEMPLATE, says
from tests.serving.responses.shared import PARSERS
from tests.web.driver import Driver, expect
from tests.web.talker import Talker
from tests.web.test_tools import switch_on

SUM = says(("lab_add", {"a": 2, "b": 3}), before="<think>I need the tool for that.</think>Let me add them.")


@pytest.fixture
def lab(open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker, tmp_path: Path) -> Driver:
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"lab": {"command": sys.executable, "args": [TOOL_SERVER, "stdio"]}}}))
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    return open_page(listen(talker, served_model_name="talker", mcp_config=config, chat_template=template, **PARSERS))


def prompt(talker: Talker) -> str:
    assert talker.tokenizer is not None
    return talker.tokenizer.decode(talker.seen[-1][0], skip_special_tokens=True)


def test_what_is_allowed_runs_and_the_model_goes_on(lab: Driver, talker: Talker):
    talker.script += [SUM, "It is 5."]
    switch_on(lab, server="lab")
    lab.say("What is 2 + 3?")
    expect(lab.answers).to_contain_text("Let me add them.")
    expect(lab.page.get_by_role("button", name="Thought for")).to_be_visible()
    expect(lab.page.get_by_role("button", name="lab: add")).to_contain_text("needs your approval")
    assert len(talker.seen) == 1
    lab.button("Allow").click()
    expect(lab.answers).to_contain_text("It is 5.")
    lab.wait()
    call = lab.page.get_by_role("button", name="lab: add")
    expect(call).to_contain_text("done")
    call.click()
    expect(lab.answers.locator(".code").last).to_contain_text("5")
    lab.say("Thanks")
    assert lab.answers.count() == 2 and "It is 5." in prompt(talker)


def test_what_is_refused_does_not_run(lab: Driver, talker: Talker):
    talker.script += [SUM, "Then I cannot tell."]
    switch_on(lab, server="lab")
    lab.say("What is 2 + 3?")
    lab.button("Refuse").click()
    expect(lab.answers).to_contain_text("Then I cannot tell.")
    lab.say("Why?")
    assert "refused" in prompt(talker)


def test_who_says_something_else_has_refused(lab: Driver, talker: Talker):
    talker.script += [SUM, "As you like."]
    switch_on(lab, server="lab")
    lab.say("What is 2 + 3?")
    lab.say("Never mind")
    expect(lab.answers.last).to_contain_text("As you like.")
    expect(lab.page.get_by_role("button", name="lab: add")).to_contain_text("refused")


def test_a_tool_that_only_reads_need_not_be_asked_for(lab: Driver, talker: Talker):
    failing = says(("lab_add", {"a": 2, "b": 3}), ("lab_fail", {"reason": "no luck"}))
    talker.script += [failing, "So it is."]
    switch_on(lab, "Ask unless read-only", server="lab")
    lab.say("What is 2 + 3?")
    expect(lab.page.get_by_role("button", name="lab: add")).to_contain_text("done")
    lab.button("Allow").click()
    lab.wait()
    failed = lab.page.get_by_role("button", name="lab: fail")
    expect(failed).to_contain_text("failed")
    failed.click()
    expect(lab.answers).to_contain_text("no luck")
    expect(lab.answers).to_contain_text("So it is.")


def test_what_was_said_with_tools_goes_on_without_them(lab: Driver, talker: Talker):
    talker.script += [SUM, "It is 5."]
    switch_on(lab, "Never ask", server="lab")
    lab.say("What is 2 + 3?")
    expect(lab.answers).to_contain_text("It is 5.")
    lab.button("Tools (1)").click()
    lab.page.get_by_role("switch", name="lab").click()
    lab.page.keyboard.press("Escape")
    lab.say("And now?")
    assert "tools=" not in prompt(talker) and "[tool]5[assistant]It is 5.[user]And now?" in prompt(talker)
