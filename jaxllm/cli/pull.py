"""`jaxllm pull`: download a model, so that nothing later waits for the network."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.cli.table import print_table
from jaxllm.config import EngineConfig
from jaxllm.setting_values import format_bytes


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
    from jaxllm.weights.source import list_builtin_models

    rows = [
        (row.name, row.about, format_bytes(row.nbytes), row.license, str(row.path or "–"))
        for row in list_builtin_models(config.download_dir)
    ]
    print_table(("name", "what", "size", "licence", "downloaded to"), rows)
