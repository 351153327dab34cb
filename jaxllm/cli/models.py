"""Commands about models: which there are, here, built in or on a server, fetching one, what one is, removing one."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.settings import COMMAND_GROUP, documented, takes_settings
from jaxllm.cli.terminal import agrees, print_table
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.errors import ConfigError
from jaxllm.folders import in_home

FIELDS = ("name", "models", "architectures", "model_types", "layer_types", "gguf_architectures")
"""What a family says about itself; its other fields are functions."""


@documented
def models(
    *,
    check: Path | None = None,
    server: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="JAXLLM_API_KEY")] = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """List the model families: what they serve, their Hugging Face classes, and the formats they load from.

    With --check say of one model whether it is served; the exit code is 1 where it is not. With --server list the
    models of a running server, and whether each is loaded.

    Args:
        check: A config.json, a folder that holds one, or a GGUF file. What the model needs and no family has is named,
            with the family that is nearest; weights are not read.
        server: The address of a running server, as http://127.0.0.1:8000.
        api_key: The key that the server asks for.
        json_output: Print a JSON array instead of a table.
    """
    if check is not None and server is not None:
        raise ConfigError(f"--check is {str(check)!r} and --server is {server!r}; accepted is one of them")
    if check is not None:
        _check(check, json_output)
    elif server is None:
        _list_families(json_output)
    else:
        _list_served(asyncio.run(_served(server, api_key)), json_output)


def _check(path: Path, json_output: bool) -> None:
    from jaxllm.models.verdict import verdict

    found = verdict(in_home(path))
    if json_output:
        print(json.dumps(found._asdict() | {"path": str(path), "family": found.family.name}))
    else:
        print(f"{path}: {found}")
    if not found.served:
        raise SystemExit(1)


def _list_families(json_output: bool) -> None:
    from jaxllm.models.registry import FAMILIES

    if json_output:
        print(json.dumps([{name: getattr(family, name) for name in FIELDS} for family in FAMILIES]))
        return
    rows = [
        (family.name, family.models, "\n".join(family.architectures), "\n".join(family.gguf_architectures) or "–")
        for family in FAMILIES
    ]
    print_table(("family", "models", "Hugging Face class", "GGUF architecture"), rows)


async def _served(url: str, api_key: str | None) -> list[dict[str, Any]]:
    from jaxllm.cli.client import ServerClient

    async with ServerClient(url, api_key) as client:
        return await client.models()


def _list_served(found: list[dict[str, Any]], json_output: bool) -> None:
    if json_output:
        print(json.dumps(found))
        return
    rows = []
    for model in found:
        context, parent = model.get("max_model_len"), model.get("parent")
        root = model.get("root") or "–"
        root = f"adapter of {parent}: {root}" if parent else root
        rows.append((model["id"], root, _status(model), "–" if context is None else f"{context:,}"))
    print_table(("name", "model", "status", "context"), rows)


def _status(model: dict[str, Any]) -> str:
    """'loading: Loading weights (3 of 7)'; other servers than ours may say nothing of it."""
    status = model.get("status") or {}
    detail = status.get("doing") or status.get("error") or ""
    if status.get("total"):
        detail += f" ({status['done']} of {status['total']})"
    return f"{status.get('value', '–')}{': ' if detail else ''}{detail}"


@takes_settings(EngineConfig, positional_model=False, only=("download_dir",))
def list_models(
    config: EngineConfig,
    *,
    json_output: Annotated[bool, Parameter(name="--json", negative=(), group=COMMAND_GROUP)] = False,
) -> None:
    """List the models on this machine, and the built-in ones that can be fetched.

    Args:
        json_output: Print a JSON array instead of a table.
    """
    from jaxllm.weights.source import list_local_models

    models = list_local_models(config.download_dir)
    if json_output:
        print(json.dumps([model._asdict() for model in models], default=str))
        return
    rows = [
        (
            model.name,
            format_bytes(model.nbytes),
            model.about,
            str(model.path or f"not fetched: jaxllm pull {model.name}"),
        )
        for model in models
    ]
    print_table(("name", "size", "what", "where"), rows)


@takes_settings(EngineConfig, only=("model", "tokenizer", "revision", "download_dir"))
def pull(
    config: EngineConfig,
    *,
    list_models: Annotated[bool, Parameter(name="--list", negative=(), group=COMMAND_GROUP)] = False,
) -> None:
    """Download a model and print where it is.

    Args:
        list_models: Show the built-in names and leave.
    """
    if list_models:
        _list_built_in(config)
        return
    from jaxllm.weights.source import resolve_model, resolve_tokenizer

    print(resolve_model(config.model, revision=config.revision, download_dir=config.download_dir))
    if config.tokenizer is not None:
        print(resolve_tokenizer(config.tokenizer, revision=config.revision, download_dir=config.download_dir))


def _list_built_in(config: EngineConfig) -> None:
    from jaxllm.weights.source import BUILTIN_MODELS, list_builtin_models

    rows = [
        (row.name, row.about, format_bytes(row.nbytes), BUILTIN_MODELS[row.name].license, str(row.path or "–"))
        for row in list_builtin_models(config.download_dir)
    ]
    print_table(("name", "what", "size", "licence", "downloaded to"), rows)


@takes_settings(EngineConfig, only=("model", "download_dir"))
def show(
    config: EngineConfig,
    *,
    json_output: Annotated[bool, Parameter(name="--json", negative=(), group=COMMAND_GROUP)] = False,
) -> None:
    """Show what a model is: family, parameters, quantization, context, chat template, licence.

    Args:
        json_output: Print one JSON object instead of a table.
    """
    facts = describe(config)
    if json_output:
        print(json.dumps(facts, default=str))
        return
    print_table(("", ""), [(name.replace("_", " "), _readable(name, value)) for name, value in facts.items()])


def describe(config: EngineConfig) -> dict[str, Any]:
    """What is read off the model's files, of which nothing is loaded. Raises ModelNotFoundError, CheckpointError."""
    from jaxllm.models.registry import model_spec
    from jaxllm.text.tokenizer import has_chat_template
    from jaxllm.weights import open_checkpoint
    from jaxllm.weights.source import BUILTIN_MODELS, find_local

    model = find_local(config.model, config.download_dir)
    assert model.path is not None
    checkpoint = open_checkpoint(model.path)
    spec = model_spec(checkpoint)
    weights: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        weights[tensor.dtype] += math.prod(tensor.shape)
    built_in = BUILTIN_MODELS.get(config.model)
    stated = checkpoint.config.get("general.license") or checkpoint.config.get("license")
    checkpoint.close()
    return {
        "name": config.model,
        "path": model.path,
        "size_bytes": model.nbytes,
        "family": spec.family.name,
        "parameters": sum(weights.values()),
        "weights": dict(weights.most_common()),
        "context": spec.config.max_position_embeddings,
        "chat_template": has_chat_template(model.path),
        "licence": built_in.license if built_in else stated,
    }


def _readable(name: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no: it continues text"
        case int():
            return format_bytes(value) if name == "size_bytes" else f"{value:,}"
        case dict():
            total = sum(value.values())
            return ", ".join(f"{kind} {100 * count / total:.3g} %" for kind, count in value.items())
        case None:
            return "not stated in its files"
    return str(value)


@takes_settings(EngineConfig, only=("model", "download_dir"))
def rm(
    config: EngineConfig,
    *,
    yes: Annotated[bool, Parameter(negative=(), group=COMMAND_GROUP)] = False,
) -> None:
    """Remove a downloaded model; files and folders of your own are left alone.

    Args:
        yes: Do not ask.
    """
    from jaxllm.weights.source import find_removable, remove_local

    if "model" not in config.model_fields_set:
        raise ConfigError("rm needs the name of a model; `jaxllm list` shows them")
    model = find_removable(config.model, config.download_dir)
    if not yes and not agrees("rm", f"Remove {model.name} ({format_bytes(model.nbytes)}) from {model.path}? [y/N] "):
        print("kept")
        return
    remove_local(model)
    print(f"removed {model.name}")
