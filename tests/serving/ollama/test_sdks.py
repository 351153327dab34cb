"""The calls of ollama's own packages for Python and JavaScript, over a real socket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving.anthropic.shared import CALL, SCHEMA, ScriptedEngine
from tests.serving.fake_engine import REPLY

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now", "parameters": SCHEMA}}
PACKAGES = Path(__file__).parents[2] / "agents/node_modules"
"""Where `npm ci` puts what tests/agents/package.json names."""


@pytest.fixture
def sdk(url: str) -> Any:
    ollama = pytest.importorskip("ollama")
    return ollama.Client(host=url, timeout=20)


def get_weather(city: str) -> str:
    """Weather now.

    Args:
        city: Where.
    """
    return f"Sunny in {city}"


def test_python_chats_and_generates(sdk: Any) -> None:
    answer = sdk.chat(model="fake", messages=HELLO, options={"temperature": 0, "num_ctx": 4096}, keep_alive="5m")
    assert answer.message.content == REPLY and answer.done_reason == "stop" and answer.eval_count == len(REPLY)
    assert "".join(part.message.content for part in sdk.chat(model="fake", messages=HELLO, stream=True)) == REPLY
    answer = sdk.generate(model="fake", prompt="Hi", system="Be brief.")
    assert answer.response == REPLY and answer.context
    again = sdk.generate(model="fake", prompt="And?", context=answer.context, stream=True)
    assert "".join(part.response for part in again) == REPLY
    assert sdk.generate(model="fake").done_reason == "load"


def test_python_calls_tools_and_sends_the_results_back(sdk: Any, engine: ScriptedEngine) -> None:
    engine.script = [CALL, "Sunny."]
    messages: list[Any] = [*HELLO]
    answer = sdk.chat(model="fake", messages=messages, tools=[get_weather])
    [call] = answer.message.tool_calls
    assert get_weather(**call.function.arguments) == "Sunny in Paris"
    messages += [answer.message, {"role": "tool", "tool_name": call.function.name, "content": "Sunny in Paris"}]
    assert sdk.chat(model="fake", messages=messages, tools=[get_weather]).message.content == "Sunny."


def test_python_thinks_and_keeps_to_a_format(sdk: Any, engine: ScriptedEngine) -> None:
    engine.reply = "<think>\nHm.</think>\n\nYes."
    message = sdk.chat(model="fake", messages=HELLO, think=True).message
    assert (message.thinking, message.content) == ("Hm.", "Yes.")
    engine.reply = '{"city": "Paris"}'
    assert json.loads(sdk.chat(model="fake", messages=HELLO, format=SCHEMA).message.content) == {"city": "Paris"}


def test_python_asks_about_models(sdk: Any) -> None:
    import ollama

    assert [model.model for model in sdk.list().models] == ["fake"]
    shown = sdk.show("fake")
    assert "tools" in shown.capabilities and shown.modelinfo["general.parameter_count"] == 1_000_000
    [running] = sdk.ps().models
    assert running.model == "fake" and running.expires_at.year > 2100
    assert len(sdk.embed(model="fake", input=["a", "b"]).embeddings) == 2
    assert len(sdk.embeddings(model="fake", prompt="a").embedding) == 12
    for call in (
        lambda: sdk.chat(model="none", messages=HELLO),
        lambda: [*sdk.chat(model="none", messages=HELLO, stream=True)],
        lambda: sdk.pull("fake"),
        lambda: [*sdk.pull("fake", stream=True)],
        lambda: sdk.delete("fake"),
        lambda: sdk.copy("fake", "other"),
        lambda: sdk.create(model="other", from_="fake"),
    ):
        with pytest.raises(ollama.ResponseError) as raised:
            call()
        assert "fake" in raised.value.error or "not supported by this server" in raised.value.error


JAVASCRIPT = """
import { Ollama } from 'ollama'
const sdk = new Ollama({ host: process.env.OLLAMA_HOST })
const messages = [{ role: 'user', content: 'Hi' }]
const found = {}
found.whole = (await sdk.chat({ model: 'fake', messages, options: { temperature: 0, num_ctx: 4096 } })).message.content
found.streamed = ''
const parts = await sdk.chat({ model: 'fake', messages, stream: true })
for await (const part of parts) found.streamed += part.message.content
found.generated = (await sdk.generate({ model: 'fake', prompt: 'Hi', keep_alive: '5m' })).response
found.models = (await sdk.list()).models.map((model) => model.name)
found.running = (await sdk.ps()).models.map((model) => model.name)
found.capabilities = (await sdk.show({ model: 'fake' })).capabilities
found.vectors = (await sdk.embed({ model: 'fake', input: ['a', 'b'] })).embeddings.length
found.version = (await sdk.version()).version
found.refused = await sdk.chat({ model: 'none', messages }).then(() => '', (error) => error.message)
console.log(JSON.stringify(found))
"""


@pytest.mark.skipif(not (PACKAGES / "ollama").is_dir() or not shutil.which("node"), reason="npm ci in tests/agents")
@pytest.mark.programs
def test_javascript_has_its_answers(url: str) -> None:
    command = ["node", "--input-type=module", "-e", JAVASCRIPT]
    environment = {**os.environ, "OLLAMA_HOST": url}
    ran = subprocess.run(
        command, cwd=PACKAGES.parent, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["whole"] == found["streamed"] == found["generated"] == REPLY
    assert found["models"] == found["running"] == ["fake"] and "tools" in found["capabilities"]
    assert found["vectors"] == 2 and found["version"].count(".") == 2 and "'none' is not served" in found["refused"]
