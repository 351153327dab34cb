from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console

from jaxllm.cli import chat as chat_command
from jaxllm.cli.chat import Chat, ChatHistory, Shown, completed
from jaxllm.cli.terminal import MarkdownStream, finished_blocks
from jaxllm.config import EngineConfig
from jaxllm.engine.start.tokenizer import answers_chats
from jaxllm.errors import EngineDeadError, InvalidRequestError
from tests.cli.conftest import stub_module
from tests.serving.fake_engine import REPLY, TEMPLATE, ByteTokenizer, FakeEngine
from tests.weights.models import real_model


class Scripted:
    """Answers from a list; an exception in it is raised, and 'STOP' is where the user presses Ctrl-C."""

    name = "scripted"

    def __init__(self, *answers: list[str | Shown | Exception]):
        self.answers = list(answers)
        self.seen: list[ChatHistory] = []
        self.sampling: dict[str, Any] = {}
        self.num_tokens = 0

    async def answer(self, messages: ChatHistory) -> AsyncIterator[Shown]:
        self.seen.append([dict(message) for message in messages])
        for piece in self.answers.pop(0):
            if isinstance(piece, Exception):
                raise piece
            if piece == "STOP":
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(5)
            yield piece if isinstance(piece, Shown) else Shown(piece)


def talk(backend: Scripted, lines: list[str], monkeypatch: pytest.MonkeyPatch, system: str | None = None) -> Chat:
    monkeypatch.setenv("COLUMNS", "400")  # so that errors do not wrap
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


@pytest.mark.parametrize("command", ["/exit", "/bye", "/quit"])
def test_exit_leaves_at_once(monkeypatch, command: str) -> None:
    backend = Scripted(["1"])
    talk(backend, [command, "never said"], monkeypatch)
    assert not backend.seen


def test_tab_completes_commands(monkeypatch) -> None:
    assert [completed("/s", number) for number in range(4)] == ["/system ", "/set ", "/save ", None]
    assert completed("/by", 0) == "/bye " and completed("hello", 0) is completed("", 0) is None


def test_what_has_been_done_is_said(monkeypatch, capsys, tmp_path) -> None:
    talk(Scripted(["1"]), ["hi", f"/save {tmp_path / 'x.json'}", "/clear", "/?"], monkeypatch)
    out = capsys.readouterr().out
    assert f"2 messages are in {tmp_path / 'x.json'}\nthe next message begins a new conversation\n" in out
    assert "/regenerate" in out


def test_help_and_unknown_commands_say_what_there_is(monkeypatch, capsys) -> None:
    talk(Scripted(), ["/help", "/hlp"], monkeypatch)
    out = capsys.readouterr().out
    assert "/clear" in out and "/system" in out and "no command /hlp; /help lists them" in out


def test_a_text_of_several_lines_stands_between_marks(monkeypatch) -> None:
    backend = Scripted(["1"], ["2"], ["3"])
    talk(backend, ['"""one', "  two", '/help"""', '"""short"""', '"""', "/clear", "", "end"], monkeypatch)
    said = [history[-1]["content"] for history in backend.seen]
    assert said == ["one\n  two\n/help", "short", "/clear\n\nend"]


def test_settings_are_changed_shown_and_taken_back(monkeypatch, capsys) -> None:
    backend = Scripted(["1"])
    lines = [
        "/set temperature 0",
        '/set stop ["x"]',
        "/set",
        "/set temperature",
        "/set temperature -1",
        "/set n 2",
        "hi",
    ]
    talk(backend, lines, monkeypatch)
    out = capsys.readouterr().out
    assert 'temperature 0, stop ["x"]' in out
    assert "temperature is -1; it must be 0 or more" in out and "no setting n; there are" in out
    assert backend.sampling == {"stop": ["x"]}


@pytest.fixture
def engine(monkeypatch) -> FakeEngine:
    """In AsyncLLM's place."""
    engine = FakeEngine()
    stub_module(monkeypatch, "jaxllm.engine.doors.async_llm", AsyncLLM=lambda config: engine)
    stub_module(monkeypatch, "jaxllm.engine.start.tokenizer", answers_chats=lambda config: True)
    return engine


