"""Pictures for a model that sees."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.serving.fake_engine import SeeingEngine
from tests.web.driver import Driver, expect
from tests.web.test_conversations import choose
from tests.web.test_views import PHONE

GIVE = """(target, [kind, name, data]) => {
  const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, {type: "image/png"}));
  const options = {bubbles: true, cancelable: true};
  if (kind === "paste") target.dispatchEvent(new ClipboardEvent("paste", {clipboardData: transfer, ...options}));
  else target.dispatchEvent(new DragEvent(kind, {dataTransfer: transfer, ...options}));
}"""


@pytest.fixture
def engine() -> SeeingEngine:
    return SeeingEngine()


@pytest.fixture
def seeing(open_page: Callable[..., Driver], listen: Callable[..., str], engine: SeeingEngine) -> Driver:
    return open_page(listen(engine, served_model_name="eyes"))


def png(width: int, height: int, color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def photo(width: int, height: int) -> bytes:
    """One of noise, which takes many bytes, and which a camera held upright has marked as turned."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng().integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=90, exif=exif)
    return file.getvalue()


def chosen(page: Driver) -> Any:
    return page.page.locator(".composer input[accept='image/*']").first


def shown(place: Any) -> Any:
    return place.get_by_role("list", name="Pictures").get_by_role("img")


def bodies(page: Driver) -> list[dict[str, Any]]:
    """Those of the requests for an answer that the page sends from now on."""
    found: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            found.append(json.loads(request.post_data))

    page.page.on("request", note)
    return found


def decoded(part: dict[str, Any]) -> Image.Image:
    kind, _, data = part["image_url"]["url"].partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert kind == f"data:image/{str(image.format).lower()};base64"
    return image


def test_a_model_is_shown_pictures_in_their_order(seeing: Driver, engine: SeeingEngine):
    sent, small = bodies(seeing), png(20, 10, "red")
    files = [("small.png", "image/png", small), ("photo.jpg", "image/jpeg", photo(3000, 1500))]
    files += [("wide.png", "image/png", png(4000, 500, "blue")), ("bad.png", "image/png", b"\x89PNG\r\n")]
    chosen(seeing).set_input_files([{"name": n, "mimeType": t, "buffer": b} for n, t, b in files])
    expect(seeing.page.get_by_text("bad.png is a picture that this browser cannot read.")).to_be_visible()
    composer = seeing.page.locator(".composer")
    for at, name in enumerate(("small.png", "photo.jpg", "wide.png")):
        expect(shown(composer).nth(at)).to_have_attribute("alt", name)
    seeing.check_accessibility()
    seeing.say("What is it?")
    *images, text = sent[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert base64.b64decode(images[0]["image_url"]["url"].partition(",")[2]) == small
    assert [(decoded(image).format, decoded(image).size) for image in images] == [
        ("PNG", (20, 10)), ("JPEG", (1024, 2048)), ("PNG", (2048, 256)),
    ]  # fmt: skip
    assert decoded(images[2]).convert("RGB").getpixel((9, 9)) == (0, 0, 255)
    assert engine.images[0] is not None and len(engine.images[0].images) == 3
    expect(shown(seeing.turns.first)).to_have_count(3)
    expect(shown(composer)).to_have_count(0)
    seeing.check_accessibility()


def test_pictures_are_pasted_dropped_and_removed(seeing: Driver, engine: SeeingEngine):
    sent, data = bodies(seeing), base64.b64encode(png(8, 8, "green")).decode()
    field, composer = seeing.page.get_by_placeholder("Write a message"), seeing.page.locator(".composer")
    field.evaluate(GIVE, ["paste", "image.png", data])
    expect(shown(composer)).to_have_count(1)
    field.evaluate(GIVE, ["paste", "image.png", data])
    seeing.page.locator("body").evaluate(GIVE, ["dragenter", "", ""])
    area = seeing.page.locator(".ant-attachment-drop-area")
    expect(area).to_contain_text("Drop pictures, text files or PDFs here")
    area.locator(".ant-upload-btn").evaluate(GIVE, ["drop", "dropped.png", data])
    expect(shown(composer)).to_have_count(3)
    seeing.button("Remove image-2.png").click()
    expect(shown(composer)).to_have_count(2)
    expect(field).to_be_focused()
    seeing.button("Send").click()
    seeing.wait()
    assert [part["type"] for part in sent[0]["messages"][0]["content"]] == ["image_url"] * 2
    expect(seeing.page.get_by_role("navigation").get_by_role("link", name="image.png")).to_be_visible()


def test_pictures_stay_in_what_is_edited_kept_and_exported(seeing: Driver, engine: SeeingEngine, tmp_path: Path):
    sent = bodies(seeing)
    chosen(seeing).set_input_files({"name": "dot.png", "mimeType": "image/png", "buffer": png(8, 8, "red")})
    expect(seeing.button("Remove dot.png")).to_be_visible()
    seeing.say("Look")
    seeing.page.wait_for_timeout(600)
    seeing.page.reload()
    expect(shown(seeing.turns.first)).to_have_attribute("alt", "dot.png")
    seeing.button("Edit").first.click()
    expect(shown(seeing.page)).to_have_count(1)
    seeing.page.get_by_role("textbox", name="Edit").fill("Look again")
    seeing.page.locator(".edit-buttons").get_by_role("button", name="Send").click()
    expect(seeing.turns.first).to_contain_text("Look again")
    seeing.wait()
    seeing.button("Regenerate").click()
    seeing.wait()
    contents = [body["messages"][0]["content"] for body in sent]
    assert [content[1]["text"] for content in contents] == ["Look", "Look again", "Look again"]
    assert contents[0][0] == contents[1][0] == contents[2][0]
    with seeing.page.expect_download() as download:
        choose(seeing, "Look", "Export as Markdown")
    assert f"![dot.png]({contents[0][0]['image_url']['url']})" in Path(download.value.path()).read_text()
    with seeing.page.expect_download() as download:
        choose(seeing, "Look", "Export")
    file = tmp_path / "one.json"
    download.value.save_as(file)
    with seeing.page.expect_file_chooser() as chooser:
        seeing.button("Import").click()
    chooser.value.set_files(file)
    links = seeing.page.get_by_role("navigation").get_by_role("link", name="Look")
    expect(links).to_have_count(2)
    links.first.click()
    expect(shown(seeing.turns.first)).to_have_attribute("alt", "dot.png")


def test_a_phone_has_its_camera(open_page: Callable[..., Driver], listen: Callable[..., str], engine: SeeingEngine):
    page = open_page(listen(engine), **PHONE)
    with page.page.expect_file_chooser() as chooser:
        page.button("Take a picture").tap()
    assert chooser.value.element.get_attribute("capture") == "environment"
    chooser.value.set_files({"name": "image.jpg", "mimeType": "image/jpeg", "buffer": photo(64, 32)})
    expect(page.button("Remove image.jpg")).to_be_visible()
    page.check_accessibility()
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
