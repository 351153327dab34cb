"""opencode from npm before our servers, with the provider of docs/agents.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.agents.conftest import REAL, ScriptedModel, call
from tests.agents.programs import Programs, Run


def opencode(programs: Programs, url: str, model: str, question: str, seconds: float = 120, **settings: Any) -> Run:
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1"}, "models": {model: {}}}
    written = {"provider": {"jaxllm": provider}, "model": f"jaxllm/{model}"} | settings
    (programs.work / "opencode.json").write_text(json.dumps(written))
    return programs.run("opencode", "run", question, seconds=seconds)


def test_it_reads_a_file_runs_a_command_and_answers(programs: Programs, scripted: Callable[..., str]) -> None:
    note = programs.work / "note.txt"
    note.write_text("The word is kingfisher.\n")
    model = ScriptedModel(
        call("read", filePath=str(note)),
        call("bash", command="echo kingfisher > word.txt", description="Write the word"),
        "word.txt has the word.",
    )
    ran = opencode(programs, scripted(model), "fake", "Write the word of note.txt")
    assert ran.code == 0 and ran.out.strip().endswith("word.txt has the word."), ran
    assert (programs.work / "word.txt").read_text() == "kingfisher\n"
    assert "The word is kingfisher." in model.prompts[-1]


def test_a_real_model_at_its_defaults_answers(programs: Programs, real_server: str) -> None:
    """opencode asks for 32,000 tokens, four times its context."""
    few = {"tools": {"*": False, "read": True}, "agent": {"build": {"prompt": "Be brief."}}}
    ran = opencode(programs, real_server, REAL, "Say hello", seconds=500, **few)
    assert ran.code == 0 and ran.out.strip(), ran
