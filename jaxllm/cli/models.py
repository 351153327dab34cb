"""`jaxllm models`: which model families there are, whether one has a given model, or which models a server has."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.documentation import documented
from jaxllm.cli.table import print_table
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
