"""`jaxllm plan`: what would fit, without starting anything."""

from __future__ import annotations

import json
from typing import Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.config import EngineConfig, format_bytes


@takes_settings(EngineConfig)
def plan(
    config: EngineConfig,
    *,
    json_output: Annotated[bool, Parameter(name="--json", negative=(), group=COMMAND_GROUP)] = False,
) -> None:
    """Show what a model would take: weights, KV pages and the tokens they hold, compiled buckets.

    Args:
        json_output: Print one JSON object instead of a table.
    """
    from jaxllm.engine.start.plan import plan_engine

    sizes = plan_engine(config).as_dict()
    if json_output:
        print(json.dumps(sizes, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title=f"Plan for {config.model}", show_header=False, title_justify="left")
    for name, value in sizes.items():
        table.add_row(name.replace("_", " "), readable(name, value))
    Console().print(table)


def readable(name: str, value: Any) -> str:
    """A size as people read it: bytes in binary units, whole numbers with separators, lists on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and ("bytes" in name or "memory" in name):
        return format_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(readable("", item) for item in value) or "–"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {readable(str(key), item)}" for key, item in value.items())
    return "–" if value is None else str(value)
