"""Two tabs, base models, phones, and a key that is missing."""

from __future__ import annotations

from collections.abc import Callable

from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, ByteTokenizer, FakeEngine
from tests.web.driver import Driver, expect
from tests.web.talker import Talker


def test_two_tabs_of_one_conversation_lose_no_turn(page: Driver):
    page.say("Hello")
    page.page.wait_for_timeout(600)
    other = page.context.new_page()
    other.goto(page.page.url)
    expect(other.get_by_role("article")).to_have_count(2)
    other.get_by_placeholder("Write a message").fill("From the other tab")
    other.get_by_role("button", name="Send", exact=True).click()
    expect(other.get_by_role("article")).to_have_count(4)
    expect(page.turns).to_have_count(4)
    page.say("From the first tab")
    expect(other.get_by_role("article")).to_have_count(6)
    page.page.wait_for_timeout(600)
    page.page.reload()
    expect(page.turns).to_have_count(6)


def test_enter_saves_a_new_name(page: Driver):
    page.say("Hello")
    page.button("More for Hello").click()
    page.page.get_by_role("menuitem", name="Rename").click()
    name = page.page.get_by_role("textbox", name="Rename")
    name.fill("A greeting")
    name.press("Enter")
    expect(page.page.get_by_role("link", name="A greeting")).to_be_visible()
    expect(page.page.get_by_role("dialog")).to_have_count(0)


def test_a_base_model_continues_what_is_written(open_page: Callable[..., Driver], listen: Callable[..., str]):
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(chat_template=None)
    engine.info.max_model_len = 4000
    engine.reply = " upon a time."
    page = open_page(listen(engine, served_model_name="base"))
    expect(page.page.get_by_text("base is a base model: it continues the text")).to_be_visible()
    page.page.get_by_placeholder("Write the beginning of a text").fill("Once")
    page.button("Send").click()
    page.wait()
    expect(page.answers.last).to_contain_text("upon a time.")
    assert bytes(token for token in engine.seen[-1][0] if token < 256) == b"Once"


def test_enter_begins_a_new_line_on_a_phone(
    open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker
):
    page = open_page(listen(talker), viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    box = page.page.get_by_placeholder("Write a message")
    box.fill("one")
    box.press("Enter")
    page.page.keyboard.type("two")
    expect(box).to_have_value("one\ntwo")
    page.button("Send").click()
    page.wait()
    wait_for(lambda: b"one\ntwo" in bytes(token for token in talker.seen[-1][0] if token < 256))


def test_a_missing_key_is_said_and_the_turn_tried_again(
    open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker
):
    page = open_page(listen(talker, api_key="secret"))
    page.expected.append("401")
    page.button("Cancel").click()
    page.write("Hello")
    page.button("Send").click()
    expect(page.answers.last).to_contain_text("The server asks for a key")
    page.page.get_by_role("textbox", name="API key").fill("secret")
    page.button("OK").click()
    expect(page.answers.last).to_contain_text(REPLY)
    expect(page.turns).to_have_count(2)
