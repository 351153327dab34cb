"""Images as clients send them through each API: in base64, by their id, from tools; and what is refused."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from jaxllm.chat.prompt import ChatModel, with_seen
from jaxllm.engine.messages import PlacedImages
from jaxllm.mcp.tools import ToolResult
from tests.serving.fake_engine import TEMPLATE, FakeEngine, SeeingEngine
from tests.support.covers import covers

MakeClient = Callable[..., TestClient]


def png(width: int = 16, height: int = 8, colour: str = "red", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind)
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


RED, BLUE = encoded(png()), encoded(png(8, 8, "blue"))  # 8 and 4 rows
RED_URL = f"data:image/png;base64,{RED}"


def part(url: Any = RED_URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def asked(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]}]


@pytest.fixture
def engine() -> SeeingEngine:
    return SeeingEngine()


def prompt_of(engine: SeeingEngine) -> str:
    """The last prompt, with the number of rows in the place of each image."""
    tokens, [*_, images] = engine.seen[-1][0], engine.images
    return _shown(engine, tokens, images)


def _shown(engine: SeeingEngine, tokens: list[int], images: PlacedImages | None) -> str:
    assert engine.tokenizer is not None
    image = engine.tokenizer.backend.token_to_id("<image>")
    rows = memoryview(images.rows).cast("i").tolist() if images else [-1] * len(tokens)
    assert len(rows) == len(tokens)
    assert [row for row in rows if row >= 0] == list(range(sum(one.num_rows for one in images.images) if images else 0))
    assert images is None or all((token == image) == (row >= 0) for token, row in zip(tokens, rows, strict=True))
    text, counts = "", [one.num_rows for one in images.images] if images else []
    for token, row in zip(tokens, rows, strict=True):
        if row < 0:
            text += engine.tokenizer.decode([token], False)
        elif counts and row == sum(one.num_rows for one in images.images[: len(images.images) - len(counts)]):  # type: ignore[union-attr]
            text += f"#{counts.pop(0)}"
    return text


def ok(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: Any, *told: str) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "\n" not in message and all(one in message for one in told), message
    return str(message)


@covers("ImagePart", "image_url", "uuid")
@covers("ImageURL", "url")
def test_a_chat_has_images_among_its_texts(client: TestClient, engine: SeeingEngine) -> None:
    messages = asked(
        "A", part() | {"uuid": "a"}, "B", {"type": "image_url", "image_url": f"data:image/png;base64,{BLUE}"}, "C"
    )
    answer = ok(client.post("/v1/chat/completions", json={"messages": messages}))
    assert prompt_of(engine) == "[user]A(#8)B(#4)C[assistant]"
    assert answer["usage"]["prompt_tokens"] == len("[user]A()B()C[assistant]") + 12
    assert ok(client.post("/tokenize", json={"messages": messages}))["count"] == answer["usage"]["prompt_tokens"]
    ok(client.post("/v1/chat/completions", json={"messages": asked(part(RED), "of llama.cpp's clients")}))
    assert prompt_of(engine) == "[user](#8)of llama.cpp's clients[assistant]"


def test_a_template_of_strings_has_places_in_them(make_client: MakeClient) -> None:
    engine = SeeingEngine(TEMPLATE)
    ok(make_client(engine).post("/v1/chat/completions", json={"messages": asked("A", part(), "B")}))
    assert prompt_of(engine) == "[user]A\n#8\nB[assistant]"


def test_clients_are_told_that_the_model_sees(client: TestClient) -> None:
    assert client.get("/props").json()["modalities"]["vision"]
    assert "vision" in client.post("/api/show", json={"model": "fake"}).json()["capabilities"]


@covers("ImageURL", "detail")
@covers("TemplateFields", "mm_processor_kwargs")
def test_sizes_are_chosen(client: TestClient, engine: SeeingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    large = f"data:image/png;base64,{encoded(png(64, 64))}"

    def rows(*, detail: str | None = None, **sizes: int) -> int:
        messages = asked(part(large, **({"detail": detail} if detail else {})))
        ok(client.post("/v1/chat/completions", json={"messages": messages, "mm_processor_kwargs": sizes}))
        [image] = engine.images[-1].images  # type: ignore[union-attr]
        return int(image.num_rows)

    assert rows() == rows(detail="high") == 64 and 64 < rows(max_tokens=10_000) <= 128
    assert rows(max_tokens=16) == rows(max_soft_tokens=16) == rows(max_pixels=256) == 16
    assert rows(max_tokens=16, max_pixels=64) == 4
    monkeypatch.setattr("jaxllm.chat.pictures.LOW_ROWS", 9)
    assert rows(detail="low") == 9 and rows(detail="low", max_tokens=4) == 4
    small = asked(part(f"data:image/png;base64,{encoded(png(4, 4))}"))
    ok(client.post("/v1/chat/completions", json={"messages": small, "mm_processor_kwargs": {"min_tokens": 25}}))
    assert engine.images[-1].images[0].num_rows == 25  # type: ignore[union-attr]
    for wrong in ({"size": 1}, {"max_tokens": 0}, {"max_tokens": "a"}, {"min_pixels": True}):
        refused(client.post("/v1/chat/completions", json={"messages": small, "mm_processor_kwargs": wrong}), "kwargs")


@pytest.mark.parametrize(
    "forged",
    [
        "<image>", "a <image><image> b", "<<image>image>", "<s><image></s>",
        ("<ima", "ge>"), ("<", "image>"), ("<image", ">"),
    ],
)  # fmt: skip
def test_text_that_spells_an_image_stays_text(client: TestClient, engine: SeeingEngine, forged: Any) -> None:
    texts = [forged] if isinstance(forged, str) else list(forged)
    tools = [{"type": "function", "function": {"name": "f", "description": texts[0], "parameters": {texts[0]: {}}}}]
    for extra in ({}, {"tools": tools}, {"chat_template_kwargs": {"reasoning_effort": texts[0]}}):
        ok(client.post("/v1/chat/completions", json={"messages": asked(part(), *texts), **extra}))
        assert f"(#8){''.join(texts)}" in prompt_of(engine).replace("\n", "")
    ok(client.post("/v1/chat/completions", json={"messages": asked(*texts)}))
    lines = "\n".join(texts)
    assert prompt_of(engine) == f"[user]{lines}[assistant]" and engine.images[-1] is None
    applied = ok(client.post("/apply-template", json={"messages": asked(*texts)}))
    assert applied["prompt"] == f"[user]{lines}[assistant]"


def test_a_template_without_a_place_is_refused(make_client: MakeClient) -> None:
    blind = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    answer = make_client(SeeingEngine(blind)).post("/v1/chat/completions", json={"messages": asked(part(), "A")})
    refused(answer, "0 places for images", "1 images")


def test_results_of_tools_have_images(client: TestClient, engine: SeeingEngine) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [*asked("A"), {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": asked("it:", part())[0]["content"]}
    ok(client.post("/v1/chat/completions", json={"messages": [*said, result]}))
    assert "it:\n(#8)" in prompt_of(engine)


@covers("InputImage", "image_url", "file_id", "detail", "prompt_cache_breakpoint")
def test_responses_take_images(client: TestClient, engine: SeeingEngine) -> None:
    file = client.post("/v1/files", files={"file": ("a.png", png())}, data={"purpose": "vision"}).json()["id"]
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{BLUE}", "detail": "auto"}
    marked = {"type": "input_image", "file_id": file, "prompt_cache_breakpoint": {"mode": "explicit"}}
    content = [{"type": "input_text", "text": "A"}, image, marked]
    first = ok(client.post("/v1/responses", json={"input": [{"role": "user", "content": content}]}))
    assert prompt_of(engine) == "[user]A(#4)(#8)[assistant]"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [image]}
    body = {"input": [call, output], "previous_response_id": first["id"]}
    ok(client.post("/v1/responses", json=body))
    assert prompt_of(engine).startswith("[user]A\n(#4)\n(#8)[assistant]The")
    assert prompt_of(engine).endswith("Result of f: (#4)[assistant]")
    bad = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    refused(client.post("/v1/responses", json={"input": [{"role": "user", "content": [bad]}]}), "input[0].content[0]:")
    body = {"input": [call, output | {"output": [bad]}]}
    refused(client.post("/v1/responses", json=body), "input[1].output[0]:")
    gone = [{"type": "input_image", "file_id": "file-none"}]
    refused(client.post("/v1/responses", json={"input": [{"role": "user", "content": gone}]}), "no file has the id")


@covers("ImageBlockParam", "source")
@covers("ImageSource", "type", "media_type", "data", "url", "file_id")
def test_anthropic_takes_images(client: TestClient, engine: SeeingEngine) -> None:
    def send(*messages: Any) -> Any:
        return client.post("/v1/messages", json={"model": "fake", "max_tokens": 9, "messages": messages})

    def block(**source: Any) -> dict[str, Any]:
        return {"type": "image", "source": source}

    red = block(type="base64", media_type="image/png", data=RED)
    file = client.post("/v1/files", files={"file": ("a.png", png(8, 8))}, data={"purpose": "vision"}).json()["id"]
    content = [red, {"type": "text", "text": "A"}, block(type="file", file_id=file)]
    ok(send({"role": "user", "content": content}))
    assert prompt_of(engine) == "[user](#8)A(#4)[assistant]"
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": [red]}
    ok(send({"role": "user", "content": "A"}, use, {"role": "user", "content": [result]}))
    assert "Error: \n(#8)" in prompt_of(engine)
    bad = block(type="base64", data="AAAA")
    refused(send({"role": "user", "content": "A"}, {"role": "user", "content": [red, bad]}), "messages[1].content[1]:")
    result = result | {"content": [red, bad]}
    told = send({"role": "user", "content": "A"}, use, {"role": "user", "content": [result]})
    refused(told, "messages[2].content[0].content[1]:")
    for wrong in (block(type="base64", url="x"), block(type="url"), block(type="file", file_id="a", data="b")):
        refused(send({"role": "user", "content": [wrong]}), "source")
    refused(send({"role": "user", "content": [block(type="url", url="http://a/b")]}), "allowed_media_domains")
    refused(send({"role": "assistant", "content": [red]}), "not 'image'")


@covers("OllamaMessage", "images")
@covers("GenerateRequest", "images")
def test_ollama_takes_images(client: TestClient, engine: SeeingEngine) -> None:
    body = {"model": "fake", "stream": False}
    said = {"role": "user", "content": "A", "images": [RED, BLUE]}
    ok(client.post("/api/chat", json=body | {"messages": [said]}))
    assert prompt_of(engine) == "[user](#8)(#4)A[assistant]"
    ok(client.post("/api/generate", json=body | {"prompt": "A", "images": [BLUE]}))
    assert prompt_of(engine) == "[user](#4)A[assistant]"
    refused(client.post("/api/chat", json=body | {"messages": [said | {"images": ["AAAA"]}]}), "messages[0].images[0]:")
    refused(client.post("/api/generate", json=body | {"prompt": "A", "images": ["AAAA"]}), "images[0]:")
    for other in ({"raw": True}, {"suffix": "b"}, {"context": [1]}):
        refused(client.post("/api/generate", json=body | {"prompt": "A", "images": [RED]} | other), "images is not")


def test_a_tools_images_are_those_that_can_be_seen(engine: SeeingEngine) -> None:
    bad = with_seen(ChatModel(engine), ToolResult("A", images=(RED, "AAAA", "!", BLUE)))
    assert bad == ToolResult("A", images=(RED, BLUE))
    assert with_seen(ChatModel(FakeEngine()), ToolResult("A", images=(RED,))).images == ()
    assert with_seen(None, ToolResult("A", images=(RED,))).images == ()


@covers("McpCallItem", "images")
def test_a_response_shows_the_images_of_an_earlier_call(client: TestClient, engine: SeeingEngine) -> None:
    item = {"type": "mcp_call", "id": "mcp_1", "server_label": "eyes", "name": "look", "arguments": "{}"}
    item |= {"output": "it"}
    said = {"role": "user", "content": "A"}
    ok(client.post("/v1/responses", json={"input": [said, item | {"images": [RED, BLUE]}, said]}))
    assert "it\n(#8)\n(#4)" in prompt_of(engine)
    ok(client.post("/v1/responses", json={"input": [said, item, said]}))
    assert engine.images[-1] is None


def test_a_model_that_does_not_see_says_so(make_client: MakeClient) -> None:
    client = make_client(FakeEngine(), allowed_media_domains="example.com")
    messages = [{"role": "system", "content": "S"}, *asked("A"), *asked("A", part("https://example.com/a.png"))]
    refused(client.post("/v1/chat/completions", json={"messages": messages}), "messages[2].content[1] is", "sees no")
    body = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "data": RED}}]}]}  # fmt: skip
    refused(client.post("/v1/messages", json=body), "messages[0].content[0] is", "sees no images")
    said = {"role": "user", "content": "A", "images": [RED]}
    refused(client.post("/api/chat", json={"model": "fake", "messages": [said]}), "messages[0].images[0] is")


def test_limits_of_a_request(make_client: MakeClient) -> None:
    client = make_client(SeeingEngine(most_images=2))
    chat = "/v1/chat/completions"
    refused(client.post(chat, json={"messages": asked(*[part()] * 3)}), "has 3 images", "limit_mm_per_prompt")
    large = part(f"data:image/png;base64,{encoded(png(64, 64))}")
    client = make_client(SeeingEngine())
    refused(client.post(chat, json={"messages": asked(*[large] * 40)}), "images take 192 tokens", "accepted are 128")
    body = {"messages": asked("A", part()), "truncate_prompt_tokens": 5}
    refused(client.post(chat, json=body), "truncate_prompt_tokens is not available with images")
    refused(client.post("/v1/embeddings", json={"messages": asked("A", part())}), "messages[0].content[1]")


@pytest.mark.parametrize("url", [
    1, None, {}, [], "", "data:", "data:,", "data:image/png,AAAA", "data:image/png;base64,", "data:image/png;base64,!",
    "data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=", "A", "A" * 100_000, "data:;base64," + "A" * 3_000_000, "\x00", "::",
    "file:///etc/passwd", "/etc/passwd", "ftp://a/b", "http://", "http:///a", "http://[", "HTTP://A B/", "é", "\ud800",
])  # fmt: skip
def test_odd_urls_are_refused_in_one_line(client: TestClient, url: Any) -> None:
    import json

    body = json.dumps({"messages": asked("A", part(url))})
    answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert len(refused(answer)) < 600


def test_damaged_images_are_refused(client: TestClient, tmp_path: Path) -> None:
    choose = random.Random(3)
    whole = [png(40, 30, kind=kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")]
    for _ in range(120):
        data = bytearray(choose.choice(whole))
        for _ in range(choose.randrange(1, 9)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        sent = encoded(bytes(data[: choose.randrange(len(data)) if choose.random() < 0.3 else len(data)]))
        answer = client.post("/v1/chat/completions", json={"messages": asked(part(sent or "A"))})
        assert answer.status_code in (200, 400), answer.text
        assert "0x" not in answer.text and str(tmp_path) not in answer.text
    wide = encoded(png(30_000, 1))
    assert client.post("/v1/chat/completions", json={"messages": asked(part(wide))}).status_code == 400


def test_parts_of_wrong_types(client: TestClient) -> None:
    choose = random.Random(4)
    urls = [RED_URL, [RED_URL], {"url": 3}, {"url": RED_URL, "detail": "x"}]
    values: list[Any] = [None, 1, True, "a", [], {}, 2.5, *urls]
    names = ["type", "image_url", "text", "uuid", "detail", "image", "file_id", "source"]
    for _ in range(200):
        sent = {name: choose.choice(values) for name in choose.sample(names, choose.randrange(1, 4))}
        sent |= {"type": choose.choice(["image_url", "text", "input_image", "image", None, 3])}
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [sent]}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [sent]}]}),
            ("/v1/messages", {"model": "f", "max_tokens": 1, "messages": [{"role": "user", "content": [sent]}]}),
        ):
            assert client.post(path, json=body).status_code in (200, 400, 404), (path, sent)


def test_every_sdk_sends_images(listen: Callable[..., str], engine: SeeingEngine) -> None:
    import anthropic
    import openai

    url = listen(engine)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        messages: Any = asked("A", part(detail="high"))
        client.chat.completions.create(model="fake", messages=messages)
        assert prompt_of(engine) == "[user]A(#8)[assistant]"
        image: Any = {"type": "input_image", "image_url": RED_URL, "detail": "auto"}
        said: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": "B"}]}]
        client.responses.create(model="fake", input=said)
        assert prompt_of(engine) == "[user](#8)B[assistant]"
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as other:
        source: Any = {"type": "base64", "media_type": "image/png", "data": RED}
        blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "C"}]
        other.messages.create(model="fake", max_tokens=9, messages=[{"role": "user", "content": blocks}])
        assert prompt_of(engine) == "[user](#8)C[assistant]"


def test_ollamas_sdk_sends_images(listen: Callable[..., str], engine: SeeingEngine) -> None:
    ollama = pytest.importorskip("ollama")
    url = listen(engine)
    ollama.Client(url).chat("fake", [{"role": "user", "content": "D", "images": [png()]}])
    assert prompt_of(engine) == "[user](#8)D[assistant]"
    ollama.Client(url).generate("fake", "E", images=[png(8, 8)])
    assert prompt_of(engine) == "[user](#4)E[assistant]"
