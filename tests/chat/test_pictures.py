"""Images in the messages of a notebook, in templates, and in the terminal's conversations."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm.chat.conversation import Conversation, Message, given_messages
from jaxllm.chat.pictures import Picture, Sent
from jaxllm.chat.prompt import ChatModel, Rendered, render
from jaxllm.errors import InvalidRequestError
from tests.serving.fake_engine import SEEING_TEMPLATE, FakeEngine, SeeingEngine

PIXELS = np.full((8, 16, 3), 200, np.uint8)
QWEN = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if 'image' in p or p.type == 'image' %}<<image>>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    return file.getvalue()


def rendered(engine: FakeEngine, messages: list[dict[str, Any]]) -> Rendered:
    return render(ChatModel(engine), Conversation(messages=given_messages(messages)))


def test_a_notebook_gives_images_as_it_has_them(tmp_path: Path) -> None:
    engine, file = SeeingEngine(), tmp_path / "a.png"
    file.write_bytes(png())
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    pillow = Image.fromarray(PIXELS)
    ways: list[dict[str, Any]] = [
        {"type": "image", "image": image} for image in (PIXELS, file, str(file), pillow, png())
    ]
    ways += [{"type": "image_pil", "image_pil": pillow}]
    ways += [{"type": "image_url", "image_url": {"url": url, "detail": "high"}}]
    text = {"type": "text", "text": "A"}
    found = [rendered(engine, [{"role": "user", "content": [way, text]}]) for way in ways]
    assert {one.text for one in found} == {"[user](<image>)A[assistant]"}
    assert all(one.images and one.images.images == found[0].images.images for one in found)  # type: ignore[union-attr]
    assert len(found[0].token_ids) == len("[user]()A[assistant]") + 8


@pytest.mark.parametrize("wrong", [
    {"type": "image"}, {"type": "image", "image": 3}, {"type": "image", "image": "/none.png"}, {"type": "image_url"},
    {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, {"type": "image", "image": PIXELS, "x": 1},
    {"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}, {"type": "image", "image": np.zeros((2, 2))},
    {"type": "audio", "audio": "x"}, {"type": "video"}, "A", 3, None,
])  # fmt: skip
def test_what_is_no_image_is_named(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.content\[1\]"):
        rendered(SeeingEngine(), [
            {"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "A"}, wrong]}
        ])  # fmt: skip


def test_messages_of_text_are_as_they_were() -> None:
    engine, plain = SeeingEngine(), FakeEngine()
    plain.tokenizer = engine.tokenizer
    for content in ("A", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], [], None, ""):
        messages = [{"role": "user", "content": content}]
        if content:
            assert rendered(engine, messages) == rendered(plain, messages)
        assert given_messages(messages)[0].given == messages[0]


def test_a_result_has_the_words_that_the_template_writes_around_an_image() -> None:
    engine = SeeingEngine(QWEN)
    picture = Picture(PIXELS)
    said = [Message.of("user", ["A", picture]), Message.of("observation", [picture])]
    assert Message.of("user", ["A", "B"]) == Message("user", "A\nB")
    text = render(ChatModel(engine), Conversation(messages=said[:1])).text
    assert text == "user:A<<image>>"
    messages = given_messages([
        {"role": "user", "content": "A"},
        {"role": "tool", "content": [{"type": "text", "text": "B"}, {"type": "image", "image": PIXELS}]},
    ])  # fmt: skip
    found = render(ChatModel(engine), Conversation(messages=messages, separate_reasoning=False))
    assert found.text == "user:Atool:B\n<<image>>" and found.images is not None


def test_alternating_templates_get_images_together() -> None:
    engine = SeeingEngine("{# must alternate #}" + SEEING_TEMPLATE)
    messages = [Message.of("user", ["A", Picture(PIXELS)]), Message.of("user", [Picture(PIXELS), "B"])]
    found = render(ChatModel(engine), Conversation(messages=messages))
    assert found.text == "[user]A\n(<image>)\n\n(<image>)\nB[assistant]"
    assert found.images is not None and len(found.images.images) == 2


def test_sent_data_is_read_as_it_comes() -> None:
    text = base64.b64encode(b"abcd").decode()
    urls = [f"data:image/png;base64,{text}", f"DATA:;BASE64,{text}"]
    for sent in (text, text.rstrip("="), f"{text[:4]}\r\n{text[4:]}", *urls):
        assert Sent(sent).data() == b"abcd" and not Sent(sent).is_elsewhere
    for sent in ("https://a/b", "file:///a", "ftp://a"):
        assert Sent(sent).is_elsewhere
    for sent in ("!", "data:image/png,abcd", "a,b", "abc-_"):
        with pytest.raises(InvalidRequestError):
            Sent(sent).data()