class Typed(io.StringIO):
    """What somebody types in a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typing(monkeypatch) -> Any:
    monkeypatch.setattr(chat_command, "prepare_terminal", lambda: None)
    return lambda text: monkeypatch.setattr("sys.stdin", Typed(text))


def test_settings_reach_the_engine(cli, engine, typing) -> None:
    typing("hi\n/set max_tokens 1\nhi\n")
    cli("chat", "echo-model", "--temperature", "0")
    assert [(params.temperature, params.max_tokens) for _, params, _ in engine.seen] == [(0, 512), (0, 1)]


def test_another_answer_to_the_same(monkeypatch, capsys) -> None:
    backend = Scripted(["1"], ["2"], [InvalidRequestError("no")])
    chat = talk(backend, ["/regenerate", "hi", "/regenerate", "/regenerate"], monkeypatch)
    assert backend.seen == [[{"role": "user", "content": "hi"}]] * 3
    assert [message["content"] for message in chat.messages] == ["hi", "2"]
    assert "nothing was said yet" in capsys.readouterr().out


def test_a_chat_is_saved_and_goes_on_later(monkeypatch, tmp_path) -> None:
    file = tmp_path / "chat.json"
    talk(Scripted(["1"]), ["hi", "/set seed 7", f"/save {file}"], monkeypatch, system="Be brief")
    backend = Scripted(["2"])
    chat = talk(backend, [f"/load {file}", "more"], monkeypatch)
    assert [message["content"] for message in backend.seen[0]] == ["Be brief", "hi", "1", "more"]
    assert (chat.system, backend.sampling) == ("Be brief", {"seed": 7})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read, as it is no JSON"),
        ("[]", "the whole is []; it must be an object"),
        ('{"system": null, "messages": [], "setings": {}}', "settings is {"),
        ('{"system": null, "messages": [], "settings": {}, "x": 1}', "x is 1; there is no such key"),
        ('{"system": 1, "messages": [], "settings": {}}', "system is 1; it must be a string"),
        (
            '{"system": null, "messages": [{"role": "x", "content": "a"}], "settings": {}}',
            "messages.0.role is 'x'; it must be 'user' or 'assistant'",
        ),
        (
            '{"system": null, "messages": [{"role": "user", "content": 3}], "settings": {}}',
            "content",
        ),
        ('{"system": null, "messages": [], "settings": {"temperature": -1}}', "temperature is -1"),
        ('{"system": null, "messages": [], "settings": {"x": 1}}', "no setting x"),
    ],
)
def test_files_that_are_no_chats(monkeypatch, capsys, tmp_path, content: str, problem: str) -> None:
    (tmp_path / "x.json").write_text(content)
    chat = talk(
        Scripted(), [f"/load {tmp_path / 'x.json'}", "/load", f"/save {tmp_path}/none/x", "/load /none"], monkeypatch
    )
    out = capsys.readouterr().out.replace("\n", " ")
    assert problem in out and "/load needs a file" in out and "cannot be written" in out
    assert "/none cannot be read: no such file or directory" in out
    assert chat.messages == []


def test_tokens_a_second_are_told_in_a_terminal(monkeypatch) -> None:
    backend, screen = Scripted(["Hello"]), io.StringIO()
    backend.num_tokens = 12
    chat = Chat(backend)
    chat.console = Console(file=screen, force_terminal=True, width=60, highlight=False)
    with asyncio.Runner() as runner:
        chat.turn(runner, "hi")
    assert re.search(r"12 tokens, [\d.]+ tokens/s", screen.getvalue())


PASTING = """
from jaxllm.cli import chat
chat.prepare_terminal()
print(repr(chat.read_message("> ", ". ")), flush=True)
"""


def test_a_paste_of_several_lines_is_one_message(tmp_path) -> None:
    """In a terminal of its own, which marks what is pasted as terminals do."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", PASTING], stdin=theirs, stdout=theirs, env=environment) as process:
        os.close(theirs)
        screen = b""
        while b"> " not in screen:
            screen += os.read(ours, 1024)
        os.write(ours, b"\x1b[200~one\ntwo\x1b[201~\r")
        while b"False)" not in screen and b"True)" not in screen:
            screen += os.read(ours, 1024)
        assert process.wait(60) == 0
    os.close(ours)
    assert rb"('one\ntwo', False)" in screen


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


