"""Files that become part of a message, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.web.driver import Driver, expect
from tests.web.talker import Talker

DRAG = """(target, [type, name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  target.dispatchEvent(new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true}));
}"""
PASTE = """(target, text) => {
  const data = new DataTransfer();
  data.setData("text/plain", text);
  target.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
}"""


HELVETICA = "/Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding"
CHINESE = (
    "/Type0 /BaseFont /Song /Encoding /UniGB-UCS2-H /DescendantFonts [<< /Type /Font /Subtype /CIDFontType0 "
    "/BaseFont /Song /CIDSystemInfo << /Registry (Adobe) /Ordering (GB1) /Supplement 2 >> >>]"
)
ENCRYPT = f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'01' * 32}> /U <{'02' * 32}> >> /ID [<00> <00>]"


def pdf(*pages: str, font: str = HELVETICA, encrypt: str = "") -> bytes:
    """A PDF of pages with these contents, in which /F is the font."""
    kids = " ".join(f"{number} 0 R" for number in range(4, 4 + 2 * len(pages), 2))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>"]
    objects.append(f"<< /Type /Font /Subtype {font} >>")
    for content in pages:
        resources = f"/MediaBox [0 0 200 100] /Resources << /Font << /F 3 0 R >> >> /Contents {len(objects) + 2} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R {resources} >>")
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    text, table = "%PDF-1.7\n", "0000000000 65535 f \n"
    for number, body in enumerate(objects, 1):
        table += f"{len(text):010} 00000 n \n"
        text += f"{number} 0 obj\n{body}\nendobj\n"
    size = len(objects) + 1
    trailer = f"trailer << /Size {size} /Root 1 0 R {encrypt} >>\nstartxref\n{len(text)}\n%%EOF"
    return f"{text}xref\n0 {size}\n{table}{trailer}".encode("ascii")


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
    expect(page.page.get_by_text("picture.png is a picture. The models here read text only.")).to_be_visible()
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


def test_dropped_files_and_long_pastes_become_files(page: Driver, talker: Talker):
    page.page.get_by_placeholder("Write a message").evaluate(PASTE, "long " * 2000)
    expect(page.page.get_by_text("The text is long: it is attached as pasted.txt.")).to_be_visible()
    expect(page.button("Remove pasted.txt")).to_be_visible()
    page.page.locator("body").evaluate(DRAG, ["dragenter", "", ""])
    area = page.page.locator(".ant-attachment-drop-area")
    expect(area).to_contain_text("Drop text files or PDFs here")
    area.locator(".ant-upload-btn").evaluate(DRAG, ["drop", "dropped.txt", "dropped text"])
    expect(page.page.get_by_text("dropped.txt")).to_be_visible()


def test_the_text_of_a_pdf_is_read_by_the_model(page: Driver, talker: Talker, tmp_path: Path):
    loaded = "performance.getEntriesByType('resource').filter(({name}) => name.includes('pdf')).length"
    assert page.page.evaluate(loaded) == 0
    paper = tmp_path / "paper.pdf"
    paper.write_bytes(
        pdf("BT /F 12 Tf 20 90 Td (Gr\\374\\337e) Tj 0 -20 Td (from page 1) Tj ET", "BT /F 12 Tf (page 2) Tj ET")
    )
    page.page.locator(".composer input[type=file]").set_input_files(paper)
    expect(page.button("Remove paper.pdf")).to_be_visible()
    expect(page.page.get_by_text("Reading paper.pdf")).to_have_count(0)
    assert page.page.evaluate(loaded) > 0
    page.page.locator("body").evaluate(DRAG, ["dragenter", "", ""])
    dropped = pdf("BT /F 12 Tf (dropped) Tj ET").decode()
    page.page.locator(".ant-attachment-drop-area .ant-upload-btn").evaluate(DRAG, ["drop", "DROPPED.PDF", dropped])
    expect(page.button("Remove DROPPED.PDF")).to_be_visible()
    page.say("What do they say?")
    seen = bytes(talker.seen[-1][0]).decode()
    assert "paper.pdf:\n```\nGrüße\nfrom page 1\n\npage 2\n```" in seen
    assert "DROPPED.PDF:\n```\ndropped\n```" in seen


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pdf("0 0 50 50 re f"), "has no text: its pages are pictures, such as scans."),
        (b"%PDF-1.7\n1 0 obj", "is damaged, or no PDF."),
        (b"", "is damaged, or no PDF."),
        (pdf("BT /F 12 Tf (secret) Tj ET", encrypt=ENCRYPT), "is encrypted and needs a password."),
        (pdf("BT /F 12 Tf <4F60597D> Tj ET", font=CHINESE), "uses a font encoding that this page cannot read."),
        (pdf(f"BT /F 0.0001 Tf ({'a' * 3_000_000}) Tj ET"), "The text of it.pdf is longer than 2 MB."),
    ],
    ids=["a scan", "damaged", "empty", "encrypted", "Chinese without tables", "too long"],
)
def test_a_pdf_without_a_text_for_us_is_refused(page: Driver, tmp_path: Path, content: bytes, said: str):
    file = tmp_path / "it.pdf"
    file.write_bytes(content)
    page.page.locator(".composer input[type=file]").set_input_files(file)
    expect(page.page.get_by_text(said)).to_be_visible()
    expect(page.button("Remove it.pdf")).to_have_count(0)


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
