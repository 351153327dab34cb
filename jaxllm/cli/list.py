"""`jaxllm list`: which models are on this machine, and which built-in ones could be."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.cli.table import print_table
from jaxllm.config import EngineConfig
from jaxllm.setting_values import format_bytes


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
