"""Saying something, and what can be done with the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY
from tests.web.driver import Driver, expect
from tests.web.talker import LONG, Talker


def test_an_answer_streams_in_and_says_how_fast_it_was(page: Driver, talker: Talker):
    talker.delay = 0.1
    page.write("Hello")
    page.button("Send").click()
    expect(page.answers).to_contain_text("The cap")
    assert REPLY not in page.answers.inner_text()
    expect(page.button("Stop")).to_be_visible()
    page.wait()
    expect(page.answers).to_contain_text(REPLY)
    expect(page.answers).to_contain_text(re.compile(r"31 tokens · [\d.]+ tokens/s · first token after \d\.\d+ s"))


def test_markdown_becomes_code_tables_and_formulas(page: Driver):
    page.say("Show me code")
    answer = page.answers.last
    expect(answer.get_by_role("heading", name="Merging intervals")).to_be_visible()
    expect(answer.locator("pre .hljs-keyword").first).to_have_text("def")
    expect(answer.get_by_role("cell", name="unchanged")).to_be_visible()
    expect(answer.locator(".katex-display math")).to_have_count(1)
    expect(answer.locator(".katex")).to_have_count(2)
    expect(answer).to_contain_text("costs $5 and not $10")
    fonts = page.page.evaluate("document.fonts.ready.then(all => [...all].map(f => f.family + f.status))")
    assert "KaTeX_Mainloaded" in fonts and not [name for name in fonts if "error" in name]
    answer.get_by_role("button", name="Copy code").click()
    assert page.page.evaluate("navigator.clipboard.readText()").startswith("def merge(intervals")


def test_what_a_model_says_stays_text(page: Driver):
    page.say("Something hostile")
    answer = page.answers.last
    expect(answer).to_contain_text("<script>")
    assert answer.locator("img, script").count() == 0
    expect(answer.get_by_role("link", name="Image: a picture")).to_have_attribute(
        "href", "https://example.com/picture.png"
    )
    hrefs = answer.get_by_role("link").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert not [href for href in hrefs if href.startswith("javascript")]
    assert page.page.title() != "owned"


def test_html_of_every_day_is_shown_as_what_it_means(page: Driver):
    page.say("Show me HTML")
    answer = page.answers.last
    expect(answer.locator("sub")).to_have_text("2")
    expect(answer.locator("sup")).to_have_text("10")
    expect(answer.locator("kbd")).to_have_text("Ctrl")
    assert answer.locator("kbd").get_attribute("class") is None
    expect(answer.locator("td br")).to_have_count(1)
    expect(answer).to_contain_text("Not HTML: List<String>.")
    expect(answer.locator("details em")).to_be_hidden()
    answer.get_by_text("More").click()
    expect(answer.locator("details em")).to_have_text("hidden")
    expect(answer.get_by_role("checkbox", name="Buy bread")).to_be_checked()
    expect(answer.get_by_role("checkbox", name="Bake")).not_to_be_checked()
    page.check_accessibility()


def test_each_block_is_written_in_its_own_direction(page: Driver):
    page.write("اكتب شيئا")
    expect(page.page.get_by_placeholder("Write a message")).to_have_css("direction", "rtl")
    page.say("arabic?")
    answer = page.answers.last
    directions = answer.locator("p, ul").evaluate_all("all => all.map(one => getComputedStyle(one).direction)")
    assert directions == ["rtl", "ltr", "rtl", "rtl"]
    expect(answer.locator("pre")).to_have_css("direction", "ltr")
    page.say("مرحبا")
    said = page.turns.nth(2).get_by_text("مرحبا", exact=True).first
    expect(said).to_have_css("direction", "rtl")
    page.turns.nth(2).get_by_role("button", name="Edit").click()
    expect(page.page.get_by_role("textbox", name="Edit")).to_have_css("direction", "rtl")


def test_a_very_fast_answer_is_followed_to_its_end(page: Driver, talker: Talker):
    page.say("A list, please")
    page.page.wait_for_timeout(300)
    left = page.page.locator(".scroll").evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight")
    assert left < 2
    talker.delay = 0.001
    page.write("And a list again")
    page.button("Send").click()
    expect(page.answers.last).to_contain_text("A line")
    page.page.locator(".scroll").hover()
    page.page.mouse.wheel(0, -600)
    expect(page.button("To the newest message")).to_be_visible()
    before = page.page.locator(".scroll").evaluate("box => box.scrollTop")
    expect(page.answers.last).to_contain_text("A line of a list\nA line of a list\nA line", use_inner_text=True)
    assert page.page.locator(".scroll").evaluate("box => box.scrollTop") == before
    page.button("Stop").click()


def test_reasoning_is_folded_with_its_time(page: Driver):
    page.say("Please think")
    title = page.page.get_by_role("button", name=re.compile(r"^Thought for \d"))
    expect(page.answers).to_contain_text("Hello! How can I help?")
    expect(page.answers).not_to_contain_text("I should greet them")
    title.press("Enter")
    expect(page.answers).to_contain_text("I should greet them")
    expect(title).to_have_attribute("aria-expanded", "true")


def test_stop_frees_the_engine_and_continue_goes_on(page: Driver, talker: Talker):
    talker.delay = 0.01
    page.write("Tell me a story")
    page.button("Send").click()
    expect(page.answers).to_contain_text("Sentence 2")
    page.button("Stop").click()
    wait_for(lambda: not talker.active)
    expect(page.answers).to_contain_text("Stopped.")
    part = page.answers.locator(".markdown").inner_text()
    assert part in LONG and part != LONG
    talker.delay = 0
    page.button("Continue").click()
    expect(page.answers.locator(".markdown")).to_have_text(LONG)
    expect(page.button("Continue")).to_have_count(0)


def test_a_reload_keeps_the_last_moments_of_an_answer(page: Driver, talker: Talker):
    talker.delay = 0.01
    page.write("Tell me a story")
    page.button("Send").click()
    expect(page.answers).to_contain_text("Sentence 9")
    seen = page.answers.evaluate("answer => { location.reload(); return answer.querySelector('.markdown').innerText; }")
    expect(page.answers).to_contain_text("Stopped.")
    kept = page.answers.locator(".markdown").inner_text()
    assert kept.startswith(seen) and LONG.startswith(kept)
    talker.delay = 0
    page.button("Continue").click()
    expect(page.answers.locator(".markdown")).to_have_text(LONG)


def test_escape_stops_too(page: Driver, talker: Talker):
    talker.delay = 0.05
    page.write("Tell me a story")
    page.page.keyboard.press("Enter")
    expect(page.button("Stop")).to_be_visible()
    page.page.keyboard.press("Escape")
    wait_for(lambda: not talker.active)
    expect(page.button("Stop")).to_have_count(0)


def test_an_answer_cut_at_its_limit_says_so_and_continues(page: Driver):
    page.button("Settings").click()
    page.page.get_by_role("button", name="Length and thinking").click()
    page.page.get_by_label("max_completion_tokens").fill("12")
    page.page.keyboard.press("Escape")
    page.say("Hello")
    expect(page.answers).to_contain_text("Cut off at the limit of tokens.")
    page.button("Continue").click()
    expect(page.answers.locator(".markdown")).to_have_text(REPLY[:24])


def test_regenerate_and_switch_between_versions(page: Driver, talker: Talker):
    page.say("Hello")
    page.button("Regenerate").click()
    expect(page.page.get_by_role("img", name="Version 2 of 2")).to_be_visible()
    page.wait()
    page.say("And now code")
    expect(page.turns).to_have_count(4)
    page.answers.first.get_by_role("button", name="Previous version").click()
    expect(page.turns).to_have_count(2)
    expect(page.page.get_by_role("img", name="Version 1 of 2")).to_be_visible()
    page.answers.first.get_by_role("button", name="Next version").click()
    expect(page.turns).to_have_count(4)


def test_editing_a_question_begins_a_branch(page: Driver, talker: Talker):
    page.say("Hello")
    page.say("What about code?")
    first = page.turns.first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    page.page.get_by_role("textbox", name="Edit").fill("Please think")
    page.page.locator(".edit").get_by_role("button", name="Send").click()
    page.wait()
    expect(page.turns).to_have_count(2)
    expect(page.answers).to_contain_text("How can I help?")
    assert "What about code?" not in bytes(talker.seen[-1][0]).decode(errors="replace")
    page.turns.first.get_by_role("button", name="Previous version").click()
    expect(page.turns).to_have_count(4)


def test_arrow_up_in_an_empty_draft_edits_the_last_question(page: Driver):
    page.say("Hello")
    page.page.get_by_placeholder("Write a message").press("ArrowUp")
    expect(page.page.get_by_role("textbox", name="Edit")).to_have_value("Hello")


def test_enter_sends_an_edited_question(page: Driver, talker: Talker):
    page.say("Hello")
    page.page.get_by_placeholder("Write a message").press("ArrowUp")
    box = page.page.get_by_role("textbox", name="Edit")
    box.press("End")
    box.press("Shift+Enter")
    box.press_sequentially("again")
    box.press("Enter")
    expect(page.page.get_by_role("img", name="Version 2 of 2")).to_be_visible()
    page.wait()
    assert "[user]Hello\nagain[assistant]" in bytes(talker.seen[-1][0]).decode(errors="replace")


def test_an_edited_answer_is_what_the_model_is_told_it_said(page: Driver, talker: Talker):
    page.say("Hello")
    page.answers.get_by_role("button", name="Edit").click()
    page.page.get_by_role("textbox", name="Edit").fill("It is Rome.")
    page.button("Save as a version").click()
    expect(page.page.get_by_role("img", name="Version 2 of 2")).to_be_visible()
    page.say("Are you sure?")
    assert "[assistant]It is Rome.[user]Are you sure?" in bytes(talker.seen[-1][0]).decode(errors="replace")


def test_branching_makes_a_conversation_of_its_own(page: Driver):
    page.say("Hello")
    page.say("What about code?")
    page.answers.first.get_by_role("button", name="Branch into a new conversation").click()
    expect(page.turns).to_have_count(2)
    expect(page.page.get_by_role("navigation").get_by_role("link")).to_have_text(["Hello (2)", "Hello"])
    page.answers.first.get_by_role("button", name="Branch into a new conversation").click()
    expect(page.page.locator("h1")).to_have_text("Hello (3)")


def test_deleting_and_copying(page: Driver):
    page.say("Hello")
    page.answers.get_by_role("button", name="Copy").click()
    assert page.page.evaluate("navigator.clipboard.readText()") == REPLY
    page.button("Delete from here on").click()
    expect(page.turns).to_have_count(1)


def test_what_the_server_refuses_is_told_and_can_be_tried_again(page: Driver, talker: Talker):
    talker.fail_after = 3
    page.say("Hello")
    expect(page.page.get_by_role("alert")).to_contain_text("the pages caught fire")
    talker.fail_after = None
    page.button("Try again").click()
    page.wait()
    expect(page.answers).to_contain_text(REPLY)


def test_answers_go_on_in_conversations_that_are_not_shown(page: Driver, talker: Talker):
    talker.delay = 0.02
    page.write("Hello")
    page.button("Send").click()
    page.button("Stop").wait_for()
    page.new_chat()
    page.say("Another one")
    page.page.get_by_role("link", name="Hello", exact=True).click()
    expect(page.answers).to_contain_text(REPLY)


def test_an_answer_waits_for_a_server_that_has_gone_away(page: Driver, talker: Talker):
    page.expected += ["ERR_INTERNET_DISCONNECTED", "Failed to load"]
    page.context.set_offline(True)
    page.write("Hello")
    page.button("Send").click()
    expect(page.answers.get_by_role("alert")).to_contain_text("The connection to the server is lost.")
    expect(page.page.get_by_role("alert").first).to_contain_text("The server cannot be reached. It is asked again")
    page.check_accessibility()
    page.context.set_offline(False)
    page.wait()
    expect(page.answers).to_contain_text(REPLY)
    expect(page.page.get_by_role("alert")).to_have_count(0)
    assert len(talker.seen) == 1


def test_an_answer_whose_connection_breaks_goes_on(page: Driver, talker: Talker):
    half = json.dumps({"choices": [{"delta": {"content": REPLY[:9]}}]})
    page.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=f"data: {half}\n\n"),
        times=1,
    )
    page.say("Hello")
    expect(page.answers.locator(".markdown")).to_have_text(REPLY)
    assert len(talker.seen) == 1


def test_two_pages_of_one_browser(page: Driver, open_page: Callable[..., Driver]):
    """Another profile sees none of the conversations."""
    page.say("Hello")
    other = open_page(page.url)
    expect(other.page.get_by_text("Your conversations will be listed here")).to_be_visible()
