"""`jaxllm rm`: remove a downloaded model from its cache."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from jaxllm.cli.agreement import agrees
from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.setting_values import format_bytes


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
    remove_local(config.model, config.download_dir)
    print(f"removed {model.name}")
