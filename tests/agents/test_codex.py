"""Codex from npm before our servers, with the provider of docs/agents.md."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.agents.conftest import REAL, ScriptedModel, call
from tests.agents.programs import Programs, Run

PATCH = "*** Begin Patch\n*** Add File: word.txt\n+kingfisher\n*** End Patch\n"
SCRIPTS = {
    "fake": call("exec_command", cmd="echo kingfisher > word.txt"),
    "gpt-5.5": call("apply_patch", input=PATCH),
}
"""How a model writes a file: Codex offers a model that it does not know a shell, others a tool for patches too."""


def codex(programs: Programs, url: str, model: str, question: str, seconds: float = 120, **more: str) -> Run:
    provider = f'{{name="jaxllm", base_url="{url}/v1", wire_api="responses"}}'
    settings = {"model": f'"{model}"', "model_provider": '"jaxllm"', "model_providers.jaxllm": provider} | more
    asked = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *asked)
    return programs.run("codex", "exec", *options, question, seconds=seconds)


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_reads_a_file_writes_another_and_answers(
    programs: Programs, scripted: Callable[..., str], name: str
) -> None:
    (programs.work / "note.txt").write_text("The word is kingfisher.\n")
    model = ScriptedModel(call("exec_command", cmd="cat note.txt"), SCRIPTS[name], "word.txt has the word.")
    ran = codex(programs, scripted(model, served_model_name="fake,gpt-5.5"), name, "Write the word of note.txt")
    assert (ran.code, ran.out.strip()) == (0, "word.txt has the word."), ran
    assert (programs.work / "word.txt").read_text() == "kingfisher\n"
    assert "The word is kingfisher." in model.prompts[-1]


def test_tools_of_a_namespace_are_called(programs: Programs, scripted: Callable[..., str]) -> None:
    model = ScriptedModel(call("multi_agent_v1__close_agent", target="nobody"), "There was none.")
    ran = codex(programs, scripted(model), "fake", "Close the agent")
    assert (ran.code, ran.out.strip()) == (0, "There was none."), ran
    assert "invalid agent id nobody" in model.prompts[-1]


def test_a_real_model_at_its_defaults_answers(programs: Programs, real_server: str) -> None:
    """Or fills its context: at its own temperature so small a model does not always come to an end."""
    (programs.work / "brief.md").write_text("Be brief.")
    few = {"model_instructions_file": '"brief.md"', "features.multi_agent": "false", "features.goals": "false"}
    ran = codex(programs, real_server, REAL, "Say hello", seconds=500, **few)  # its context is 8,192 tokens
    filled = "ERROR: Incomplete response returned, reason: max_output_tokens" in ran.err
    assert filled or (ran.code == 0 and ran.out.strip()), ran
