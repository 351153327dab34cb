from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console

from jaxllm.cli.chat import Chat, ChatHistory
from jaxllm.cli.markdown import MarkdownStream, finished_blocks
from jaxllm.config import EngineConfig
from jaxllm.engine.start.tokenizer import answers_chats
from jaxllm.errors import EngineDeadError, InvalidRequestError
from tests.cli.conftest import stub_module
from tests.weights.models import real_model


class Scripted:
    """Answers from a list; an exception in it is raised, and 'STOP' is where the user presses Ctrl-C."""

    name = "scripted"

    def __init__(self, *answers: list[str | Exception]):
        self.answers = list(answers)
        self.seen: list[ChatHistory] = []

    async def answer(self, messages: ChatHistory) -> AsyncIterator[str]:
        self.seen.append([dict(message) for message in messages])
        for piece in self.answers.pop(0):
            if isinstance(piece, Exception):
                raise piece
            if piece == "STOP":
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(5)
            yield piece


def talk(backend: Scripted, lines: list[str], monkeypatch: pytest.MonkeyPatch, system: str | None = None) -> Chat:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    chat = Chat(backend, system)
    with asyncio.Runner() as runner:
        chat.loop(runner)
    return chat


def test_the_conversation_goes_on(monkeypatch, capsys) -> None:
    backend = Scripted(["Hel", "lo"], ["Bye"])
    talk(backend, ["hi", "", "and now?"], monkeypatch)
    assert backend.seen[1] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "and now?"},
    ]
    assert capsys.readouterr().out == "Hello\nBye\n"


def test_clear_forgets_and_system_starts_over(monkeypatch) -> None:
    backend = Scripted(["1"], ["2"], ["3"], ["4"])
    talk(backend, ["a", "/clear", "b", "/system Be brief", "c", "/system", "d"], monkeypatch, system="Be kind")
    kind, brief = {"role": "system", "content": "Be kind"}, {"role": "system", "content": "Be brief"}
    assert backend.seen == [
        [kind, {"role": "user", "content": "a"}],
        [kind, {"role": "user", "content": "b"}],
        [brief, {"role": "user", "content": "c"}],
        [{"role": "user", "content": "d"}],
    ]


def test_exit_leaves_at_once(monkeypatch) -> None:
    backend = Scripted(["1"])
    talk(backend, ["/exit", "never said"], monkeypatch)
    assert not backend.seen


def test_help_and_unknown_commands_say_what_there_is(monkeypatch, capsys) -> None:
    talk(Scripted(), ["/help", "/hlp"], monkeypatch)
    out = capsys.readouterr().out
    assert "/clear" in out and "/system" in out and "no command /hlp; /help lists them" in out


@pytest.fixture
def listens_to_ctrl_c():
    """Python's own handler, also where the tests were started in the background and SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_ctrl_c_stops_the_answer_and_keeps_what_there_was(monkeypatch) -> None:
    backend = Scripted(["Once upon", "STOP", "never"], ["ok"])
    chat = talk(backend, ["tell", "go on"], monkeypatch)
    assert [message["content"] for message in chat.messages] == ["tell", "Once upon", "go on", "ok"]


def test_a_refused_request_leaves_the_chat_alive_and_the_question_out(monkeypatch, capsys) -> None:
    backend = Scripted([InvalidRequestError("the prompt has 99 tokens; the context holds 64")], ["ok"])
    chat = talk(backend, ["too long", "short"], monkeypatch)
    assert "the context holds 64" in capsys.readouterr().out
    assert [message["content"] for message in chat.messages] == ["short", "ok"]


def test_a_dead_engine_ends_the_chat(monkeypatch) -> None:
    with pytest.raises(EngineDeadError):
        talk(Scripted([EngineDeadError("the engine has stopped")]), ["hi"], monkeypatch)


def test_chat_drives_the_engine(cli, echo, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    result = cli("chat", "echo-model", "--system", "be brief", "--temperature", "0")
    assert result.out == "<SYSTEM> BE BRIEF <USER> HI <ASSISTANT> \n"
    engine = echo.instances[0]
    assert (engine.config.model, engine.params[0].temperature, engine.is_shut_down) == ("echo-model", 0, True)


def test_chat_refuses_a_model_without_a_template(cli, echo) -> None:
    echo.chat_template = None
    result = cli("chat", "base")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "base has no chat template" in result.err and "`jaxllm generate base TEXT`" in result.err
    assert not echo.instances, "refused before anything is loaded"


def test_a_real_base_model_is_refused_before_it_is_loaded(cli, monkeypatch) -> None:
    stub_module(monkeypatch, "jaxllm.engine.front.async_llm", AsyncLLM=lambda config: pytest.fail("loaded"))
    gemma = str(real_model("gemma3-270m"))
    assert "has no chat template" in cli("chat", gemma).err
    assert answers_chats(EngineConfig(model=str(real_model("smollm2-135m"))))


def test_chat_drives_a_server(cli, server_url: str, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nagain\n"))
    result = cli("chat", "--url", server_url + "/v1/", "--max-tokens", "11")
    assert (result.code, result.out) == (0, "The capital\nThe capital\n")


def test_chat_says_what_the_server_refuses(cli, server_url: str, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    result = cli("chat", "no-such-model", "--url", server_url)
    assert result.code == 0 and "the server answered 404" in result.out and "no-such-model" in result.out


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("", ""),
        ("one", ""),
        ("one\n\n", "one\n\n"),
        ("one\n\ntwo\n\nthr", "one\n\ntwo\n\n"),
        ("```py\na = 1\n\nb = 2", ""),
        ("text\n\n```py\na = 1\n\nb", "text\n\n"),
        ("```py\na\n\nb\n```\n\nafter", "```py\na\n\nb\n```\n\n"),
    ],
)
def test_only_blocks_that_cannot_change_are_finished(text: str, finished: str) -> None:
    assert text[: finished_blocks(text)] == finished


def test_a_terminal_ends_with_every_block_rendered_once() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=20, legacy_windows=False)
    with MarkdownStream(console) as output:
        for piece in ["# Tit", "le\n", "\nSome **bo", "ld** text\n\n", "- item\n"]:
            output.write(piece)
    assert visible(screen.getvalue()) == ["Title", "Some bold text", "• item"]


def visible(stream: str) -> list[str]:
    """The lines a terminal shows after `stream`: cursor-up and erase-line obeyed, styles and frames dropped."""
    import re

    lines: list[str] = [""]
    row = 0
    for part in re.split(r"(\x1b\[\??[\d;]*[A-Za-z]|\n|\r)", stream):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part.endswith("A") and part.startswith("\x1b["):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    shown: list[Any] = [re.sub(r"[┏┓┗┛━┃]", "", line).strip() for line in lines]
    return [line for line in shown if line]
