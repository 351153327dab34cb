"""launch, which starts agents against a running server, and stop, which ends a model of one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.serving import running
from jaxllm.serving.running import RunningServer
from tests.serving.on_demand import Serve, Starts, serve, starts

__all__ = ["serve", "starts"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say which server runs on this machine, as (address, models)."""

    def say(*servers: tuple[str, list[str]]) -> None:
        found = [RunningServer(number, names, url, 1) for number, (url, names) in enumerate(servers, 100)]
        monkeypatch.setattr(running, "running_servers", lambda: found)

    return say


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The programs, all installed, that this process became: their command lines and variables."""
    for name in ("claude", "codex", "opencode"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: found.append((command, environment)))
    return found


def test_claude_is_told_of_the_server_that_runs(cli, runs, started: Any, server_url: str) -> None:
    runs((server_url, ["fake"]))
    assert cli("launch", "claude", "--", "--continue", "-p", "hi").code == 0
    [(command, variables)] = started
    assert command == ["claude", "--continue", "-p", "hi"]
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_AUTH_TOKEN"]) == (server_url, "none")
    assert variables["ANTHROPIC_MODEL"] == variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "fake"
    assert variables["PATH"] == os.environ["PATH"]


def test_codex_and_opencode_are_told_in_their_own_words(cli, started: Any, server_url: str) -> None:
    for program in ("codex", "opencode"):
        cli("launch", program, "--url", server_url + "/v1", "--api-key", "secret", "--model", "fake")
    (codex, of_codex), (opencode, of_opencode) = started
    assert set(codex[1::2]) == {"-c"} and of_codex["JAXLLM_API_KEY"] == "secret"
    assert f'model_providers.jaxllm.base_url="{server_url}/v1"' in codex and 'model="fake"' in codex
    assert "model_context_window=256" in codex and opencode == ["opencode"]
    config = json.loads(of_opencode["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "jaxllm/fake"
    assert config["provider"]["jaxllm"]["options"] == {"baseURL": f"{server_url}/v1", "apiKey": "secret"}
    assert config["provider"]["jaxllm"]["models"]["fake"]["limit"] == {"context": 256, "output": 64}


def test_what_is_missing_is_said_in_one_line(cli, runs, started: Any, server_url: str, monkeypatch) -> None:
    runs()
    assert "no server of yours runs on this machine: start `jaxllm serve MODEL`" in cli("launch", "claude").err
    runs((server_url, ["fake"]))
    assert "on this machine that has other" in cli("launch", "claude", "--model", "other").err
    assert "--model is 'other'; the server at" in cli("launch", "codex", "--url", server_url, "--model", "other").err
    monkeypatch.setenv("PATH", "")
    assert "claude is not installed; `npm install -g @anthropic-ai/claude-code`" in cli("launch", "claude").err
    assert "'emacs': it must be 'claude', 'codex' or 'opencode'" in cli("launch", "emacs").err
    assert not started


def test_stop_unloads_one_of_several_models(cli, runs, serve: Serve, starts: Starts) -> None:
    server = serve("a", "b", max_loaded=2)
    server.ask("a")
    runs((server.url, ["a", "b"]))
    assert cli("stop", "a").out == "unloaded a\n" and starts.events[-1] == "stopped a"
    assert "no servers of yours on this machine have 'c'; see" in cli("stop", "c").err


def test_stop_ends_a_server_of_one_model(cli, runs, server_url: str, monkeypatch) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *told: ended.append(told))
    runs(("http://127.0.0.1:9", ["fake"]), (server_url, ["fake"]))
    result = cli("stop", "fake")
    assert result.code == 2 and f"choose one with --url, http://127.0.0.1:9, {server_url}" in result.err
    assert cli("stop", "fake", "--url", server_url).out == "the server of fake ends (process 101)\n"
    assert ended == [(101, signal.SIGTERM)]
