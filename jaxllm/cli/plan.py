"""Commands before a model is served: what would fit, and its executables made ahead."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.cli.terminal import print_table
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes, parse_bytes
from jaxllm.errors import ConfigError, reason


@takes_settings(EngineConfig)
def plan(
    config: EngineConfig,
    *,
    gpu: Annotated[str | None, Parameter(group=COMMAND_GROUP)] = None,
    memory_bandwidth: Annotated[str | None, Parameter(group=COMMAND_GROUP)] = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=(), group=COMMAND_GROUP)] = False,
) -> None:
    """Show what a model would take: weights, KV pages and the tokens they hold, compiled buckets; then every --isq.

    Args:
        gpu: A GPU to plan for in place of this machine, as h100, l40s or rtx-4090; another value lists them.
        memory_bandwidth: Bytes a second that a device reads of its memory, as 900GB; by default measured here, or
            what the maker of --gpu states.
        json_output: Print one JSON object instead of tables.
    """
    from jaxllm.engine.start.blueprint import plan_engine
    from jaxllm.engine.start.schemes import compare_schemes, known_gpu, measure_bandwidth, table_rows

    stated = None if memory_bandwidth is None else _bytes_per_second(memory_bandwidth)
    known = None if gpu is None else known_gpu(gpu)
    platform = None if known is None else known.platform(config.num_devices)
    sizes = plan_engine(config, platform).as_dict()
    bandwidth = stated or (measure_bandwidth() if known is None else known.bandwidth)
    schemes = compare_schemes(config, bandwidth, platform)
    if json_output:
        more: dict[str, Any] = {"memory_bandwidth": bandwidth, "schemes": [scheme.as_dict() for scheme in schemes]}
        more |= {} if known is None else {"gpu": known.device, "gpu_source": known.source}
        print(json.dumps(sizes | more, default=str))
        return
    rows = [(name.replace("_", " "), readable(name, value)) for name, value in sizes.items()]
    print_table(("", ""), rows, title=f"Plan for {config.model}")
    how = "measured" if known is None and not stated else "stated"
    title = f"By --isq, at {bandwidth / 1e9:,.0f} GB/s ({how}); a decode of one sequence reads all weights once a token"
    headings = ("weights", "memory", "bits", "bytes a token", "longest context", "tokens/s at most")
    print_table(headings, table_rows(schemes), title=title)
    if known is not None:
        print(f"{known.device}: {known.bandwidth / 1e9:,.0f} GB/s, says {known.source}")


def _bytes_per_second(text: str) -> int:
    try:
        found = parse_bytes(text.strip().removesuffix("/s"))
    except ValueError:
        found = 0
    if not found > 0:
        raise ConfigError(f"--memory-bandwidth is {text!r}; it must be bytes a second, as 900GB")
    return int(found)


def readable(name: str, value: Any) -> str:
    """A size as people read it: bytes in binary units, whole numbers with separators, lists on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and ("bytes" in name or "memory" in name):
        return format_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
        return "\n".join(", ".join(readable(name, item).splitlines()) for item in value)
    if isinstance(value, list | tuple):
        return ", ".join(readable("", item) for item in value) or "–"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {readable(str(key), item)}" for key, item in value.items())
    return "–" if value is None else str(value)


@takes_settings(EngineConfig)
def compile(
    config: EngineConfig,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], group=COMMAND_GROUP)],
) -> None:
    """Compile every step of a model into a folder, from which --executables starts it without compiling.

    Give the settings that it will be served with. The executables are for this version of jaxllm and of JAX, and for
    processors or devices like this machine's; anywhere else one line says what differs, and the steps are compiled.

    Args:
        output: The folder. One may hold the executables of many models and settings.
    """
    from rich.progress import Progress

    from jaxllm.engine.start.ahead import compile_ahead

    with Progress(transient=True) as progress:
        bar = progress.add_task("compiling")

        def show(keys: Iterable[Any], key: Any) -> None:
            keys = list(keys)
            progress.update(bar, total=len(keys), completed=keys.index(key), description=f"compiling {key}")

        try:
            made = compile_ahead(config, output, on_key=show)
        except OSError as error:
            raise ConfigError(f"--output is {str(output)!r}: {reason(error)}") from None
    files = [file for folder in made for file in folder.glob("*.executable")]
    size = format_bytes(sum(file.stat().st_size for file in files))
    print(f"{len(files)} executables, {size}, in {', '.join(map(str, made))}; start with --executables {output}")
