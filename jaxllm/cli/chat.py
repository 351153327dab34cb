"""`jaxllm chat`: talk to a model in the terminal, in this process or on a server."""

from __future__ import annotations

import asyncio
import base64
import json
import mimetypes
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from cyclopts import Parameter
from pydantic import BaseModel, ValidationError

from jaxllm.cli.settings import sampling_flags, sampling_params, takes_settings
from jaxllm.cli.terminal import as_typed, piped_text, put_together
from jaxllm.config import CACHE_DIR, EngineConfig
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError, JaxLLMError, one_line, reason
from jaxllm.folders import in_home, unwritable
from jaxllm.wording import shown, wrong_setting

ChatHistory = list[dict[str, Any]]

HELP = """\
/system TEXT     set the system prompt (nothing: remove it) and start over
/set NAME VALUE  change how answers are sampled, as in /set temperature 0 (no value: back to the default; no name: show)
/image FILE      show the model an image with the next message
/regenerate      another answer to the last message
/save FILE       write the conversation and its settings into a file
/load FILE       go on with a conversation from a file
/clear           forget the conversation
/help            this, as /? does
/exit            leave, as /bye, /quit and Ctrl-D do; Ctrl-C stops an answer
A text of several lines is pasted, or written between two \"\"\"."""

LEAVE = ("/exit", "/bye", "/quit")
COMMANDS = [*(line.split()[0] for line in HELP.splitlines() if line.startswith("/")), *LEAVE[1:]]


