"""Every view as it looks, reads aloud and is used without a mouse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.web.driver import Driver, expect
from tests.web.talker import Talker

PHONE = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True}
SCHEMES = ("light", "dark")


@pytest.fixture(params=SCHEMES)
def themed(
    request: pytest.FixtureRequest, open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker
) -> Driver:
    page = open_page(listen(talker, reasoning_parser="think", served_model_name="talker"), color_scheme=request.param)
    expect(page.page.locator("html")).to_have_attribute("data-theme", request.param)
    return page


def see(page: Driver) -> None:
    """axe-core has nothing to say."""
    page.page.wait_for_timeout(200)
    page.check_accessibility()


def test_start(themed: Driver):
    expect(themed.page.get_by_role("note")).to_contain_text("a very small model, of 1 million parameters")
    expect(themed.page.get_by_role("meter")).to_be_visible()
    see(themed)


def test_conversation(themed: Driver):
    themed.say("Please think about how to greet me")
    themed.button("Regenerate").click()
    themed.wait()
    themed.page.get_by_role("button", name="Thought for").click()
    themed.say("Now show me code that merges intervals")
    expect(themed.answers.last.locator(".katex-display")).to_be_visible()
    expect(themed.answers.last.locator(".hljs-keyword").first).to_be_visible()
    see(themed)


def test_settings(themed: Driver):
    themed.button("Settings").click()
    themed.page.get_by_label("System prompt").fill("You are a patient teacher of mathematics.")
    themed.page.get_by_label("temperature", exact=True).fill("0.3")
    see(themed)
    for group in ("Penalties", "Length and thinking", "Tokens and template", "Scheduling"):
        themed.page.get_by_role("button", name=group).click()
    see(themed)


def test_tokens(themed: Driver):
    themed.button("Settings").click()
    themed.page.get_by_label("Log-probabilities").fill("5")
    themed.page.keyboard.press("Escape")
    themed.say("What is the capital of France?")
    themed.button("Show the tokens' probabilities").click()
    themed.answers.locator(".token").nth(14).hover()
    expect(themed.page.get_by_role("tooltip")).to_be_visible()
    see(themed)


def test_server(themed: Driver, talker: Talker):
    themed.page.get_by_role("link", name="Server").click()
    expect(themed.page.get_by_role("table").first).to_be_visible()
    themed.page.wait_for_timeout(3000)
    see(themed)


def test_menus_and_help(themed: Driver):
    themed.say("Hello")
    themed.button("More for Hello").click()
    see(themed)
    themed.page.keyboard.press("Escape")
    themed.page.locator("h1").click()
    themed.page.keyboard.press("?")
    expect(themed.page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
    see(themed)


def test_phone(open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker):
    page = open_page(listen(talker, served_model_name="talker"), **PHONE)
    page.say("Now show me code that merges intervals")
    expect(page.answers.last.locator(".katex-display")).to_be_visible()
    page.page.wait_for_timeout(300)
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    page.check_accessibility()
    page.button("Open the list of conversations").tap()
    page.new_chat()
    expect(page.page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.parametrize(
    "language, words",
    [("de-DE", "Worüber reden wir?"), ("zh-CN", "聊点什么？"), ("fr-FR", "What shall we talk about?")],
)
def test_the_browsers_language(
    open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker, language: str, words: str
):
    page = open_page(listen(talker, served_model_name="talker"), locale=language)
    expect(page.page.get_by_role("heading", name=words)).to_be_visible()
    expect(page.page.locator("html")).to_have_attribute("lang", {"de-DE": "de", "zh-CN": "zh-Hans"}.get(language, "en"))


def test_language_and_theme_are_chosen_and_remembered(page: Driver):
    page.button("Menu").click()
    page.page.get_by_role("menuitem", name="Language").hover()
    page.page.get_by_role("menuitem", name="Deutsch").click()
    expect(page.page.get_by_role("heading", name="Worüber reden wir?")).to_be_visible()
    page.button("Menü").click()
    page.page.get_by_role("menuitem", name="Aussehen").hover()
    page.page.get_by_role("menuitem", name="Dunkel").click()
    page.page.reload()
    expect(page.page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(page.page.get_by_role("heading", name="Worüber reden wir?")).to_be_visible()


def test_without_a_mouse(page: Driver):
    keyboard = page.page.keyboard
    expect(page.page.get_by_placeholder("Write a message")).to_be_focused()
    keyboard.type("Hello")
    keyboard.press("Enter")
    page.wait()
    keyboard.press("Control+Alt+c")
    page.page.wait_for_timeout(100)
    assert "Paris" in page.page.evaluate("navigator.clipboard.readText()")
    keyboard.press("Control+Alt+r")
    expect(page.page.get_by_role("img", name="Version 2 of 2")).to_be_visible()
    page.wait()
    keyboard.press("Control+,")
    expect(page.page.get_by_role("dialog")).to_contain_text("System prompt")
    keyboard.press("Escape")
    expect(page.page.get_by_role("dialog")).to_have_count(0)
    keyboard.press("Control+Alt+n")
    expect(page.turns).to_have_count(0)
    page.page.locator("h1").click()
    keyboard.press("/")
    keyboard.type("Again")
    expect(page.page.get_by_placeholder("Write a message")).to_have_value("Again")
    page.page.get_by_role("link", name="Hello").focus()
    keyboard.press("Enter")
    expect(page.turns).to_have_count(2)


def test_with_the_network_cut_all_that_was_loaded_still_works(page: Driver):
    """What the page needs comes from the server; what was said is in the browser."""
    page.expected += ["ERR_INTERNET_DISCONNECTED"]
    page.say("Now show me code")
    expect(page.answers.locator(".katex-display")).to_be_visible()
    page.say("Hello")
    page.context.set_offline(True)
    page.new_chat()
    page.page.get_by_role("link", name="Now show me code").click()
    expect(page.turns).to_have_count(4)
    expect(page.answers.first.locator(".katex-display")).to_be_visible()
