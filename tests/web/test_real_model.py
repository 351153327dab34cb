"""The page before a server as `jaxllm serve` starts it, with SmolLM2-135M-Instruct."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.serving.real_server import assert_idle, served
from tests.web.driver import Driver, expect


def test_a_conversation_with_a_model(open_page: Callable[..., Driver], tmp_path: Path):
    with served("smollm2-135m", data_dir=str(tmp_path)) as url:
        page = open_page(url)
        page.page.set_default_timeout(120_000)
        expect.set_options(timeout=60_000)
        expect(page.page.get_by_role("meter")).to_have_attribute("aria-valuemax", "1024")
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
