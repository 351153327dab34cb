"""`jaxllm models`: which model families there are, or which models a server has."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.documentation import documented

FIELDS = ("name", "models", "architectures", "model_types", "layer_types", "gguf_architectures")
"""What a family says about itself; its other fields are functions."""


@documented
def models(
    *,
    server: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="JAXLLM_API_KEY")] = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """List the model families: what they serve, their Hugging Face classes, and the formats they load from.

    With --server list the models of a running server, and whether each is loaded.

    Args:
        server: The address of a running server, as http://127.0.0.1:8000.
        api_key: The key that the server asks for.
        json_output: Print a JSON array instead of a table.
    """
    if server is None:
        _list_families(json_output)
    else:
        _list_served(asyncio.run(_served(server, api_key)), json_output)


def _list_families(json_output: bool) -> None:
    from jaxllm.models.registry import FAMILIES

    if json_output:
        print(json.dumps([{name: getattr(family, name) for name in FIELDS} for family in FAMILIES]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("family", "models", "Hugging Face class", "GGUF architecture")
    for family in FAMILIES:
        gguf = "\n".join(family.gguf_architectures) or "–"
        table.add_row(family.name, family.models, "\n".join(family.architectures), gguf)
    Console().print(table)


async def _served(url: str, api_key: str | None) -> list[dict[str, Any]]:
    from jaxllm.cli.client import ServerClient

    async with ServerClient(url, api_key, "--server") as client:
        return await client.models()


def _list_served(found: list[dict[str, Any]], json_output: bool) -> None:
    if json_output:
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "model", "status", "context")
    for model in found:
        context = model.get("max_model_len")
        row = (model["id"], model.get("root", "–"), _status(model), "–" if context is None else f"{context:,}")
        table.add_row(*map(escape, row))
    Console().print(table)


def _status(model: dict[str, Any]) -> str:
    """'loading: Loading weights (3 of 7)'; other servers than ours may say nothing of it."""
    status = model.get("status") or {}
    detail = status.get("doing") or status.get("error") or ""
    if status.get("total"):
        detail += f" ({status['done']} of {status['total']})"
    return f"{status.get('value', '–')}{': ' if detail else ''}{detail}"
