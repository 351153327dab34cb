"""Standard streams that are closed, full, or of an encoding that lacks some characters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.mcp.conftest import free_port

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[2]


def shell(redirections: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run `python ARGUMENTS` with a shell's redirections."""
    command = ["bash", "-c", f'exec "$0" "$@" {redirections}', sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, env=os.environ | variables, cwd=ROOT)


@pytest.mark.parametrize(
    ("redirection", "reason"), [(">&-", b"bad file descriptor"), (">/dev/full", b"no space left on device")]
)
@pytest.mark.parametrize("command", ["models", "models --json", "--help", "--version"])
def test_an_output_that_cannot_be_written_is_one_line(redirection: str, reason: bytes, command: str) -> None:
    ended = shell(redirection, "-m", "jaxllm", *command.split())
    assert ended.returncode == 1
    assert ended.stderr == b"jaxllm: error: standard output cannot be written: " + reason + b"\n"


def test_an_error_is_never_written_to_standard_output() -> None:
    ended = shell("2>&-", "-m", "jaxllm", "serve", "--port", "x")
    assert (ended.returncode, ended.stdout) == (2, b"")


def test_a_closed_input_holds_no_prompt() -> None:
    ended = shell("<&-", "-m", "jaxllm", "generate")
    assert (ended.returncode, ended.stderr) == (2, b"jaxllm: error: no prompt: standard input is empty\n")


@pytest.mark.parametrize("command", ["serve --help", "models"])
def test_what_an_encoding_lacks_is_written_as_an_escape(command: str) -> None:
    ended = shell("", "-m", "jaxllm", *command.split(), PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.isascii() and b"\\u20" in ended.stdout


TEXTS = """
import sys
from pathlib import Path
from jaxllm.cli.chat import read_message
from jaxllm.cli.generate import read_prompts
from jaxllm.cli.settings import sampling_params

print(ascii(read_message("", "")[0]), ascii(read_prompts([], Path("-"))))
print(ascii([*read_prompts(sys.argv[1:], None), *sampling_params({"stop": sys.argv[1:]}).stop]))
"""


def test_texts_are_in_utf_8_where_the_locale_knows_ascii_alone() -> None:
    ended = shell("<<< $'ü\\n😀'", "-c", TEXTS, "ü😀", LC_ALL="C", PYTHONUTF8="0")
    assert ended.stdout.decode().splitlines() == [f"{'ü'!a} {['😀']!a}", ascii(["ü😀"] * 2)], ended.stderr


BESIDE = """
import sys
from jaxllm.cli import terminal
from jaxllm.cli.generate import read_prompts

terminal.BEGIN_SECONDS = float(sys.argv[1])
print([len(prompt) for prompt in read_prompts(["hi", "and"], None)])
"""


def test_a_prompt_does_not_wait_for_an_input_that_never_comes() -> None:
    ours, theirs = os.pipe()
    with open(theirs, "wb"), open(ours, "rb") as silent:
        command = [sys.executable, "-c", BESIDE, "0.1"]
        ended = subprocess.run(command, stdin=silent, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[2, 3]\n")
    assert len(ended.stderr.splitlines()) == 1 and "nothing came from standard input in 0.1 seconds" in ended.stderr


@pytest.mark.parametrize("slow", ["sleep 1; seq 100000", "seq 50000; sleep 1; seq 50001 100000"])
def test_an_input_that_comes_slowly_stands_whole_before_the_prompt(slow: str) -> None:
    ended = shell(f"< <({slow})", "-c", BESIDE, "60")
    assert (ended.returncode, ended.stderr) == (0, b"")
    length = len("\n".join(map(str, range(1, 100_001))))
    assert ended.stdout.decode() == f"{[length + len(chr(10) * 2 + prompt) for prompt in ('hi', 'and')]}\n"


SERVER = """
from jaxllm.cli.main import app, run
from jaxllm.config import ServeConfig
from jaxllm.serving.http.listening import bind
from tests.serving.fake_engine import FakeEngine, serve_engine

def fake(port: int):
    serve_engine(ServeConfig(model="fake", port=port), FakeEngine(), bind("127.0.0.1", port))

app.command(fake)
run()
"""


@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_server_answers_without_standard_streams(redirection: str) -> None:
    port = free_port()
    command = ["bash", "-c", f'exec "$0" "$@" {redirection}', sys.executable, "-c", SERVER, "fake", str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        assert answer(f"http://127.0.0.1:{port}/health") == {"status": "ok"}
    finally:
        process.terminate()
    assert process.wait(30) == 0


def answer(url: str) -> dict[str, str]:
    """What a server that is starting answers in the end."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return httpx.get(url, timeout=5).raise_for_status().json()
        except httpx.HTTPError:  # nobody listens yet, or the model is still loading
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
