"""A whole model that sees, with random weights: the same image by each way gives the same answer."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from fastapi.testclient import TestClient
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxllm import LLM, SamplingParams
from jaxllm.cli.chat import image_part
from jaxllm.cli.generate import _complete
from jaxllm.config import ServeConfig
from tests.models.vision_harness import write_options
from tests.reference.vision import PREPARATIONS, images, write_vision_checkpoint
from tests.serving.fake_engine import SEEING_TEMPLATE, app_of

IMAGE = 120
"""The token of the model's images; all others are characters."""
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def write_model(folder: Path) -> Path:
    kind, settings = PREPARATIONS["qwen2_5_vl"]
    path = write_options(write_vision_checkpoint("qwen2_5_vl", folder), getattr(transformers, kind)(**settings))
    vocabulary = {chr(32 + token): token for token in range(95)} | {"<unk>": 100, "<image>": IMAGE}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<image>", special=True)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": SEEING_TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_memory": 2**22, "dtype": "float32"}
    llm = LLM(str(write_model(tmp_path_factory.mktemp("seeing"))), **sizes)
    yield llm
    llm.shutdown()


def said(*content: Any) -> list[dict[str, Any]]:
    kinds = [("text" if isinstance(part, str) else "image", part) for part in content]
    return [{"role": "user", "content": [{"type": kind, kind: part} for kind, part in kinds]}]


def test_an_image_gives_the_same_answer_by_every_way(llm: LLM, tmp_path: Path) -> None:
    first, second = images()
    one = llm.chat(said("A", first, "B"), PARAMS)[0]
    expected, prompt = one.outputs[0].token_ids, "[user]A(<image>)B[assistant]"
    other = llm.chat(said("A", second, "B"), PARAMS)[0].outputs[0].token_ids
    assert other != expected
    both = llm.chat([said("A", first, "B"), said("A", second, "B")], PARAMS)
    assert [one.outputs[0].token_ids for one in both] == [expected, other]
    asked: Any = {"prompt": prompt, "multi_modal_data": {"image": first}}
    assert llm.generate(asked, PARAMS)[0].outputs[0].token_ids == expected
    engine = llm.asynchronous()

    async def last() -> list[int]:
        async for output in engine.generate(asked, PARAMS):
            found = output.outputs[0].token_ids
        return list(found)

    assert asyncio.run(last()) == expected
    file = io.BytesIO()
    first.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    config = ServeConfig(model="m", data_dir=tmp_path / "data")
    with TestClient(app_of(config, engine), base_url="http://localhost") as client:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        content = [{"type": "text", "text": "A"}, image, {"type": "text", "text": "B"}]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "return_token_ids": True}
        body |= {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(one.prompt_token_ids) == len(answer["prompt_token_ids"])
    assert one.prompt_token_ids.count(IMAGE) == len(one.prompt_token_ids) - len("[user]A()B[assistant]")


def test_the_terminal_sends_images(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, file = images()[0], tmp_path / "a.png"
    image.save(file)
    expected = llm.chat(said(image, "B"), PARAMS)[0]
    asyncio.run(_complete(llm.asynchronous(), ["B"], PARAMS, True, True, [file]))
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_token_ids"] == expected.prompt_token_ids
    assert found["outputs"][0]["token_ids"] == expected.outputs[0].token_ids
    parts = [image_part(file), {"type": "text", "text": "B"}]
    sent: Any = [{"role": "user", "content": parts}]
    assert llm.chat(sent, PARAMS)[0].outputs[0].token_ids == expected.outputs[0].token_ids
