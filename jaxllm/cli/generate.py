"""`jaxllm generate`: complete prompts and leave; text on stdout, everything else on stderr."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.settings import Json, Switch, sampling_params, takes_settings
from jaxllm.cli.terminal import as_typed, piped_text, put_together
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, reason

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM
    from jaxllm.requests.outputs import RequestOutput
    from jaxllm.requests.sampling import SamplingParams


@takes_settings(EngineConfig, positional_model=False, sampling=True)
def generate(
    config: EngineConfig,
    sampling: dict[str, Any],
    prompts: Annotated[list[str] | None, Parameter(negative=())] = None,
    *,
    file: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    raw: Switch = False,
    chat: Switch = False,
    image: Annotated[list[Path] | None, Parameter(negative=())] = None,
    json_output: Json = False,
) -> None:
    """Complete one prompt, streamed, or several at once, printed in order: `jaxllm generate [MODEL] PROMPT`.

    A chat model sees each prompt as a user's message; any other continues it as text.

    Args:
        prompts: What to complete, after the model's name if that is given. A text on standard input stands before it;
            without a prompt, each line of that is one.
        file: Take one prompt from each line of this file; - is standard input.
        raw: Continue the prompt as text, without the chat template.
        chat: Put the prompt into the chat template, and fail if the model has none.
        image: A file with an image, which each prompt is about; it may be given several times.
        json_output: Print one JSON object a prompt: text, token ids, log-probabilities, finish reasons.
    """
    if raw and chat:
        raise ConfigError("--raw and --chat exclude each other")
    if config.skip_tokenizer_init:
        raise ConfigError("--skip-tokenizer-init leaves nothing to read the prompt with; generate needs the tokenizer")
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling and not json_output:
            raise ConfigError(f"--{name.replace('_', '-')} needs --json to be shown")
    sampling_params(sampling)  # refuse a bad value before the model loads
    config, prompts = _with_model(config, prompts or [], file)
    texts = read_prompts(prompts, file)

    from jaxllm.engine.doors.async_llm import AsyncLLM

    engine = AsyncLLM(config)
    try:
        params = sampling_params(sampling, engine.info.default_sampling)
        assert engine.tokenizer is not None
        has_template = engine.tokenizer.chat_template is not None
        if chat and not has_template:
            raise ConfigError(f"--chat: {config.model} has no chat template")
        asyncio.run(_complete(engine, texts, params, has_template and not raw, json_output, image or []))
    finally:
        engine.shutdown()


def _with_model(config: EngineConfig, arguments: list[str], file: Path | None) -> tuple[EngineConfig, list[str]]:
    """The first argument chooses the model if it names one and a prompt follows, or a file holds the prompts."""
    from jaxllm.weights.source import is_local_model, names_model

    first, *others = arguments or [""]
    is_chosen = "model" in config.model_fields_set
    if (others or file) and not is_chosen and names_model(first):
        return config.model_copy(update={"model": first}), others
    if is_local_model(first) and (others or not is_chosen):
        raise ConfigError(
            f"{first!r} names a model, and may be meant as a prompt: choose the model with --model "
            f"{shlex.quote(first)}, or give this text as a prompt in a file with --file"
        )
    return config, arguments


def read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    if prompts and file:
        raise ConfigError("give prompts as arguments or with --file, not both")
    if prompts:
        piped = piped_text(beside_prompt=True)
        return [put_together(piped, as_typed(prompt)) for prompt in prompts]
    if file is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give one as an argument, with --file, or on standard input")
    try:
        text = as_typed(sys.stdin.read()) if file is None or str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file is {str(file)!r}: {reason(error)}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"no prompt: {file or 'standard input'} is empty")
    return lines


async def _complete(
    engine: AsyncLLM, texts: list[str], params: SamplingParams, template: bool, as_json: bool, images: list[Path]
) -> None:
    from jaxllm.chat.conversation import Conversation, given_messages
    from jaxllm.chat.prompt import ChatModel, render

    tokenizer = engine.tokenizer
    assert tokenizer is not None

    async def run(text: str, stream: bool) -> RequestOutput:
        if template and images:
            parts = [*({"type": "image", "image": file} for file in images), {"type": "text", "text": text}]
            asked = Conversation(messages=given_messages([{"role": "user", "content": parts}]))
            tokens = tokenizer.encode_chat((await asyncio.to_thread(render, ChatModel(engine), asked)).text)
        elif template:
            said = [{"role": "user", "content": text}]
            tokens = tokenizer.encode_chat(tokenizer.apply_chat_template(said, add_generation_prompt=True))
        else:
            tokens = tokenizer.encode(text)
        shown, media = 0, {"multi_modal_data": {"image": images}} if images else {}
        async for output in engine.generate({"prompt_token_ids": tokens, **media}, params):
            if stream:
                sys.stdout.write(output.outputs[0].text[shown:])
                sys.stdout.flush()
                shown = len(output.outputs[0].text)
        return dataclasses.replace(output, prompt=text)

    begin = time.perf_counter()
    stream = len(texts) == 1 and params.n == 1 and not as_json
    tasks = [asyncio.create_task(run(text, stream)) for text in texts]
    try:
        for number, task in enumerate(tasks, 1):
            _print(await task, stream, as_json, heading=f"[{number}/{len(texts)}]" if len(texts) > 1 else "")
    finally:
        for task in tasks:
            task.cancel()
    outputs, seconds = [task.result() for task in tasks], time.perf_counter() - begin
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    speed = f"{generated} generated in {seconds:.2f} s: {generated / seconds:.1f} tok/s"
    print(f"{prompt} prompt tokens ({cached} cached), {speed}", file=sys.stderr)


def _print(output: RequestOutput, streamed: bool, as_json: bool, heading: str) -> None:
    if as_json:
        print(json.dumps(_named(dataclasses.asdict(output)), ensure_ascii=False), flush=True)
    elif streamed:
        print(flush=True)
    else:
        if heading:
            print(f"{heading} {output.prompt}", file=sys.stderr, flush=True)
        for completion in output.outputs:
            print(completion.text, flush=True)


def _named(value: Any) -> Any:
    """Keep what JSON would drop of named tuples and bytes: Logprob(-0.5, 1, "a") -> {"logprob": -0.5, "rank": 1, …}."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list) else value
