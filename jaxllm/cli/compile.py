"""`jaxllm compile`: make a model's executables ahead of its starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, reason
from jaxllm.setting_values import format_bytes


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
