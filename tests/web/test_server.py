"""The page about the server, and what the page does where the server asks for a key."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.web.driver import Driver, expect
from tests.web.talker import Talker


def test_numbers_of_the_server_are_drawn_live(page: Driver, talker: Talker):
    page.page.get_by_role("link", name="Server").click()
    main = page.page.get_by_role("main")
    expect(main).to_contain_text("0 of 100")
    expect(main).to_contain_text("4 (7.5 s)")
    expect(main).to_contain_text("40 %")
    expect(main.get_by_role("listitem").filter(has_text="talker")).to_contain_text("32768 tokens of context")
    expect(main.get_by_role("row", name="page_size")).to_contain_text("16")
    spark = main.get_by_role("img", name="Requests running over the last 60 seconds").locator("polyline")
    expect(spark).to_have_attribute("points", re.compile(r"\S+ \S+ \S+"))
    talker.delay = 0.2
    page.page.evaluate(
        "void fetch('v1/chat/completions', {method: 'POST', headers: {'Content-Type': 'application/json'},"
        " body: JSON.stringify({messages: [{role: 'user', content: 'Hi'}]})})"
    )
    expect(main).to_contain_text("1 of 100")
    expect(spark).to_have_attribute("points", re.compile(r",2\.0$"))
    talker.delay = 0


def test_a_server_that_stops_answering_is_told(page: Driver):
    page.expected += ["ERR_INTERNET_DISCONNECTED", "Failed to load"]
    page.page.get_by_role("link", name="Server").click()
    page.context.set_offline(True)
    expect(page.page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    page.context.set_offline(False)
    expect(page.page.get_by_role("alert")).to_have_count(0)


def test_the_key_is_typed_once(open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker):
    page = open_page(listen(talker, api_key="secret"))
    page.expected += ["401 (Unauthorized)"]
    dialog = page.page.get_by_role("dialog")
    expect(dialog).to_contain_text("This server asks for an API key")
    page.check_accessibility()
    dialog.get_by_label("API key").fill("wrong")
    page.button("OK").click()
    expect(dialog).to_contain_text("The key was not accepted.")
    dialog.get_by_label("API key").fill("secret")
    page.page.get_by_label("Remember it in this browser").check()
    page.button("OK").click()
    expect(dialog).to_be_hidden()
    page.say("Hello")
    expect(page.answers).to_contain_text("Paris")
    page.page.reload()
    expect(page.page.get_by_role("meter")).to_be_visible()
    expect(dialog).to_have_count(0)
    page.button("Menu").click()
    page.page.get_by_role("menuitem", name="API key").click()
    page.button("Forget the key").click()
    expect(dialog).to_contain_text("This server asks for an API key")
    assert page.page.evaluate("localStorage.getItem('jaxllm.key') ?? sessionStorage.getItem('jaxllm.key')") is None


def test_a_key_that_is_not_remembered_goes_with_the_tab(
    open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker
):
    page = open_page(listen(talker, api_key="secret"))
    page.expected += ["401 (Unauthorized)"]
    page.page.get_by_role("dialog").get_by_label("API key").fill("secret")
    page.button("OK").click()
    expect(page.page.get_by_role("meter")).to_be_visible()
    assert page.page.evaluate("[sessionStorage.getItem('jaxllm.key'), localStorage.getItem('jaxllm.key')]") == [
        "secret",
        None,
    ]
