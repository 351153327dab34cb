"""The list of conversations, kept in the browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.fake_engine import REPLY
from tests.web.driver import Driver, expect


@pytest.fixture
def three(page: Driver) -> Driver:
    for text in ("Show me code", "Hello there", "Please think"):
        page.new_chat()
        page.say(text)
    return page


def titles(page: Driver) -> list[str]:
    return page.page.get_by_role("navigation").get_by_role("link").all_inner_texts()


def choose(page: Driver, title: str, action: str) -> None:
    page.button(f"More for {title}").click()
    page.page.get_by_role("menuitem", name=action, exact=True).click()


def test_they_survive_a_reload_with_all_branches(page: Driver):
    page.say("Hello")
    page.button("Regenerate").click()
    page.wait()
    page.page.wait_for_timeout(600)
    page.page.reload()
    expect(page.page.get_by_role("img", name="Version 2 of 2")).to_be_visible()
    expect(page.answers).to_contain_text("Paris")


def test_each_conversation_keeps_what_is_being_written_in_it(page: Driver, tmp_path: Path):
    page.say("Hello")
    file = tmp_path / "notes.md"
    file.write_text("A note")
    page.page.locator(".composer input[type=file]").set_input_files(file)
    page.write("Half a question")
    page.new_chat()
    expect(page.page.get_by_placeholder("Write a message")).to_have_value("")
    page.write("Another one")
    page.page.get_by_role("link", name="Hello").click()
    expect(page.page.get_by_placeholder("Write a message")).to_have_value("Half a question")
    expect(page.page.get_by_text("notes.md")).to_be_visible()
    page.say("Half a question, completed")
    expect(page.page.get_by_placeholder("Write a message")).to_have_value("")
    page.new_chat()
    expect(page.page.get_by_placeholder("Write a message")).to_have_value("Another one")


def test_a_new_conversation_takes_what_is_typed_right_after_the_click(page: Driver):
    page.say("Hello")
    link = page.page.get_by_role("link", name="New chat")
    link.evaluate("async link => { link.click(); await null; document.execCommand('insertText', false, 'At once'); }")
    expect(page.turns).to_have_count(0)
    expect(page.page.get_by_placeholder("Write a message")).to_have_value("At once")


def test_search_looks_at_titles_and_at_what_was_said(three: Driver):
    assert titles(three) == ["Please think", "Hello there", "Show me code"]
    three.page.wait_for_timeout(600)
    three.page.keyboard.press("Control+k")
    three.page.keyboard.type("HELLO")
    expect(three.page.get_by_role("navigation").get_by_role("link")).to_have_text(["Please think", "Hello there"])
    three.page.keyboard.press("Control+a")
    three.page.keyboard.type("intervals")
    expect(three.page.get_by_role("navigation").get_by_role("link")).to_have_text(["Show me code"])
    three.page.keyboard.press("Control+a")
    three.page.keyboard.type("xyzzy")
    expect(three.page.get_by_text("Nothing found.")).to_be_visible()


def test_rename_pin_and_delete(three: Driver):
    choose(three, "Hello there", "Rename")
    three.page.get_by_role("textbox", name="Rename").fill("A greeting")
    three.button("Save").click()
    expect(three.page.get_by_role("link", name="A greeting")).to_be_visible()
    choose(three, "Show me code", "Pin")
    expect(three.page.get_by_text("Pinned")).to_be_visible()
    assert titles(three) == ["Show me code", "Please think", "A greeting"]
    choose(three, "Please think", "Delete")
    three.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(three.turns).to_have_count(0)
    three.page.wait_for_timeout(600)
    three.page.reload()
    expect(three.page.get_by_role("navigation").get_by_role("link")).to_have_text(["Show me code", "A greeting"])


def test_export_and_import_into_another_browser(three: Driver, open_page: Callable[..., Driver], tmp_path: Path):
    with three.page.expect_download() as download:
        three.button("Export all").click()
    file = tmp_path / "all.json"
    download.value.save_as(file)
    assert len(json.loads(file.read_text())["conversations"]) == 3
    other = open_page(three.url)
    with other.page.expect_file_chooser() as chooser:
        other.button("Import").click()
    chooser.value.set_files(file)
    expect(other.page.get_by_text("3 conversations imported.")).to_be_visible()
    assert titles(other) == titles(three)
    other.page.get_by_role("link", name="Show me code").click()
    expect(other.answers.locator(".katex").first).to_be_visible()


def test_an_export_of_chatgpt_is_read_with_its_branches(page: Driver, tmp_path: Path):
    said = {"u": ("user", "Which tree?", None), "a": ("assistant", "An oak.", "u"), "b": ("assistant", "A beech.", "u")}
    mapping = {
        name: {
            "id": name,
            "parent": parent,
            "message": {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}},
        }
        for name, (role, text, parent) in said.items()
    }
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([{"title": "Trees", "mapping": mapping, "current_node": "a"}]))
    with page.page.expect_file_chooser() as chooser:
        page.button("Import").click()
    chooser.value.set_files(file)
    page.page.get_by_role("link", name="Trees").click()
    expect(page.answers).to_contain_text("An oak.")
    page.button("Next version").click()
    expect(page.answers).to_contain_text("A beech.")
    page.say("Why?")
    expect(page.turns).to_have_count(4)


def test_titles_are_made_by_the_model_where_that_is_chosen(page: Driver):
    def name(route: Any) -> None:
        if "response_format" not in route.request.post_data_json:
            return route.continue_()
        answer = {"choices": [{"message": {"content": json.dumps({"title": "French capitals"})}}]}
        return route.fulfill(json=answer)

    page.page.route("**/v1/chat/completions", name)
    page.say("Hello")
    expect(page.page.locator("h1")).to_have_text("Hello")
    page.button("Menu").click()
    page.page.get_by_role("menuitem", name="Titles").hover()
    page.page.get_by_role("menuitem", name="Made by the model").click()
    page.new_chat()
    page.say("Hello again")
    expect(page.page.locator("h1")).to_have_text("French capitals")
    assert titles(page) == ["French capitals", "Hello"]


def test_export_of_one_and_a_file_that_is_no_export(three: Driver, tmp_path: Path):
    with three.page.expect_download() as download:
        choose(three, "Show me code", "Export")
    assert download.value.suggested_filename == "Show-me-code.json"
    file = tmp_path / "wrong.json"
    file.write_text("[]")
    with three.page.expect_file_chooser() as chooser:
        three.button("Import").click()
    chooser.value.set_files(file)
    expect(three.page.get_by_text("This file cannot be imported")).to_be_visible()


def test_markdown_of_a_conversation_is_saved_and_copied(three: Driver):
    with three.page.expect_download() as download:
        choose(three, "Hello there", "Export as Markdown")
    assert download.value.suggested_filename == "Hello-there.md"
    text = Path(download.value.path()).read_text()
    assert text == f"# Hello there\n\n## You\n\nHello there\n\n## Assistant\n\n{REPLY.strip()}\n"
    choose(three, "Hello there", "Copy as Markdown")
    expect(three.page.get_by_text("Copied")).to_be_visible()
    assert three.page.evaluate("navigator.clipboard.readText()") == text


def test_delete_all(three: Driver):
    three.button("Menu").click()
    three.page.get_by_role("menuitem", name="Delete all conversations").click()
    dialog = three.page.get_by_role("dialog")
    expect(dialog).to_contain_text("All 3 conversations will be gone")
    three.check_accessibility()
    dialog.get_by_role("button", name="Delete").click()
    expect(three.page.get_by_text("Your conversations will be listed here")).to_be_visible()
    expect(three.turns).to_have_count(0)
    three.page.reload()
    expect(three.page.get_by_text("Your conversations will be listed here")).to_be_visible()
    three.button("Menu").click()
    expect(three.page.get_by_role("menuitem", name="Delete all conversations")).to_be_disabled()


def test_an_address_of_nothing(page: Driver):
    page.page.goto(f"{page.url}/#/c/nothing")
    expect(page.page.get_by_text("This conversation is not in this browser.")).to_be_visible()
