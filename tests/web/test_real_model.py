"""The page before a server as `jaxllm serve` starts it, with SmolLM2-135M-Instruct."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.real_server import assert_idle, served
from tests.web.driver import ROOT, Driver, expect
from tests.web.test_tools import switch_on


def test_a_conversation_with_a_model(open_page: Callable[..., Driver], tmp_path: Path):
    with served("smollm2-135m", data_dir=str(tmp_path), max_model_len=8192, kv_cache_memory="256MiB") as url:
        page = open_page(url)
        page.page.set_default_timeout(120_000)
        expect.set_options(timeout=60_000)
        expect(page.page.get_by_role("meter")).to_have_attribute("aria-valuemax", "8192")
        page.button("Settings").click()
        page.page.get_by_label("Log-probabilities").fill("5")
        page.page.get_by_label("temperature", exact=True).fill("0")
        page.page.get_by_role("button", name="Length and thinking").click()
        page.page.get_by_label("max_completion_tokens").fill("24")
        page.page.keyboard.press("Escape")
        page.say("What is the capital of Japan?")
        expect(page.answers).to_contain_text("The capital of Japan is Tokyo.")

        page.button("Show the tokens' probabilities").click()
        token = page.answers.locator(".token").filter(has_text="Tokyo")
        expect(token).to_have_text(" Tokyo")
        token.hover()
        expect(page.page.get_by_role("tooltip").get_by_role("row").first).to_contain_text("Tokyo")
        expect(page.page.get_by_role("tooltip").get_by_role("row")).to_have_count(5)
        page.picture("tokens")
        page.page.mouse.move(0, 0)
        page.button("Show as text").click()

        page.say("Tell me a long story about it.")
        expect(page.answers.last).to_contain_text("Cut off at the limit of tokens.")
        before = page.answers.last.locator(".markdown").inner_text()
        page.button("Continue").click()
        page.wait()
        story = page.answers.last.locator(".markdown").inner_text()
        assert story.startswith(before) and len(story) > len(before)
        page.page.get_by_role("link", name="Server").click()
        expect(page.page.get_by_role("main")).to_contain_text("smollm2-135m")
        other = open_page(url)
        other.page.set_default_timeout(120_000)
        other.button("Settings").click()
        other.page.get_by_role("button", name="Length and thinking").click()
        other.page.get_by_label("min_tokens").fill("8000")  # a story that does not end before it is stopped
        other.page.keyboard.press("Escape")
        other.write("Write a story about a fox.")
        other.button("Send").click()
        expect(page.page.get_by_role("main")).to_contain_text(re.compile("Requests running1"))
        page.page.wait_for_timeout(6000)
        other.button("Stop").click()
        expect(page.page.get_by_role("main")).to_contain_text(re.compile("Requests running0"))
        page.page.wait_for_timeout(2000)
        page.picture("server")
        for each in (page, other):
            each.close()
        assert_idle(url)
        expect.set_options(timeout=5_000)


def test_a_tool_of_the_example_runs_once_it_is_allowed(
    open_page: Callable[..., Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As `make serve ARGS="--mcp-config examples/mcp/mcp.json"` has it. SmolLM2 calls a tool only if it must."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)
    with served("smollm2-135m", data_dir=str(tmp_path), mcp_config="examples/mcp/mcp.json") as url:
        page = open_page(url)
        page.page.set_default_timeout(120_000)
        expect.set_options(timeout=60_000)
        page.button("Settings").click()
        page.page.get_by_label("temperature", exact=True).fill("0")
        page.page.get_by_role("button", name="Length and thinking").click()
        page.page.get_by_label("max_completion_tokens").fill("60")
        page.page.keyboard.press("Escape")
        page.button("Tools").click()
        expect(page.page.get_by_text("3 tools")).to_be_visible()
        page.page.keyboard.press("Escape")
        switch_on(page, server="toolbox", calls="Call toolbox_multiply first")

        page.say("What is 6 times 7?")
        call = page.page.get_by_role("button", name="toolbox: multiply").first
        expect(call).to_contain_text("needs your approval")
        expect(page.answers).to_contain_text('"a":')
        expect(page.answers).not_to_contain_text("Result")
        page.check_accessibility()
        page.picture("approval")
        page.button("Allow").click()
        page.wait()
        expect(call).to_contain_text("done")
        call.click()
        body = page.answers.locator(".call").first.locator(".call-body")
        numbers = [float(text) for text in re.findall(r'"[ab]": (-?[\d.]+)', body.inner_text())]
        assert len(numbers) == 2
        expect(body.locator("code").last).to_have_text(str(numbers[0] * numbers[1]))  # "42.0", as the tool said it

        # It would call again and again. What is said instead of an approval refuses that call.
        page.button("Tools (1)").click()
        page.page.get_by_role("switch", name="toolbox").click()
        page.page.keyboard.press("Escape")
        page.say("Thank you. Say the result in one sentence.")
        expect(page.answers.last.locator(".markdown")).not_to_be_empty()
        page.picture("tool-call")

        page.answers.first.get_by_role("button", name="Branch into a new conversation").click()
        expect(page.turns).to_have_count(2)
        page.close()
        assert_idle(url)
        expect.set_options(timeout=5_000)