class Shown(NamedTuple):
    """A piece of an answer's text, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class Backend(Protocol):
    """Where answers come from."""

    name: str
    sampling: dict[str, Any]
    """The settings that were made."""
    num_tokens: int
    """Of the last answer, or of what there is of it."""

    def answer(self, messages: ChatHistory) -> AsyncIterator[Shown]:
        """Pieces of the next answer; closing the iterator stops it."""


@takes_settings(EngineConfig, sampling=True)
def chat(
    config: EngineConfig,
    sampling: dict[str, Any],
    prompt: Annotated[list[str] | None, Parameter(negative=())] = None,
    *,
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="JAXLLM_API_KEY")] = None,
    system: str | None = None,
    image: Annotated[list[Path] | None, Parameter(negative=())] = None,
) -> None:
    """Chat with a model, or have it answer once: `jaxllm chat MODEL "PROMPT"`. Type /help inside for the commands.

    A text on standard input is one question, or stands before the PROMPT: `cat notes.txt | jaxllm chat MODEL "Sum up"`.

    Args:
        prompt: Answer this and leave.
        url: Talk to this running server (http://127.0.0.1:8000) instead of starting an engine.
        api_key: The key that the server asks for.
        system: System prompt.
        image: A file with an image, which goes with the first message; it may be given several times.
    """
    if sampling.get("n", 1) != 1:
        raise ConfigError(f"--n is {sampling['n']}: chat shows one answer; it must be 1")
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling:
            raise ConfigError(f"--{name.replace('_', '-')}: chat shows text only; use generate --json")
    sampling_params(sampling)  # refuse a bad value before anything starts
    images = [image_part(file) for file in image or ()]
    asked = " ".join(map(as_typed, prompt or ())).strip()
    question = put_together(piped_text(beside_prompt=bool(asked)), asked)
    if not question and not sys.stdin.isatty():
        raise ConfigError("there is nothing to answer: standard input is empty, and no PROMPT is given")
    with asyncio.Runner() as runner:  # one loop for the whole chat; Ctrl-C cancels only the answer that runs on it
        backend, close = runner.run(_open(config, sampling, url, api_key))
        try:
            chat = Chat(backend, system, images)
            if question:
                chat.answer(runner, question)
            else:
                chat.loop(runner)
        finally:
            runner.run(close.aclose())


async def _open(
    config: EngineConfig, sampling: dict[str, Any], url: str | None, api_key: str | None
) -> tuple[Backend, AsyncExitStack]:
    stack = AsyncExitStack()
    if url is None:
        engine = EngineBackend(config, sampling)
        stack.callback(engine.engine.shutdown)
        return engine, stack
    from jaxllm.cli.client import ServerClient

    refused = sorted(config.model_fields_set - {"model"})
    if refused:
        raise ConfigError(f"{refused[0]} cannot be set with --url: that server has its own settings")
    client = await stack.enter_async_context(ServerClient(url, api_key))
    try:
        name = config.model if "model" in config.model_fields_set else (await client.models())[0]["id"]
    except JaxLLMError:
        await stack.aclose()
        raise
    return ServerBackend(client, name, sampling), stack


class EngineBackend:
    def __init__(self, config: EngineConfig, sampling: dict[str, Any]):
        from jaxllm.engine.doors.async_llm import AsyncLLM
        from jaxllm.engine.start.tokenizer import answers_chats

        if config.skip_tokenizer_init:
            raise ConfigError("--skip-tokenizer-init leaves nothing to read text with; chat needs the tokenizer")
        if not answers_chats(config):  # before the model is loaded, which may take minutes
            raise ConfigError(
                f"{config.model} has no chat template: it is a base model, which continues text; "
                f"use `jaxllm generate {config.model} TEXT`"
            )
        self.engine = AsyncLLM(config)
        self.name, self.sampling = config.model, sampling
        self.num_tokens = 0

    async def answer(self, messages: ChatHistory) -> AsyncIterator[Shown]:
        from jaxllm.chat.answer import speak
        from jaxllm.chat.conversation import Conversation, given_messages
        from jaxllm.chat.events import Content, Reasoning
        from jaxllm.chat.prompt import ChatModel, prepare_params

        params = sampling_params(self.sampling, self.engine.info.default_sampling)
        conversation = Conversation(messages=given_messages(messages), structured_outputs=params.structured_outputs)
        self.num_tokens = 0
        ready = await asyncio.to_thread(prepare_params, ChatModel(self.engine), conversation, params)
        self.engine.check(ready.prompt.token_ids, ready.prompt.params)
        async with aclosing(speak(self.engine, ready)) as pieces:
            async for piece in pieces:
                self.num_tokens += len(piece.token_ids)
                for event in piece.events:
                    if isinstance(event, Content | Reasoning):
                        yield Shown(event.text, isinstance(event, Reasoning))


class ServerBackend:
    """A running server; flags that were not given stay the server's choice."""

    def __init__(self, client: Any, name: str, sampling: dict[str, Any]):
        self.client, self.name, self.sampling = client, name, sampling
        self.num_tokens = 0

    async def answer(self, messages: ChatHistory) -> AsyncIterator[Shown]:
        body = {"model": self.name, "messages": messages, "stream_options": {"include_usage": True}, **self.sampling}
        self.num_tokens = 0
        async for event in self.client.stream("/v1/chat/completions", body):
            if event.get("usage"):
                self.num_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                delta = choice["delta"]
                yield Shown(delta.get("reasoning_content") or "", is_reasoning=True)
                yield Shown(delta.get("content") or "")


class Chat:
    """One conversation: what has been said, and the commands that change it."""

    def __init__(self, backend: Backend, system: str | None = None, images: Sequence[dict[str, Any]] = ()):
        from rich.console import Console

        self.backend = backend
        self.system = system and as_typed(system)
        self.messages: ChatHistory = []
        self.images = list(images)  # for the next message
        self.console = Console(highlight=False)

    def loop(self, runner: asyncio.Runner) -> None:
        """Read and answer until /exit or the end of the input."""
        interactive = sys.stdin.isatty()
        if interactive:
            prepare_terminal()
            self.console.print(f"{self.backend.name}: /help for commands, Ctrl-D to leave", style="dim", markup=False)
        while True:
            try:
                line, may_be_command = read_message(*(("> ", ". ") if interactive else ("", "")))
            except EOFError:
                print(end="\n" if interactive else "")
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in LEAVE:
                return
            if may_be_command and line.startswith("/"):
                try:
                    self.command(runner, line)
                except (ConfigError, InvalidRequestError) as error:
                    self._complain(error)
            elif line:
                self.turn(runner, line)

    def command(self, runner: asyncio.Runner, line: str) -> None:
        """Obey a /command. Raises ConfigError or InvalidRequestError."""
        name, _, text = line.partition(" ")
        text = text.strip()
        match name:
            case "/clear":
                self.messages.clear()
                self._note("the next message begins a new conversation")
            case "/system":
                self.system = text or None
                self.messages.clear()
            case "/set":
                self.set(*text.split(None, 1))
            case "/image":
                self.images.append(image_part(Path(text)))
                self._note(f"{text} goes with the next message")
            case "/regenerate":
                self.regenerate(runner)
            case "/save" | "/load" if not text:
                raise ConfigError(f"{name} needs a file: {name} chat.json")
            case "/save":
                said: Any = self.messages
                save_chat(in_home(text), SavedChat(system=self.system, messages=said, settings=self.backend.sampling))
                self._note(f"{len(self.messages)} messages are in {text}")
            case "/load":
                found = load_chat(in_home(text))
                self.system, self.backend.sampling = found.system, found.settings
                self.messages = [message.model_dump() for message in found.messages]
                self._note(f"{len(self.messages)} messages")
            case "/help" | "/?":
                print(HELP)
            case _:
                print(f"no command {name}; /help lists them")

    def set(self, name: str = "", value: str | None = None) -> None:
        """Change a setting, take it back, or show those that were made."""
        settings = self.backend.sampling
        if name:
            changed = {key: kept for key, kept in settings.items() if key != name}
            if value is not None:
                changed[name] = value
                with suppress(ValueError):  # JSON where it is some, as 0.5, true and ["a"] are; else text
                    changed[name] = json.loads(value)
            check_setting(changed, name)
            settings = self.backend.sampling = changed
        shown = ", ".join(f"{key} {json.dumps(kept, ensure_ascii=False)}" for key, kept in settings.items())
        self._note(shown or "all as the model recommends")

    def regenerate(self, runner: asyncio.Runner) -> None:
        """Answer the last message again. Raises ConfigError where nothing was answered."""
        if not self.messages:
            raise ConfigError("/regenerate: nothing was said yet")
        answer, question = self.messages.pop(), self.messages.pop()
        self.turn(runner, question["content"])
        if not self.messages or self.messages[-1]["role"] == "user":  # refused or stopped before its first word
            self.messages += [question, answer]

    def answer(self, runner: asyncio.Runner, text: str) -> None:
        """Answer `text` and no more. Raises what keeps it from an answer."""
        self._say(text)
        runner.run(self._show([]))

    def turn(self, runner: asyncio.Runner, text: str) -> None:
        """Answer `text`. An answer that Ctrl-C stops stays in the conversation as far as it got."""
        self._say(text)
        pieces: list[str] = []
        began = time.perf_counter()
        try:
            runner.run(self._show(pieces))
        except KeyboardInterrupt:
            self.console.print("[dim](stopped)[/]")
        except EngineDeadError:
            raise
        except JaxLLMError as error:  # the context is full, say: the chat can go on after /clear
            self._complain(error)
        if not pieces:
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if self.console.is_terminal and self.backend.num_tokens:
            rate = self.backend.num_tokens / (time.perf_counter() - began)
            self._note(f"{self.backend.num_tokens} tokens, {rate:.1f} tokens/s")

    def _say(self, text: Any) -> None:
        parts, self.images = [*self.images, {"type": "text", "text": text}], []
        self.messages.append({"role": "user", "content": parts if parts[:-1] else text})

    def _complain(self, error: JaxLLMError) -> None:
        self.console.print(f"jaxllm: error: {error}", style="red", markup=False)

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)

    async def _show(self, pieces: list[str]) -> None:
        from jaxllm.cli.terminal import MarkdownStream

        system = [{"role": "system", "content": self.system}] if self.system else []
        with MarkdownStream(self.console) as output:
            async for said in self.backend.answer(system + self.messages):
                if said.is_reasoning:
                    output.think(said.text)
                elif said.text:
                    pieces.append(said.text)
                    output.write(said.text)


