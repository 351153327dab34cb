"""How much of the context a conversation takes, and the ways out of one that takes too much."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY
from tests.web.driver import Driver, expect
from tests.web.talker import LONG, Talker

CONTEXT = 1000
QUESTION = "x" * 440


@pytest.fixture
def short(open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker) -> Driver:
    """A page of a model with a short context, in which the third question finds no room."""
    talker.client.info = msgspec.structs.replace(talker.client.info, max_model_len=CONTEXT)
    page = open_page(listen(talker, served_model_name="talker"))
    page.expected += ["400 (Bad Request)"]
    page.say("first " + QUESTION)
    page.say("second " + QUESTION)
    page.say("third?")
    expect(page.page.get_by_role("alert")).to_contain_text("This went wrong")
    return page


def prompt(talker: Talker, at: int = -1) -> str:
    return bytes(token for token in talker.seen[at][0] if token < 256).decode()


def used(page: Driver) -> int:
    return int(page.page.get_by_role("meter").get_attribute("aria-valuenow") or 0)


def test_the_meter_counts_the_prompt_of_an_answer_that_goes_on_stops_and_continues(page: Driver, talker: Talker):
    page.say("Hello " + QUESTION)
    before = used(page)
    assert before == len(talker.seen[0][0]) + len(REPLY)
    talker.delay = 0.02
    page.write("Tell me a story")
    page.button("Send").click()
    expect(page.answers.last).to_contain_text("Sentence 2")
    assert used(page) > before + len("Tell me a story")
    page.button("Stop").click()
    wait_for(lambda: not talker.active)
    expect(page.answers.last).to_contain_text("Stopped.")
    stopped = used(page)
    assert stopped > before + len("Tell me a story")
    page.button("Continue").click()
    expect(page.answers.last).to_contain_text("Sentence 9")
    assert used(page) > stopped
    talker.delay = 0


def test_a_full_conversation_goes_on_without_its_oldest_turns(short: Driver, talker: Talker):
    short.check_accessibility()
    short.button("Leave out the oldest turns").click()
    expect(short.answers.last).to_contain_text(REPLY)
    assert "first" not in prompt(talker) and "second" not in prompt(talker) and "[user]third?" in prompt(talker)
    expect(short.page.get_by_text("The model no longer reads what is above.")).to_be_visible()
    expect(short.turns.first).to_contain_text("first")
    short.check_accessibility()
    short.say("fourth")
    assert "first" not in prompt(talker) and "third?[assistant]" in prompt(talker)
    short.button("Read it again").click()
    short.write("fifth")
    short.button("Send").click()
    expect(short.page.get_by_role("alert")).to_contain_text("This went wrong")


def test_a_full_conversation_goes_on_in_a_new_one_with_a_summary(short: Driver, talker: Talker):
    asked = len(talker.seen)
    short.button("New conversation with a summary").click()
    expect(short.turns).to_have_count(0)
    expect(short.page.get_by_placeholder("Write a message")).to_have_value("third?")
    expect(short.page.locator(".composer")).to_contain_text("summary.md")
    said = "".join(prompt(talker, at) for at in range(asked, len(talker.seen)))
    assert "first x" in said and "second x" in said and "third?" not in said
    assert max(len(tokens) for tokens, *_ in talker.seen) < CONTEXT
    short.button("Send").click()
    short.wait()
    assert "summary.md:\n```\nThey spoke of x.\n```\n\nthird?" in prompt(talker)


def test_an_answer_that_the_context_cut_off_goes_on_without_the_oldest_turns(
    open_page: Callable[..., Driver],
    listen: Callable[..., str],
    talker: Talker,
):
    talker.client.info = msgspec.structs.replace(talker.client.info, max_model_len=CONTEXT)
    page = open_page(listen(talker, served_model_name="talker"))
    page.expected += ["400 (Bad Request)"]
    page.say("first " + QUESTION)
    page.say("Tell me a story")
    expect(page.answers.last).to_contain_text("Cut off at the limit of tokens.")
    cut = page.answers.last.locator(".markdown").inner_text()
    page.button("Continue").click()
    page.button("Leave out the oldest turns").click()
    page.wait()
    whole = page.answers.last.locator(".markdown").inner_text()
    assert whole.startswith(cut) and LONG.startswith(whole) and whole != cut
    assert "first" not in prompt(talker) and "[user]Tell me a story[assistant]Sentence 1" in prompt(talker)
