"""The settings of a conversation, and what they do to its requests."""

from __future__ import annotations

from tests.web.driver import Driver, expect
from tests.web.talker import Talker

SET = {
    "temperature": ("0.7", 0.7), "top_p": ("0.9", 0.9), "top_k": ("12", 12), "min_p": ("0.05", 0.05),
    "seed": ("42", 42),
    "presence_penalty": ("0.5", 0.5), "frequency_penalty": ("-0.5", -0.5), "repetition_penalty": ("1.2", 1.2),
    "repeat_last_n": ("64", 64), "max_completion_tokens": ("99", 99), "min_tokens": ("2", 2),
    "stop": ("END\nSTOP", ("END", "STOP")),
    "max_thinking_tokens": ("50", 50),
    "stop_token_ids": ("3, 4", (3, 4)), "bad_words": ("worse", ("worse",)), "logit_bias": ('{"5": -1}', {5: -1.0}),
}  # fmt: skip
"""Field -> what is typed, and what the engine gets."""
GROUPS = ("Penalties", "Length and thinking", "Tokens and template", "Scheduling")
ENGINE_NAMES = {"max_completion_tokens": "max_tokens"}


def open_settings(page: Driver) -> None:
    page.button("Settings").click()
    for group in GROUPS:
        page.page.get_by_role("button", name=group).click()


def test_every_field_reaches_the_engine(page: Driver, talker: Talker):
    open_settings(page)
    for name, (typed, _) in SET.items():
        page.page.get_by_label(name, exact=True).fill(typed)
    page.page.get_by_label("priority", exact=True).fill("3")
    page.page.get_by_label("cache_salt", exact=True).fill("mine")
    page.page.get_by_label("System prompt").fill("Be brief.")
    page.page.keyboard.press("Escape")
    page.say("Hello")
    prompt, params, labels = talker.seen[-1]
    assert {name: getattr(params, ENGINE_NAMES.get(name, name)) for name in SET} == {
        name: value for name, (_, value) in SET.items()
    }
    assert labels == {"priority": 3, "cache_salt": "mine"}
    assert bytes(prompt).decode().startswith("[system]Be brief.[user]Hello")


def test_settings_belong_to_a_conversation_unless_they_are_made_the_default(page: Driver, talker: Talker):
    page.say("Hello")
    page.button("Settings").click()
    page.page.get_by_label("temperature", exact=True).fill("0")
    page.page.keyboard.press("Escape")
    page.say("Again")
    assert talker.seen[-1][1].temperature == 0
    page.new_chat()
    page.say("Something else")
    assert talker.seen[-1][1].temperature == 0.5
    page.page.get_by_role("link", name="Hello").click()
    page.button("Settings").click()
    page.button("Use for new conversations").click()
    page.page.keyboard.press("Escape")
    page.new_chat()
    page.say("A third one")
    assert talker.seen[-1][1].temperature == 0


def test_a_schema_is_checked_and_sent(page: Driver, talker: Talker):
    page.button("Settings").click()
    page.page.get_by_label("Structured answer").click()
    page.page.get_by_title("JSON schema").click()
    schema = page.page.get_by_label("What the answer must match")
    schema.fill('{"type": ')
    expect(page.page.get_by_text("This is not valid JSON.")).to_be_visible()
    schema.fill('{"type": "object"}')
    expect(page.page.get_by_text("This is not valid JSON.")).to_have_count(0)
    page.page.keyboard.press("Escape")
    page.say("As json")
    constraint = talker.seen[-1][1].structured_outputs
    assert constraint is not None and constraint.json == '{"type": "object"}'


def test_tokens_show_their_alternatives(page: Driver):
    page.button("Settings").click()
    page.page.get_by_label("Log-probabilities").fill("4")
    page.page.keyboard.press("Escape")
    page.say("Hello")
    page.button("Show the tokens' probabilities").click()
    token = page.answers.locator(".token").nth(4)
    expect(token).to_have_text("c")
    token.hover()
    rows = page.page.get_by_role("tooltip").get_by_role("row")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("60.7%")
    expect(rows.filter(has_text="(chosen)")).to_contain_text("36.8%")
    page.page.mouse.move(0, 0)
    page.button("Show as text").click()
    expect(page.answers.locator(".token")).to_have_count(0)


def test_the_gauge_counts_what_was_said_and_what_is_being_written(page: Driver):
    gauge = page.page.get_by_role("meter", name="Context")
    expect(gauge).to_have_attribute("aria-valuemax", "32768")
    expect(gauge).to_have_attribute("aria-valuenow", "0")
    page.say("Hello")
    expect(gauge).to_have_attribute("aria-valuenow", str(len("[user]Hello[assistant]") + 31))
    page.write("0123456789")
    expect(gauge).to_have_attribute("aria-valuenow", str(len("[user]Hello[assistant]") + 31 + 10))


def test_defaults_of_the_model_are_shown(page: Driver):
    page.button("Settings").click()
    expect(page.page.get_by_label("temperature", exact=True)).to_have_attribute("placeholder", "model’s: 0.5")
