"""Files that become part of a message, as text."""

from __future__ import annotations

from pathlib import Path

from tests.support.pdf import pdf, said
from tests.web.driver import Driver, expect
from tests.web.talker import Talker

DRAG = """(target, [type, name]) => {
  const data = new DataTransfer();
  data.items.add(new File(["dropped text"], name, {type: "text/plain"}));
  target.dispatchEvent(new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true}));
}"""
PASTE = """(target, text) => {
  const data = new DataTransfer();
  data.setData("text/plain", text);
  target.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
}"""


def test_attached_files_are_read_by_the_model(page: Driver, talker: Talker, tmp_path: Path):
    file = tmp_path / "notes.md"
    file.write_text("Grüße from a file")
    other = tmp_path / "other.txt"
    other.write_text("not wanted")
    page.page.locator(".composer input[type=file]").set_input_files([file, other])
    page.button("Remove other.txt").click()
    page.say("What does it say?")
    assert "notes.md:\n```\nGrüße from a file\n```\n\nWhat does it say?" in bytes(talker.seen[-1][0]).decode()
    assert "not wanted" not in bytes(talker.seen[-1][0]).decode()
    expect(page.turns.first).to_contain_text("notes.md")


def test_what_is_no_text_is_refused(page: Driver, tmp_path: Path):
    file = tmp_path / "picture.png"
    file.write_bytes(b"\x89PNG\0\xff")
    page.page.locator(".composer input[type=file]").set_input_files(file)
    expect(page.page.get_by_text("picture.png is a picture, and talker reads text only.")).to_be_visible()
    expect(page.button("Attach pictures")).to_have_count(0)
    expect(page.button("Remove picture.png")).to_have_count(0)
    other = tmp_path / "data.bin"
    other.write_bytes(b"\0\xff")
    page.page.locator(".composer input[type=file]").set_input_files(other)
    expect(page.page.get_by_text("data.bin is not text.")).to_be_visible()


def test_other_encodings_are_read(page: Driver, talker: Talker, tmp_path: Path):
    marked, latin = tmp_path / "marked.txt", tmp_path / "latin.txt"
    marked.write_bytes("Grüße 你好".encode("utf-16"))
    latin.write_bytes("Größe „5 €“".encode("cp1252"))
    page.page.locator(".composer input[type=file]").set_input_files([marked, latin])
    expect(page.page.get_by_text("latin.txt is not UTF-8: it was read as Latin-1 (Windows-1252).")).to_be_visible()
    page.say("What do they say?")
    seen = bytes(talker.seen[-1][0]).decode()
    assert "marked.txt:\n```\nGrüße 你好\n```" in seen and "latin.txt:\n```\nGröße „5 €“\n```" in seen


def test_the_text_of_a_pdf_is_read_by_the_model(page: Driver, talker: Talker, tmp_path: Path):
    paper, damaged = tmp_path / "paper.pdf", tmp_path / "damaged.pdf"
    paper.write_bytes(pdf(said("Gr\\374\\337e", "from page 1"), said("page 2")))
    damaged.write_bytes(b"%PDF-1.7\n1 0 obj")
    page.expected.append("400")
    page.page.locator(".composer input[type=file]").set_input_files([paper, damaged])
    expect(page.button("Remove paper.pdf")).to_be_visible()
    expect(page.page.get_by_text("damaged.pdf is a damaged PDF")).to_be_visible()
    expect(page.page.get_by_text("Reading paper.pdf")).to_have_count(0)
    page.say("What does it say?")
    seen = bytes(talker.seen[-1][0]).decode()
    assert "paper.pdf:\n```\n[Page 1]\nGrüße\nfrom page 1\n\n[Page 2]\npage 2\n```\n\nWhat does it say?" in seen
    expect(page.turns.first).to_contain_text("paper.pdf")
    expect(page.button("Remove damaged.pdf")).to_have_count(0)


def test_dropped_files_and_long_pastes_become_files(page: Driver, talker: Talker):
    page.page.get_by_placeholder("Write a message").evaluate(PASTE, "long " * 2000)
    expect(page.page.get_by_text("The text is long: it is attached as pasted.txt.")).to_be_visible()
    expect(page.button("Remove pasted.txt")).to_be_visible()
    page.page.locator("body").evaluate(DRAG, ["dragenter", ""])
    area = page.page.locator(".ant-attachment-drop-area")
    expect(area).to_contain_text("Drop text files or PDFs here")
    area.locator(".ant-upload-btn").evaluate(DRAG, ["drop", "dropped.txt"])
    expect(page.page.get_by_text("dropped.txt")).to_be_visible()


def test_a_long_paste_can_become_text_again(page: Driver):
    for text in ("first\n" * 100, "second\n" * 100):
        page.page.evaluate("text => navigator.clipboard.writeText(text)", text)
        page.page.get_by_placeholder("Write a message").press("Control+v")
    expect(page.button("Remove pasted.txt")).to_be_visible()
    page.check_accessibility()
    page.button("Put pasted-2.txt into the message as text").click()
    expect(page.page.get_by_placeholder("Write a message")).to_have_value("second\n" * 100)
    expect(page.button("Remove pasted-2.txt")).to_have_count(0)


def test_the_tokens_of_a_draft_are_counted_with_its_files(page: Driver, tmp_path: Path):
    count = page.page.locator(".draft-tokens")
    expect(count).to_have_count(0)
    page.write("Hello")
    expect(count).to_have_text("5 tokens")
    file = tmp_path / "a.md"
    file.write_text("abc")
    page.page.locator(".composer input[type=file]").set_input_files(file)
    expect(count).to_have_text(f"{5 + len('a.md:```abc```') + 3} tokens")
    page.write("")
    page.button("Remove a.md").click()
    expect(count).to_have_count(0)