@pytest.mark.parametrize("command", ["chat", "run"])
def test_a_prompt_is_answered_once(cli, engine, monkeypatch, command: str) -> None:
    asked = (command, "fake-model", "Sum", "up", "--system", "be brief", "--temp", "0")
    assert cli(*asked).out == f"{REPLY}\n"
    ((ids, params, _),) = engine.seen
    assert engine.tokenizer.decode(ids) == "[system]be brief[user]Sum up[assistant]" and params.temperature == 0
    assert engine.is_dead


@pytest.mark.parametrize(("words", "question"), [([], "one\ntwo"), (["Sum up"], "one\ntwo\n\nSum up")])
def test_what_is_piped_is_one_question(cli, engine, monkeypatch, words: list[str], question: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert cli("chat", "fake-model", *words).out == f"{REPLY}\n"
    assert [engine.tokenizer.decode(ids) for ids, _, _ in engine.seen] == [f"[user]{question}[assistant]"]


def test_nothing_piped_is_no_question(cli, engine) -> None:
    result = cli("chat", "fake-model")
    assert (result.code, len(result.err.splitlines())) == (2, 1) and "standard input is empty" in result.err


def test_reasoning_is_no_part_of_the_answer(cli, engine, typing) -> None:
    engine.tokenizer = ByteTokenizer(TEMPLATE + "<think>\n{# </think> #}")
    engine.reply = "Hm.</think>\n\nYes."
    typing("hi\nand?\n")
    assert cli("chat", "fake-model").out.endswith("> Yes.\n> Yes.\n> \n")
    assert engine.tokenizer.decode(engine.seen[1][0]) == "[user]hi[assistant]Yes.[user]and?[assistant]\n"


def test_a_terminal_shows_reasoning_before_the_answer() -> None:
    backend = Scripted([Shown("Let me", True), Shown(" see.\nSo it", True), Shown(" is.", True), "**Yes", "**."])
    screen = io.StringIO()
    chat = Chat(backend)
    chat.console = Console(file=screen, force_terminal=True, width=60, height=20, highlight=False, legacy_windows=False)
    with asyncio.Runner() as runner:
        chat.turn(runner, "hi")
    assert visible(screen.getvalue()) == ["Let me see.", "So it is.", "Yes."]
    assert chat.messages[-1]["content"] == "**Yes**."


def test_chat_refuses_a_model_without_a_template(cli, echo) -> None:
    echo.chat_template = None
    result = cli("chat", "base", "hi")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "base has no chat template" in result.err and "`jaxllm generate base TEXT`" in result.err
    assert not echo.instances, "refused before anything is loaded"


def test_a_real_base_model_is_refused_before_it_is_loaded(cli, monkeypatch) -> None:
    stub_module(monkeypatch, "jaxllm.engine.doors.async_llm", AsyncLLM=lambda config: pytest.fail("loaded"))
    gemma = str(real_model("gemma3-270m"))
    assert "has no chat template" in cli("chat", gemma, "hi").err
    assert answers_chats(EngineConfig(model=str(real_model("smollm2-135m"))))


def test_chat_drives_a_server(cli, server_url: str, typing) -> None:
    typing("hi\nagain\n")
    result = cli("chat", "--url", server_url + "/v1/", "--max-tokens", "11")
    assert result.code == 0 and result.out.endswith("> The capital\n> The capital\n> \n")


def test_chat_says_what_the_server_refuses(cli, server_url: str, typing) -> None:
    result = cli("chat", "no-such-model", "hi", "--url", server_url)
    assert result.code == 2 and "the server answered 404" in result.err and "no-such-model" in result.err
    typing("hi\n")
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


def test_images_go_with_one_message(monkeypatch, capsys, tmp_path) -> None:
    file, saved = tmp_path / "a b.jpg", tmp_path / "chat.json"
    file.write_bytes(b"abc")
    image = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,YWJj"}}
    backend = Scripted(["A"], ["B"], ["C"], ["D"])
    lines = [f"/image {file}", "look", "/regenerate", "more", f"/save {saved}", "/clear", f"/load {saved}"]
    chat = talk(backend, [*lines, "/image /none", "end"], monkeypatch)
    asked = [messages[-1]["content"] for messages in backend.seen]
    assert asked == [[image, {"type": "text", "text": "look"}]] * 2 + ["more", "end"]
    assert chat.messages[0]["content"] == asked[0] and "the image /none cannot be read" in capsys.readouterr().out
