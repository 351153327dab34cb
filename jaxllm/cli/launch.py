"""`jaxllm launch`: start a coding agent that talks to a server of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from jaxllm.cli.settings import documented
from jaxllm.errors import ConfigError

INSTALL = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex", "opencode": "opencode-ai"}
"""Each agent's package of npm's."""
CLAUDE_MODELS = (
    "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
)  # fmt: skip


@documented
def launch(
    program: Literal["claude", "codex", "opencode"],
    /,
    arguments: Annotated[list[str] | None, Parameter(negative=())] = None,
    *,
    model: str | None = None,
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="JAXLLM_API_KEY")] = None,
) -> None:
    """Start a coding agent that talks to a running server: `jaxllm launch claude -- --continue`.

    It is told of the server by variables and arguments of this one start; none of its own settings are changed.

    Args:
        program: The agent, which must be installed.
        arguments: What the agent is given, after --.
        model: The model that it asks, by default the server's first.
        url: The server's address; by default the server that you run on this machine.
        api_key: The key that the server asks for.
    """
    path = shutil.which(program)
    if path is None:
        raise ConfigError(f"{program} is not installed; `npm install -g {INSTALL[program]}` installs it")
    base, served = asyncio.run(_found(url, model, api_key))
    told, variables = _told(program, base, api_key or "none", served)
    os.execve(path, [program, *told, *(arguments or ())], {**os.environ, **variables})


async def _found(url: str | None, model: str | None, api_key: str | None) -> tuple[str, dict[str, Any]]:
    """A server's address, and the model that is meant, as /v1/models has it. Raises ConfigError where there is none."""
    from jaxllm.cli.client import ServerClient
    from jaxllm.serving.running import running_servers

    if url is None:
        fitting = [one for one in running_servers() if model is None or model in one.models]
        if not fitting:
            of = "" if model is None else f" that has {model}"
            raise ConfigError(f"no server of yours runs on this machine{of}: start `jaxllm serve MODEL`, or give --url")
        url = fitting[-1].address
    async with ServerClient(url, api_key) as client:
        served = {one["id"]: one for one in await client.models()}
    if model is not None and model not in served:
        raise ConfigError(f"--model is {model!r}; the server at {url} has {', '.join(served)}")
    return client.url, served[model or next(iter(served))]


def _told(program: str, url: str, api_key: str, served: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The arguments and the variables by which an agent is told of a server's model."""
    model, context = served["id"], served.get("max_model_len")
    if program == "claude":
        variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": api_key}
        variables |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        return [], variables | dict.fromkeys(CLAUDE_MODELS, model)
    if program == "codex":
        provider = {"name": "jaxllm", "base_url": f"{url}/v1", "env_key": "JAXLLM_API_KEY", "wire_api": "responses"}
        settings = {f"model_providers.jaxllm.{name}": value for name, value in provider.items()}
        settings |= {"model_provider": "jaxllm", "model": model}
        settings |= {} if context is None else {"model_context_window": context}
        given = [("-c", f"{name}={json.dumps(value)}") for name, value in settings.items()]
        return [part for pair in given for part in pair], {"JAXLLM_API_KEY": api_key}
    limit = {} if context is None else {"limit": {"context": context, "output": context // 4}}
    provider_of = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": api_key},
        "models": {model: {"name": model, **limit}},
    }
    config = {"provider": {"jaxllm": provider_of}, "model": f"jaxllm/{model}"}
    return [], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}
