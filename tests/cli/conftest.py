"""Runs the command line inside the test process, with stand-ins for the engine where a command would build one."""

from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from jaxllm.cli.main import main
from jaxllm.config import EngineConfig, ServeConfig
from jaxllm.engine.messages import EngineInfo, EngineStats, TokenDelta
from jaxllm.requests.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.requests.sampling import SamplingDefaults, SamplingParams


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`cli("generate", "hi")` -> exit code, stdout, stderr; wide enough that help lines do not wrap."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))

    def run(*arguments: str) -> Result:
        code = 0
        try:
            main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The configurations that `jaxllm serve` would have served, by itself or on Ray."""
    configs: list[ServeConfig] = []
    stub_module(monkeypatch, "jaxllm.serving.server", serve=configs.append)
    stub_module(monkeypatch, "jaxllm.ray", run_on_ray=configs.append)
    return configs


def stub_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Make `from name import …` give `contents`; the real module is never imported."""
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)


class WordTokenizer:
    """One token a word; its chat template marks roles."""

    def __init__(self, chat_template: str | None = "canned"):
        self.chat_template = chat_template
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self._id(word) for word in text.split()]

    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        return " ".join(f"<{message['role']}> {message['content']}" for message in messages) + " <assistant>"

    def _id(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)


class EchoEngine:
    """Answers with the prompt it was given, in capitals, a word at a time, so that stdout shows what reached it."""

    instances: ClassVar[list[EchoEngine]]
    chat_template: ClassVar[str | None]
    recommended: ClassVar[SamplingDefaults]

    def __init__(self, config: EngineConfig):
        self.config = config
        self.tokenizer = WordTokenizer(self.chat_template)
        self.info = EngineInfo(
            model_name="echo", vocab_size=2000, max_model_len=64, eos_token_ids=[1], num_pages=10, page_size=16,
            max_num_seqs=4, max_num_batched_tokens=64, default_sampling=self.recommended,
        )  # fmt: skip
        self.params: list[SamplingParams] = []
        self.prompts: list[str] = []
        self.is_shut_down = False
        self.instances.append(self)

    async def stream(self, tokens: list[int], params: SamplingParams) -> AsyncIterator[tuple[int, TokenDelta]]:
        self.params.append(params)
        self.prompts.append(self.tokenizer.decode(tokens))
        for token in tokens[: params.max_tokens]:
            await asyncio.sleep(0)
            yield 0, TokenDelta(request_id="0", token_ids=[token], text=self.tokenizer.words[token].upper() + " ")

    async def generate(self, prompt: dict[str, list[int]], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        tokens = prompt["prompt_token_ids"]
        choices = [CompletionOutput(index=index) for index in range(params.n)]
        output = RequestOutput(request_id="0", prompt=None, prompt_token_ids=tokens, outputs=choices)
        async for _, delta in self.stream(tokens, params):
            for choice in choices:
                choice.text += delta.text
                choice.token_ids += delta.token_ids
                if params.logprobs is not None:
                    choice.logprobs = [{token: Logprob(-0.5, 1, "x", b"x")} for token in choice.token_ids]
            yield output

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> type[EchoEngine]:
    """Puts EchoEngine in AsyncLLM's place; its class attributes say what the model is like."""

    class Engine(EchoEngine):
        instances: ClassVar[list[EchoEngine]] = []
        chat_template: ClassVar[str | None] = "canned"
        recommended: ClassVar[SamplingDefaults] = SamplingDefaults()

    stub_module(monkeypatch, "jaxllm.engine.doors.async_llm", AsyncLLM=Engine)
    answers_chats = lambda config: Engine.chat_template is not None  # noqa: E731
    stub_module(monkeypatch, "jaxllm.engine.start.tokenizer", answers_chats=answers_chats)
    return Engine


class CountingLLM:
    """An LLM whose generate() only notes what it was asked for."""

    instances: ClassVar[list[CountingLLM]]

    def __init__(self, **fields: Any):
        self.fields = fields
        self.info = EngineInfo(
            model_name="count", vocab_size=1500, max_model_len=64, eos_token_ids=[1], num_pages=10, page_size=16,
            max_num_seqs=4, max_num_batched_tokens=64,
        )  # fmt: skip
        self.pending = 2
        self.batches: list[tuple[list[list[int]], SamplingParams]] = []
        self.is_shut_down = False
        self.instances.append(self)

    def stats(self) -> EngineStats:
        self.pending -= 1
        return EngineStats(compiles_pending=max(self.pending, 0))

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, use_tqdm: bool = True) -> None:
        assert self.pending <= 0, "measured while buckets were still compiling"
        self.batches.append(([prompt["prompt_token_ids"] for prompt in prompts], params))

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[CountingLLM]:
    """Puts CountingLLM in LLM's place."""

    class Counting(CountingLLM):
        instances: ClassVar[list[CountingLLM]] = []

    stub_module(monkeypatch, "jaxllm.llm", LLM=Counting)
    return Counting


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """jaxllm's own server in a process of its own, over the fake engine of the server's tests; 10 ms a token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.serving.fake_engine", str(port), "0.01", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    assert "Serving" in process.stdout.readline()
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.communicate(timeout=20)
