"""Pictures of a conversation with SmolLM2-135M-Instruct; PICTURES=1 takes those of docs/serving.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.serving.real_server import served
from tests.web.driver import Driver, expect
from tests.web.test_views import PHONE

CODE = "Write a Python function that returns the largest number of a list."


def test_a_conversation_about_code(open_page: Callable[..., Driver], tmp_path: Path):
    with served("smollm2-135m", data_dir=str(tmp_path)) as url:
        page = open_page(url, color_scheme="light")
        phone = open_page(url, **PHONE)
        expect.set_options(timeout=60_000)
        for each in (page, phone):
            each.page.set_default_timeout(120_000)
            each.button("Settings").click()
            each.page.get_by_label("System prompt").fill("You are a patient teacher.")
            each.page.get_by_label("temperature", exact=True).fill("0")
            expect(each.page.get_by_label("top_p")).to_be_visible()
            each.page.wait_for_timeout(500)  # until the drawer has come in
            if each is page:
                each.picture("settings-light")
            each.page.get_by_label("System prompt").fill("")
            each.button("Close").click()
            expect(each.page.get_by_role("dialog")).to_have_count(0)
        page.say("List three tips for writing clear emails.")
        expect(page.answers.last.get_by_role("listitem")).to_have_count(3)
        for each in (page, phone):
            each.say(CODE)
            expect(each.answers.last.locator("pre .hljs-keyword").first).to_have_text("def")
            expect(each.answers.last).to_contain_text("tokens/s")
            each.check_accessibility()
        page.picture("conversation-light")
        phone.picture("phone")
        page.page.emulate_media(color_scheme="dark")
        expect(page.page.locator("html")).to_have_attribute("data-theme", "dark")
        page.page.wait_for_timeout(500)
        page.check_accessibility()
        page.picture("conversation-dark")
        for each in (page, phone):
            each.close()
        expect.set_options(timeout=5_000)
