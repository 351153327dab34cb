"""`jaxllm launch`: start a coding agent that talks to a server of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple

from cyclopts import Parameter

from jaxllm.cli.settings import documented
from jaxllm.errors import ConfigError

NO_KEY = "none"
"""For a server that asks for no key, of programs that insist on one."""


class Server(NamedTuple):
    """Where an agent is to send its requests."""

    url: str
    model: str
    api_key: str
    context: int | None


class Agent(NamedTuple):
    """A program, how it is installed, and what tells it of a server: arguments and variables."""

    install: str
    arguments: Callable[[Server], list[str]]
    variables: Callable[[Server], dict[str, str]]


def _claude(server: Server) -> dict[str, str]:
    models = dict.fromkeys(
        ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
         "ANTHROPIC_DEFAULT_HAIKU_MODEL"),
        server.model,
    )  # fmt: skip
    return models | {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex(server: Server) -> list[str]:
    provider = {
        "name": "jaxllm", "base_url": f"{server.url}/v1", "env_key": "JAXLLM_API_KEY", "wire_api": "responses",
    }  # fmt: skip
    settings = {f"model_providers.jaxllm.{name}": value for name, value in provider.items()}
    settings |= {"model_provider": "jaxllm", "model": server.model}
    told = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    if server.context is not None:
        told.append(f"model_context_window={server.context}")
    return [part for setting in told for part in ("-c", setting)]


def _opencode(server: Server) -> dict[str, str]:
    limit = {} if server.context is None else {"limit": {"context": server.context, "output": server.context // 4}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "jaxllm",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.api_key},
        "models": {server.model: {"name": server.model, **limit}},
    }
    config = {"provider": {"jaxllm": provider}, "model": f"jaxllm/{server.model}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("npm install -g @anthropic-ai/claude-code", lambda _: [], _claude),
    "codex": Agent("npm install -g @openai/codex", _codex, lambda server: {"JAXLLM_API_KEY": server.api_key}),
    "opencode": Agent("npm install -g opencode-ai", lambda _: [], _opencode),
}


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
    agent = AGENTS[program]
    path = shutil.which(program)
    if path is None:
        raise ConfigError(f"{program} is not installed; `{agent.install}` installs it")
    server = asyncio.run(_server(url, model, api_key))
    command = [program, *agent.arguments(server), *(arguments or ())]
    os.execve(path, command, {**os.environ, **agent.variables(server)})


async def _server(url: str | None, model: str | None, api_key: str | None) -> Server:
    """Raises ConfigError where there is none, or not that model."""
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
    name = next(iter(served)) if model is None else model
    if name not in served:
        raise ConfigError(f"--model is {name!r}; the server at {url} has {', '.join(served)}")
    return Server(client.url, name, api_key or NO_KEY, served[name].get("max_model_len"))