NOT_IN_CHATS = {
    "n", "logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs", "thinking_markers",
    "shown_special_token_ids",
}  # fmt: skip


class SavedMessage(BaseModel, extra="forbid", strict=True):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class SavedChat(BaseModel, extra="forbid", strict=True):
    system: str | None
    messages: list[SavedMessage]
    settings: dict[str, Any]


def image_part(file: Path) -> dict[str, Any]:
    """A file's image in a message. Raises ConfigError."""
    try:
        data = base64.b64encode(in_home(file).read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"the image {file} cannot be read: {reason(error)}") from None
    kind = mimetypes.guess_type(file)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def save_chat(file: Path, chat: SavedChat) -> None:
    try:
        file.write_text(chat.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None


def load_chat(file: Path) -> SavedChat:
    try:
        found = SavedChat.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {reason(error)}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(
            f"{file} is no saved chat: {place} is {shown(first['input'])}; {wrong_setting(first)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read, as it is no JSON: {one_line(error)}") from None
    for name in found.settings:
        check_setting(found.settings, name)
    return found


def check_setting(settings: dict[str, Any], name: str) -> None:
    """Raises ConfigError for an unknown setting, and InvalidRequestError for its value."""
    names = [*(flag.name for flag in sampling_flags() if flag.name not in NOT_IN_CHATS), "seed"]
    if name not in names:
        raise ConfigError(f"no setting {name}; there are {', '.join(names)}")
    sampling_params(settings)


BLOCK = '"""'


def read_message(prompt: str, continuation: str) -> tuple[str, bool]:
    """The next message, and whether it may be a command. Raises EOFError at the end of the input."""
    line = as_typed(input(prompt)).strip()
    if not line.startswith(BLOCK):
        return line, "\n" not in line
    lines = [line.removeprefix(BLOCK)]
    while BLOCK not in lines[-1]:
        try:
            lines.append(as_typed(input(continuation)))
        except EOFError:
            break
    lines[-1] = lines[-1].partition(BLOCK)[0]
    return "\n".join(lines).strip(), False


def completed(begun: str, number: int) -> str | None:
    """The command of that number which begins so, for readline."""
    fitting = [f"{command} " for command in COMMANDS if begun and command.startswith(begun)]
    return fitting[number] if number < len(fitting) else None


def prepare_terminal() -> None:
    """Tab completes commands; arrow keys walk through earlier lines, of earlier chats too where those can be kept."""
    import atexit
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    readline.set_completer_delims(" ")
    readline.set_completer(completed)
    if unwritable(CACHE_DIR) is not None:
        return
    file = CACHE_DIR / "chat_history"
    if file.exists():
        readline.read_history_file(file)
    readline.set_history_length(1000)
    atexit.register(readline.write_history_file, file)
