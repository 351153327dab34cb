"""Claude Code from npm before our servers, started as docs/agents.md says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.serving.http import answers
from jaxllm.serving.http.api_error import APIError
from tests.agents.conftest import ScriptedModel, call
from tests.agents.programs import Programs, Run


def claude(programs: Programs, url: str, *arguments: str, seconds: float = 120, **env: str) -> Run:
    env |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"}
    return programs.run("claude", "-p", *arguments, env=env, seconds=seconds)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Why requests to servers of this process were refused: programs may try again with less, and say nothing."""
    errors: list[Exception] = []
    answer = answers.to_api_error

    def noted(error: Exception) -> APIError:
        errors.append(error)
        return answer(error)

    monkeypatch.setattr(answers, "to_api_error", noted)
    return errors


def test_it_reads_a_file_runs_a_command_and_answers(
    programs: Programs, scripted: Callable[[ScriptedModel], str], refused: list[Exception]
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
    assert not refused


def test_it_finds_a_tool_that_it_had_not_loaded(programs: Programs, scripted: Callable[[ScriptedModel], str]) -> None:
    model = ScriptedModel(call("ToolSearch", query="select:TaskStop", max_results=1), "There it is.")
    ran = claude(programs, scripted(model), "Find TaskStop")
    assert (ran.code, ran.out.strip()) == (0, "There it is."), ran
    before, after = model.prompts[0], model.prompts[-1]
    assert "task_id" not in before.partition("<|")[0]
    assert after.startswith(before.removesuffix("<|assistant|>")), "the cached prefix stays"
    assert '"name": "TaskStop"' in after.rpartition("<|tool|>")[2]


def test_a_real_model_at_its_defaults_answers(programs: Programs, real_server: str) -> None:
    """One that knows when to stop by luck: an answer may reach the end that is set for it here."""
    few = ("--tools", "Read", "--disable-slash-commands", "--system-prompt", "Be brief.")  # its context is 8,192 tokens
    env = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "100"}
    ran = claude(programs, real_server, "Say hello", "--output-format", "json", *few, seconds=300, **env)
    said: dict[str, Any] = json.loads(ran.out)
    assert said["api_error_status"] is None and said.get("api_error") in (None, "max_output_tokens"), ran
    assert said["result"] and said["usage"]["output_tokens"] > 0
