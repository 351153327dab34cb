"""Claude Code from npm before our servers, with nothing but the three variables of docs/agents.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.agents.conftest import ScriptedModel, call
from tests.agents.programs import Programs, Run


def claude(programs: Programs, url: str, *arguments: str, seconds: float = 120) -> Run:
    env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"}
    return programs.run("claude", "-p", *arguments, env=env, seconds=seconds)


def test_it_reads_a_file_runs_a_command_and_answers(
    programs: Programs, scripted: Callable[[ScriptedModel], str]
) -> None:
    (programs.work / "note.txt").write_text("The word is kingfisher.\n")
    model = ScriptedModel(
        call("Read", file_path=str(programs.work / "note.txt")),
        call("Bash", command="echo kingfisher > word.txt", description="Write the word"),
        "The word is kingfisher, and word.txt has it.",
    )
    ran = claude(programs, scripted(model), "Write the word of note.txt", "--allowedTools", "Read", "Bash")
    assert (ran.code, ran.out.strip()) == (0, "The word is kingfisher, and word.txt has it."), ran
    assert (programs.work / "word.txt").read_text() == "kingfisher\n"
    assert "The word is kingfisher." in model.prompts[-1]


def test_a_real_model_at_its_defaults_completes_a_turn(programs: Programs, real_server: str) -> None:
    ran = claude(programs, real_server, "Say hello", "--output-format", "json", seconds=500)
    said: dict[str, Any] = json.loads(ran.out)
    assert (ran.code, said["is_error"]) == (0, False), ran
    assert said["result"] and said["usage"]["output_tokens"] > 0
