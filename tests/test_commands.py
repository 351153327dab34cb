"""Every command that the documentation and the examples show is one that our own programs take."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fastapi.testclient import TestClient

import jaxllm.cli.settings
from jaxllm.cli.main import app, in_our_words
from jaxllm.config import ModelConfig, ServeConfig
from jaxllm.serving.served_model import LoadableModel
from tests.serving.fake_engine import ByteTokenizer, FakeEngine, app_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OURS = ("jaxllm", "python", "curl", "make", "pip")
OTHERS = {
    "git", "cd", ".", "npm", "python3", "gh", "lm_eval", "docker", "helm", "systemctl", "sudo", "source",
    "openssl", "go", "mpirun", "export", ".venv/bin/pytest", ".venv/bin/twine", "llama/bin/pip", "ray", "serve",
    "sglang-router", "vllm-router", "claude",
}  # fmt: skip
"""Programs that are not ours to check."""


class Command(NamedTuple):
    where: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0]


def commands_of(text: str) -> Iterator[tuple[str, ...]]:
    """The commands of a piece of shell, without comments and assignments."""
    pending = ""
    for line in text.splitlines():
        pending += line.removesuffix("\\") + "\n"
        if line.endswith("\\"):
            pending = pending.replace("\n", " ")
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on in the next line
            continue
        pending = ""
        command: list[str] = []
        if redirected := next((word for word in words if word in (">", ">>")), None):
            words = words[: words.index(redirected)]
        for word in [*words, "&&"]:
            if word == "&&":
                if command:
                    yield tuple(command)
                command = []
            elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
                command.append(word)
    assert not pending.strip(), f"an open quotation: {pending}"


def documented() -> Iterator[Command]:
    for path in DOCUMENTS:
        for language, text in FENCED.findall(path.read_text(encoding="utf-8")):
            if language == "sh":
                yield from (Command(path.name, words) for words in commands_of(text))
            for line in re.findall(r"^ExecStart=\S*/(jaxllm .*)$", text, re.MULTILINE):
                yield from (Command(path.name, words) for words in commands_of(line))
            for words in re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE):  # of an image whose program is jaxllm
                yield Command(path.name, ("jaxllm", *json.loads(words)))
        for text in re.findall(r"`(jaxllm [^`]+)`", path.read_text(encoding="utf-8")):
            if "…" not in text and len(text.split()) > 2:  # not only the name of a command
                yield from (Command(path.name, words) for words in commands_of(text))


def in_headers() -> Iterator[Command]:
    """Of examples and configs: whole lines, and what stands in backticks."""
    for path in sorted((ROOT / "examples").rglob("*.py")):
        header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines = [line for line in header.splitlines() if line.split(" ")[0] in OURS]
        for text in [*lines, *re.findall(r"`([^`]+)`", header)]:
            text = re.sub(r"\[[^ ]*\]", "", text)  # what may be left out
            if text.split(" ")[0] in OURS and not text.endswith("\\"):
                yield from (Command(path.name, words) for words in commands_of(text))
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        for line in re.findall(r"^# +(jaxllm .*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield from (Command(path.name, words) for words in commands_of(line))


COMMANDS = sorted({*documented(), *in_headers()})


MONITOR = "http://127.0.0.1:9090"
"""Another port of the server, which tests of its own ask."""


def of(*programs: str) -> Any:
    found = [c for c in COMMANDS if c.program in programs and not any(MONITOR in word for word in c.words)]
    return pytest.mark.parametrize(
        "command", found, ids=lambda command: f"{command.where}: {' '.join(command.words)[:80]}"
    )


class Settled(BaseException):
    """A command has read all its settings, and would now begin."""


def test_no_command_goes_unseen() -> None:
    assert {command.program for command in COMMANDS} <= {*OURS, *OTHERS}
    assert len(COMMANDS) > 50
    for path in DOCUMENTS:
        for language, text in FENCED.findall(path.read_text(encoding="utf-8")):
            assert language or not re.search(rf"^({'|'.join(OURS)}) ", text, re.MULTILINE), f"{path.name}: mark as sh"


@of("jaxllm")
def test_jaxllm_takes_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags and the values of the settings; nothing is started."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "400")  # a command keeps the width that it had at first, which tests of help count on
    read = jaxllm.cli.settings.read_settings

    def settle(*args: Any) -> None:
        read(*args)
        raise Settled

    monkeypatch.setattr(jaxllm.cli.settings, "read_settings", settle)
    words, meant, _ = app.parse_commands(command.words[1:])
    arguments = in_our_words(command.words[1 + len(words) :], meant)
    run, bound, _ = app.parse_args([*words, *arguments], exit_on_error=False, print_error=False)
    if hasattr(run, "__signature__"):
        with pytest.raises(Settled):
            run(*bound.args, **bound.kwargs)


@of("python")
def test_python_finds_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file, or its module; where it has a parser, that takes the arguments."""
    script, *arguments = command.words[1:]
    if script == "-m":
        assert arguments[0] == "build" or importlib.util.find_spec(arguments[0])
        return
    source = (ROOT / script).read_text(encoding="utf-8")
    if "arguments(" in source:
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        spec = importlib.util.spec_from_file_location("calibration", ROOT / "examples" / "calibration.py")
        assert spec is not None and spec.loader is not None
        calibration = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(calibration)
        assert calibration.arguments("").parse_args(arguments)


@of("curl")
def test_the_server_answers_it(command: Command, tmp_path: Path) -> None:
    _, url, *options = command.words
    flags = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(": ", 1) for flag, value in flags if flag == "-H")
    body = next((value for flag, value in flags if flag == "-d"), None)
    assert {flag for flag, _ in flags} <= {"-H", "-d"}
    config = ServeConfig(model="fake", data_dir=tmp_path, api_key="secret" if "Authorization" in headers else None)
    other = LoadableModel(
        ModelConfig(model="gemma3"), lambda config, given_up, room: FakeEngine()
    )  # of several-models.md
    engine = FakeEngine()
    engine.tokenizer, engine.info.max_model_len = ByteTokenizer(), 1024
    engine.tokenizer.backend.add_tokens(["yes", "no"])  # of embeddings.md
    with TestClient(app_of(config, engine, unloaded=[other]), base_url="http://localhost") as client:
        path = url.removeprefix("http://127.0.0.1:8000")
        answer = client.request("GET" if body is None else "POST", path, headers=headers, content=body)
    if other.served is not None:
        other.served.engine.shutdown()
    if answer.status_code != 200:  # tools, their runs and adapters are tested where there are some
        assert ("mcp" in command.where or command.where == "lora.md") and answer.json()["error"][
            "code"
        ] != "not_found", answer.text


@of("make")
def test_make_has_the_target(command: Command) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(word for word in command.words[1:] if "=" not in word) in targets


@of("pip")
def test_pip_can_install_it(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"^(?:\.|jaxllm)\[(.*)\]$", "\n".join(command.words), re.MULTILINE)
    assert command.words[1] == "install" and {name for names in asked for name in names.split(",")} <= set(extras)
