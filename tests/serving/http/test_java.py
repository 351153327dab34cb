"""JDK's own HTTP client, which LangChain4j and Spring AI stand on."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.fake_engine import REPLY, FakeEngine

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(not (shutil.which("java") and shutil.which("javac")), reason="needs a JDK, 11 or newer"),
]


def test_all_that_it_sends_is_answered(listen: Callable[..., str], engine: FakeEngine) -> None:
    command = ["java", str(Path(__file__).with_name("Client.java")), listen(engine)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    answers = {name: (int(status), body) for name, status, body in (line.split("\t") for line in said.splitlines())}
    assert {name: status for name, (status, _) in answers.items()} == dict.fromkeys(
        ["known length", "chunks", "stream", "large", "get", "expects"], 200
    )
    for name in ("known length", "chunks", "large", "expects"):
        assert json.loads(answers[name][1])["choices"][0]["message"]["content"] == REPLY
    assert answers["stream"][1].rstrip().endswith("data: [DONE]")
