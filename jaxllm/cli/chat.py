"""`jaxllm chat`: talk to a model in the terminal, in this process or on a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any, Protocol

from cyclopts import Parameter

from jaxllm.cli.sampling import sampling_params, takes_sampling
from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.config import CACHE_DIR, EngineConfig
from jaxllm.errors import ConfigError, EngineDeadError, JaxLLMError

ChatHistory = list[dict[str, str]]

HELP = """\
/system TEXT  set the system prompt (nothing: remove it) and start over
/clear        forget the conversation
/help         this
/exit         leave (Ctrl-D does too); Ctrl-C stops an answer"""


class Backend(Protocol):
    """Where answers come from."""

    name: str

    def answer(self, messages: ChatHistory) -> AsyncIterator[str]:
        """Pieces of the next answer's text; closing the iterator stops it."""


@takes_settings(EngineConfig)
@takes_sampling
def chat(
    config: EngineConfig,
    sampling: dict[str, Any],
    *,
    url: Annotated[str | None, Parameter(group=COMMAND_GROUP)] = None,
    api_key: Annotated[str | None, Parameter(group=COMMAND_GROUP, env_var="JAXLLM_API_KEY")] = None,
    system: Annotated[str | None, Parameter(group=COMMAND_GROUP)] = None,
) -> None:
    """Chat with a model. Type /help inside for the commands.

    Args:
        url: Talk to this running server (http://127.0.0.1:8000) instead of starting an engine.
        api_key: The key that the server asks for.
        system: System prompt.
    """
    if sampling.get("n", 1) != 1:
        raise ConfigError(f"--n is {sampling['n']}: chat shows one answer; it must be 1")
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling:
            raise ConfigError(f"--{name.replace('_', '-')}: chat shows text only; use generate --json")
    sampling_params(sampling)  # refuse a bad value before anything starts
    with asyncio.Runner() as runner:  # one loop for the whole chat; Ctrl-C cancels only the answer that runs on it
        backend, close = runner.run(_open(config, sampling, url, api_key))
        try:
            Chat(backend, system).loop(runner)
        finally:
            runner.run(close.aclose())


async def _open(
    config: EngineConfig, sampling: dict[str, Any], url: str | None, api_key: str | None
) -> tuple[Backend, AsyncExitStack]:
    stack = AsyncExitStack()
    if url is None:
        engine = EngineBackend(config, sampling)
        stack.callback(engine.shutdown)
        return engine, stack
    from jaxllm.cli.client import ServerClient

    refused = sorted(config.model_fields_set - {"model"})
    if refused:
        raise ConfigError(f"{refused[0]} cannot be set with --url: that server has its own settings")
    client = await stack.enter_async_context(ServerClient(url, api_key))
    try:
        name = config.model if "model" in config.model_fields_set else await client.model()
    except JaxLLMError:
        await stack.aclose()
        raise
    return ServerBackend(client, name, sampling), stack


class EngineBackend:
    """An engine in this process."""

    def __init__(self, config: EngineConfig, sampling: dict[str, Any]):
        from jaxllm.engine.start.tokenizer import answers_chats

        if config.skip_tokenizer_init:
            raise ConfigError("--skip-tokenizer-init leaves nothing to read text with; chat needs the tokenizer")
        if not answers_chats(config):  # before the model is loaded, which may take minutes
            raise ConfigError(
                f"{config.model} has no chat template: it is a base model, which continues text; "
                f"use `jaxllm generate {config.model} TEXT`"
            )
        from jaxllm.engine.front.async_llm import AsyncLLM

        self.engine = AsyncLLM(config)
        self.name = config.model
        self.params = sampling_params(sampling, self.engine.info.default_sampling)

    async def answer(self, messages: ChatHistory) -> AsyncIterator[str]:
        from jaxllm.cli.generate import chat_tokens

        async for _, delta in self.engine.stream(chat_tokens(self.engine, messages), self.params):
            yield delta.text

    def shutdown(self) -> None:
        self.engine.shutdown()


class ServerBackend:
    """A running server; flags that were not given stay the server's choice."""

    def __init__(self, client: Any, name: str, sampling: dict[str, Any]):
        self.client, self.name, self.sampling = client, name, sampling

    async def answer(self, messages: ChatHistory) -> AsyncIterator[str]:
        body = {"model": self.name, "messages": messages, **self.sampling}
        async for event in self.client.stream("/v1/chat/completions", body):
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


class Chat:
    """One conversation: what has been said, and the commands that change it."""

    def __init__(self, backend: Backend, system: str | None = None):
        from rich.console import Console

        self.backend = backend
        self.system = system
        self.messages: ChatHistory = []
        self.console = Console(highlight=False)

    def loop(self, runner: asyncio.Runner) -> None:
        """Read, answer, repeat, until /exit or the end of the input."""
        interactive = sys.stdin.isatty()
        if interactive:
            _keep_history()
            self.console.print(f"{self.backend.name}: /help for commands, Ctrl-D to leave", style="dim", markup=False)
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                print(end="\n" if interactive else "")
                return
            except KeyboardInterrupt:
                print()
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line:
                self.turn(runner, line)

    def command(self, line: str) -> bool:
        """Obey a /command; False means leave."""
        name, _, text = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/clear":
            self.messages.clear()
        elif name == "/system":
            self.system = text.strip() or None
            self.messages.clear()
        elif name == "/help":
            print(HELP)
        else:
            print(f"no command {name}; /help lists them")
        return True

    def turn(self, runner: asyncio.Runner, text: str) -> None:
        """Answer `text`. An answer that Ctrl-C stops stays in the conversation as far as it got."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            runner.run(self._show(pieces))
        except KeyboardInterrupt:
            self.console.print("[dim](stopped)[/]")
        except EngineDeadError:
            raise
        except JaxLLMError as error:  # the context is full, say: the chat can go on after /clear
            self.console.print(f"jaxllm: error: {error}", style="red", markup=False)
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()

    async def _show(self, pieces: list[str]) -> None:
        from jaxllm.cli.markdown import MarkdownStream

        system = [{"role": "system", "content": self.system}] if self.system else []
        with MarkdownStream(self.console) as output:
            async for piece in self.backend.answer(system + self.messages):
                pieces.append(piece)
                output.write(piece)


def _keep_history() -> None:
    """Arrow keys walk through earlier lines, those of earlier chats included."""
    import atexit
    import readline

    file = CACHE_DIR / "chat_history"
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        readline.read_history_file(file)
    readline.set_history_length(1000)
    atexit.register(readline.write_history_file, file)
