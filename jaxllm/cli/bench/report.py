"""A benchmark's result: a table for people, a JSON file for programs."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxllm.cli.table import print_table
from jaxllm.config import EngineConfig

MOST_COLUMNS = 5
"""Results beside one another; more are shown one below the other."""

_SECRETS = {"api_key"}


def report(
    benchmark: str,
    config: EngineConfig,
    load: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    file: Path | None,
) -> None:
    """Print one column a result, or one row of many, and with `file` write all that is needed to read it later."""
    _print_table(benchmark, config.model, results)
    if file is not None:
        document = {
            "benchmark": benchmark,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": platform.platform(),
            "versions": {name: version(name) for name in ("jaxllm", "jax", "flax")},
            "config": config.model_dump(mode="json", exclude=_SECRETS),
            "load": dict(load),
            "results": [dict(result) for result in results],
        }
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _print_table(benchmark: str, model: str, results: Sequence[Mapping[str, Any]]) -> None:
    flat = [flatten(result) for result in results]
    names = {name: name.replace("_", " ") for name in flat[0]}
    rows = [[title, *(_number(result.get(name)) for result in flat)] for name, title in names.items()]
    if wide := len(results) > MOST_COLUMNS:
        rows = [list(row) for row in zip(*rows, strict=True)]
    headings = rows.pop(0) if wide else [""] * (1 + len(results))
    numbers = () if wide else range(1, 1 + len(results))
    print_table(headings, rows, title=f"{benchmark}: {model}", numbers=numbers)


def flatten(result: Mapping[str, Any]) -> dict[str, Any]:
    """{'ttft_ms': {'p50': 1.0}} -> {'ttft_ms p50': 1.0}."""
    flat: dict[str, Any] = {}
    for name, value in result.items():
        flat.update(
            {f"{name} {rank}": number for rank, number in value.items()}
            if isinstance(value, Mapping)
            else {name: value}
        )
    return flat


def _number(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
